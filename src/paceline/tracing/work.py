"""The handle that ``async_op=True`` gives inside a graph."""

from __future__ import annotations

import abc
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work

from paceline import _torch
from paceline.errors import StateError
from paceline.tracing.operator_namespace import operators


class TracedWork:
    """A collective that was begun inside compiled code; has the methods of ``torch.distributed.Work``.

    It is plain Python, so the compiler traces its methods. If the handle leaves the graph, the compiler makes a real
    one, and the tensors that it waits for leave with it, still on their way.

    A tensor may not be looked at between the call and :meth:`wait`. Eager code writes to it at some moment in
    between; here it is written in :meth:`wait`, which is one of those moments.
    """

    def __init__(self, targets: list[Tensor], pending: list[Tensor], *, is_torchs: bool = False) -> None:
        """``pending`` is what ``targets`` are going to hold: one tensor for each, or one with all end to end."""
        self._targets = targets
        self._pending = pending
        self._is_torchs = is_torchs
        self._is_done = False
        self._was_asked = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Let ``isinstance(handle, dist.Work)`` be true of a handle that has left its graph."""
        return Work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended, and write its results."""
        if not self._is_done:
            self._is_done = True
            if self._is_torchs:
                arrived = [_torch.wait_tensor(tensor) for tensor in self._pending]
            else:
                arrived = operators.arrive(self._pending)
            if len(arrived) == len(self._targets):
                for target, value in zip(self._targets, arrived, strict=True):
                    target.detach().copy_(value.view(target.shape))
            elif self._targets:
                write_parts(self._targets, arrived[0])
            self._pending = []
        return True

    def is_completed(self) -> bool:
        """False at the first call, since the collective may not have ended yet; a second call waits.

        A graph cannot look whether it has ended. Waiting at the first call could be a deadlock, since others may need
        what this rank does next. Never waiting would be one, too, since programs ask until the answer is True.
        """
        if not self._is_done and not self._was_asked:
            self._was_asked = True
            return False
        return self.wait()

    def is_success(self) -> bool:
        """Always True after waiting; a collective that failed has raised."""
        return self.wait()

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def exception(self) -> None:
        """None: a collective that failed raises in :meth:`wait`."""

    def result(self) -> list[Tensor]:
        """The tensors that were written to."""
        self.wait()
        return self._targets

    def get_future(self) -> Any:
        """Refused: what is chained to a future runs on a thread of the backend, which no graph can describe."""
        return refuse_future(self)

    def get_future_result(self) -> Any:
        """As :meth:`get_future`."""
        return refuse_future(self)

    def source_rank(self) -> Any:
        """Refused: the sender is known only when the call runs."""
        return refuse_source(self)

    _source_rank = source_rank


class AnyWork(abc.ABC):  # noqa: B024 (nobody derives from it)
    """What ``dist.Work`` is in traced code: torch's handles and ours. torch's class cannot be subclassed in a graph."""


AnyWork.register(Work)
AnyWork.register(TracedWork)


def refuse_future(work: TracedWork) -> Any:
    """Raise outside of a graph; inside, the row of this name in ``refusals`` raises instead."""
    raise StateError(
        "a collective begun inside torch.compile has no future: call wait() on the handle and write what was "
        "chained to the future after it"
    )


def refuse_source(work: TracedWork) -> Any:
    """Raise outside of a graph, as ``refuse_future`` does."""
    raise StateError("a receive begun inside torch.compile does not know the sender: name it with src")


def write_parts(targets: list[Tensor], values: Tensor) -> None:
    """Give each target its part of ``values``, which holds them end to end."""
    flat = values.reshape(-1)
    start = 0
    for target in targets:
        size = target.numel()
        target.detach().copy_(flat[start : start + size].view(target.shape))
        start += size
