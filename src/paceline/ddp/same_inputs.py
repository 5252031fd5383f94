"""A warning, once, if all ranks of a wrapper train on the same inputs.

Each rank makes digests of what its first training forwards are given. Then it counts up a number in the store, whose
key is made of these digests. If all ranks have the same digests, the number reaches the number of ranks, and the rank
that finds it there warns. So this costs one question to the store for each wrapper, and nothing in later steps.

It must not warn without cause. So the inputs must be the same in `FORWARDS` training forwards, and they must differ
from one forward to the next: a constant batch is a benchmark or a test. Random numbers that are drawn inside of the
module are not compared: most programs give all ranks the same seed on purpose.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.control import Channel
from paceline.control.digest import combine, digest
from paceline.control.user_code import is_user_code
from paceline.gradients.outputs import find_tensors

FORWARDS = 10
"""How many training forwards are looked at."""
# Of a large input, this many elements are enough to tell it from another one.
_ELEMENTS = 1 << 16


class SameInputs:
    """Looks at the first training forwards of one wrapper."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._digests: list[list[Tensor]] = []
        """Of each forward, those of its tensors. They are read when all are there, as reading waits for a device."""

    def see(self, inputs: Any) -> bool:
        """Look at the ``inputs`` of a training forward. Returns whether it wants to see those of the next one."""
        try:
            self._digests.append(_digests_of(inputs))
            if len(self._digests) < FORWARDS:
                return True
            found = [int(combine(digests)) for digests in self._digests]
        except Exception:
            # Inputs may be anything, such as tensors inside of a transformation, whose bytes nobody can read.
            return False
        # This is not in the block above: a program may turn warnings into errors.
        if len(set(found)) == FORWARDS and self._all_have(found):
            self._warn()
        return False

    def _all_have(self, digests: list[int]) -> bool:
        """Whether this rank is the last of all to find these digests."""
        channel = self._channel
        name = hashlib.sha256(repr(digests).encode()).hexdigest()
        store = dist.PrefixStore(f"paceline/inputs/{channel.progress.wrapper}", _torch.group_store(channel.group))
        with contextlib.suppress(dist.DistError):
            return channel.store_thread.run(store.add, name, 1) == channel.size
        return False

    def _warn(self) -> None:
        frame, level = inspect.currentframe(), 1
        while frame is not None and not is_user_code(frame.f_code.co_filename):
            frame, level = frame.f_back, level + 1
        size = self._channel.size
        warnings.warn(
            f"All {size} ranks were given the same inputs in each of the first {FORWARDS} training forwards, so that "
            f"{size} ranks learn what one would. Give each rank its own samples, for example with "
            "paceline.data.Loader. If the inputs are random numbers, give each rank its own seed after the model is "
            "built. If this is meant, ignore the warning with warnings.filterwarnings.",
            stacklevel=level,
        )


def _digests_of(inputs: Any) -> list[Tensor]:
    """Digests of all tensors in ``inputs``, each on its own device. Raises if there is none."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("What is captured into a graph is run again later, with other inputs.")
    tensors = [tensor for tensor in find_tensors(inputs) if tensor.layout is torch.strided and tensor.numel()]
    if not tensors:
        raise ValueError("There is nothing to compare.")
    return [digest(tensor.detach().flatten()[:_ELEMENTS]) for tensor in tensors]
