"""Proof that replicas are alike: ``verify_every=N``, and ``paceline.assert_replicas_equal``.

Every N-th synchronised backward, at its end, ranks compare digests of what they hold: parameters, buffers, the
optimizer's state and options, the gradients that were just averaged, and those that the optimizer was given last. So
the error can say which of them parted first. Buffers are compared as they are after they were broadcast: what a forward
does to them after that is each rank's own.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline import _torch
from paceline.control import Channel
from paceline.control.digest import combine, digest
from paceline.control.replicas import NO_OPINION, Difference, Item, compare
from paceline.errors import ReplicaMismatchError, StateError
from paceline.options import choose_group

PARAMETER, BUFFER, OPTIMIZER, GRADIENT, GIVEN = (
    "parameter",
    "buffer",
    "optimizer state of",
    "averaged gradient of",
    "gradient given to the optimizer of",
)


class Verifier:
    """Compares the replicas of one wrapper now and then."""

    def __init__(self, module: nn.Module, *, every: int, ignored: frozenset[str], device: torch.device) -> None:
        self.every = every
        self.last_equal = 0
        """The step after whose backward the replicas were last seen to be equal; 0: when they were made."""
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._device = device
        self._steps = 0
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._given: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        handle = register_optimizer_step_pre_hook(_step_hook(weakref.ref(self)))
        weakref.finalize(self, handle.remove).atexit = False

    def is_due(self, steps: int) -> bool:
        """Whether replicas are compared once ``steps`` backwards are over."""
        return steps % self.every == 0

    def see_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Forward has just made these alike."""
        if self.is_due(self._steps + 1):
            self._buffers = {name: digest(buffer) for name, buffer in buffers.items()}

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to use the gradients."""
        module = self._module()
        if module is None:
            return
        used = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = {name: param for name, param in self._params(module).items() if id(param) in used}
        if params:
            self._optimizers.add(optimizer)
            if self.is_due(self._steps + 1):
                self._given |= {name: digest(p.grad) for name, p in params.items() if p.grad is not None}

    def backward_ended(self, steps: int, channel: Channel, takes_part: bool) -> None:
        """Compare, if it is time to; raises on all ranks if replicas differ.

        A rank that has run out of inputs does not take part: it gets the others' state only at the end of ``join``.
        """
        self._steps = steps
        module = self._module()
        if module is None or not self.is_due(steps):
            return
        params = self._params(module)
        rows: dict[Item, Tensor] = {Item(PARAMETER, name): digest(param) for name, param in params.items()}
        rows |= {Item(BUFFER, name): self._opinion(self._buffers.get(name)) for name in self._buffer_names(module)}
        states = optimizer_digests(params, list(self._optimizers), self._device)
        rows |= {Item(OPTIMIZER, name): self._opinion(states.get(name)) for name in params}
        rows |= {Item(GIVEN, name): self._opinion(self._given.get(name)) for name in params}
        rows |= {Item(GRADIENT, name): _of_gradient(param) for name, param in params.items()}
        self._given, self._buffers = {}, {}
        digests = torch.stack([row.to(self._device) for row in rows.values()])
        if not takes_part:
            digests.fill_(NO_OPINION)
        found = compare(channel, list(rows), digests)
        if found is None:
            self.last_equal = steps
            return
        raise ReplicaMismatchError(self._describe(found, steps))

    def _describe(self, found: Difference, steps: int) -> str:
        since = f"after step {self.last_equal}" if self.last_equal else "when the module was wrapped, if then"
        parts = found.parts()
        if parts & {GIVEN, GRADIENT}:
            part = GIVEN if GIVEN in parts else GRADIENT
            name = next(item.name for item in found.items if item.part == part)
            first = (
                f"Gradients parted first: the {part} {name!r} differs. Look at comm hooks, and at what changes .grad "
                "between backward and the optimizer (clipping, scaling)."
            )
        elif parts & {PARAMETER, OPTIMIZER} and self._optimizers:
            first = (
                "The optimizer parted first, or something else that writes parameters: in the last step it was given "
                "equal gradients. Look for options (learning rate, weight decay) and random numbers that differ."
            )
        else:
            first = "The gradients of this step are equal: something else has written to it on some rank."
        return f"Replicas differ in step {steps}; they were last equal {since}. The first is {found}. {first}"

    def _params(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: param for name, param in module.named_parameters() if name not in self._ignored}

    def _buffer_names(self, module: nn.Module) -> list[str]:
        return [name for name, _ in module.named_buffers() if name not in self._ignored]

    def _opinion(self, found: Tensor | None) -> Tensor:
        return torch.tensor(NO_OPINION, device=self._device) if found is None else found


def _step_hook(ref: weakref.ref[Verifier]) -> Any:
    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        verifier = ref()
        if verifier is not None:
            verifier.see_optimizer(optimizer)

    return hook


def _of_gradient(param: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=param.device) if param.grad is None else digest(param.grad)


def optimizer_digests(
    params: Mapping[str, Tensor], optimizers: list[Optimizer], device: torch.device
) -> dict[str, Tensor]:
    """A digest a parameter of what optimizers remember of it and do with it."""
    names = {id(param): name for name, param in params.items()}
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = [_of_value(group[key]) for key in sorted(group) if key != "params"]
            for param in group["params"]:
                if id(param) in names and param in optimizer.state:
                    state = optimizer.state[param]
                    parts = [_of_value(state[key]) for key in sorted(state, key=str)]
                    found[names[id(param)]] = combine([*options, *parts], device=device)
    return found


def _of_value(value: object) -> Tensor | int:
    if isinstance(value, Tensor):
        return digest(value)
    # Numbers, flags, pairs of them; the text of anything else may hold an address, which says nothing.
    plain = isinstance(value, (int, float, bool, str, tuple, type(None)))
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little") if plain else 0


def assert_replicas_equal(model: nn.Module, *, optimizer: Optimizer | None = None) -> None:
    """Raise ``ReplicaMismatchError`` on all ranks unless ``model`` is the same to the bit on all of them.

    A collective over the wrapper's group, or the default group for a module that is not wrapped. Compares parameters
    and buffers, and the state and options of ``optimizer`` if given. To do it regularly: ``DDP(verify_every=N)``.

    >>> import torch, paceline
    >>> world = paceline.init()
    >>> model = paceline.DDP(torch.nn.Linear(4, 2))
    >>> paceline.assert_replicas_equal(model)
    >>> paceline.shutdown()
    """
    channel, module, ignored = _parts_of(model)
    params = {name: param for name, param in module.named_parameters() if name not in ignored}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
    device = next(iter([*params.values(), *buffers.values()]), torch.empty(0)).device
    rows: dict[Item, Tensor] = {Item(PARAMETER, name): digest(param) for name, param in params.items()}
    rows |= {Item(BUFFER, name): digest(buffer) for name, buffer in buffers.items()}
    if optimizer is not None:
        states = optimizer_digests(params, [optimizer], device)
        none = torch.tensor(NO_OPINION, device=device)
        rows |= {Item(OPTIMIZER, name): states.get(name, none) for name in params}
    found = compare(channel, list(rows), torch.stack([row.to(device) for row in rows.values()])) if rows else None
    if found is not None:
        raise ReplicaMismatchError(f"Replicas differ. The first is {found}.")


def _parts_of(model: nn.Module) -> tuple[Channel, nn.Module, frozenset[str]]:
    from paceline.module import DistributedDataParallel  # here: the wrapper itself uses what is above

    if isinstance(model, DistributedDataParallel):
        return model.channel, model.module, frozenset(model.parameters_to_ignore)
    if any(map(_torch.is_dtensor, model.parameters())):
        raise StateError(
            "This module has DTensor parameters, of which ranks hold different parts: only ranks of a wrapper's group "
            "can be compared. Give the wrapper instead of its module."
        )
    return Channel(choose_group(None, None)), model, frozenset()
