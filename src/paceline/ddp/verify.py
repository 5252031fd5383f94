"""``verify_every=N``: every N steps, ranks compare what they hold, so that replicas that have parted are noticed.

At the end of every N-th synchronised backward, ranks compare digests of what they hold: parameters, buffers, the
optimizer's state and options, the gradients that were just averaged, and those that the optimizer was given last. So
the error can say which of them parted first. Buffers are compared as they are after their broadcast: what a forward
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
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.control import Channel
from paceline.control.digest import combine, digest
from paceline.control.replicas import NO_OPINION, Difference, Held, compare
from paceline.errors import ReplicaMismatchError

PARAMETER, BUFFER, OPTIMIZER, GRADIENT, GIVEN = (
    "parameter",
    "buffer",
    "optimizer state of",
    "averaged gradient of",
    "gradient given to the optimizer of",
)


class Verifier:
    """Compares the replicas of one wrapper now and then."""

    def __init__(self, module: nn.Module, *, every: int, ignored: frozenset[str]) -> None:
        self.every = every
        self.last_equal = 0
        """The step after whose backward the replicas were last seen to be equal; 0 if that was when they were made."""
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._steps = 0
        # They are in the order of their first steps, which is the same on all ranks. A set would have its own order.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._given: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        # A closure runs backward inside of the step, so the gradients are there only after the step.
        ref = weakref.ref(self)
        for register, after in ((register_optimizer_step_pre_hook, False), (register_optimizer_step_post_hook, True)):
            handle = register(_step_hook(ref, with_closure=after))
            weakref.finalize(self, handle.remove).atexit = False

    def is_due(self, steps: int) -> bool:
        """Whether replicas are compared once ``steps`` backwards are over."""
        return steps % self.every == 0

    def see_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Remember the buffers that were just broadcast, if they will be compared in this step."""
        if self.is_due(self._steps + 1):
            self._buffers = {name: digest(buffer) for name, buffer in buffers.items()}

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Remember the gradients that an optimizer is about to use, or has just used."""
        module = self._module()
        if module is None:
            return
        used = {id(param) for group in optimizer.param_groups for param in group["params"]}
        params = {name: param for name, param in self._params(module).items() if id(param) in used}
        if params:
            self._optimizers.setdefault(optimizer)
            if self.is_due(self._steps + 1):
                self._given |= {name: digest(p.grad) for name, p in params.items() if p.grad is not None}

    def backward_ended(self, steps: int, channel: Channel, takes_part: bool) -> None:
        """Compare replicas if it is time to, and raise on all ranks if they differ.

        A rank that has run out of inputs does not take part, as it gets the others' state only at the end of ``join``.
        """
        self._steps = steps
        module = self._module()
        if module is None or not self.is_due(steps):
            return
        params = self._params(module)
        rows: dict[Held, Tensor] = {Held(PARAMETER, name): digest(param) for name, param in params.items()}
        buffers = [name for name, _ in module.named_buffers() if name not in self._ignored]
        rows |= {Held(BUFFER, name): self._opinion(self._buffers.get(name)) for name in buffers}
        states = optimizer_digests(params, list(self._optimizers))
        rows |= {Held(OPTIMIZER, name): self._opinion(states.get(name)) for name in params}
        rows |= {Held(GIVEN, name): self._opinion(self._given.get(name)) for name in params}
        rows |= {Held(GRADIENT, name): _of_gradient(param) for name, param in params.items()}
        self._given, self._buffers = {}, {}
        digests = torch.stack([row.cpu() for row in rows.values()])
        if not takes_part:
            digests.fill_(NO_OPINION)
        found = compare(channel, list(rows), digests)
        if found is None:
            self.last_equal = steps
            return
        raise ReplicaMismatchError(self._describe(found, steps))

    def _describe(self, found: Difference, steps: int) -> str:
        since = f"after step {self.last_equal}" if self.last_equal else "when the module was wrapped, if they ever were"
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
            first = "The gradients of this step are equal: something else has written to that tensor on some rank."
        return f"Replicas differ in step {steps}; they were last equal {since}. The first difference: {found}. {first}"

    def _params(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: param for name, param in module.named_parameters() if name not in self._ignored}

    def _opinion(self, found: Tensor | None) -> Tensor:
        return torch.tensor(NO_OPINION, device="cpu") if found is None else found


def _step_hook(ref: weakref.ref[Verifier], *, with_closure: bool) -> Any:
    """A hook for steps that get a closure, or for those that get none."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        verifier = ref()
        has_closure = any(callable(argument) for argument in (*args[1:2], kwargs.get("closure")))
        if verifier is not None and has_closure is with_closure:
            verifier.see_optimizer(optimizer)

    return hook


def _of_gradient(param: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=param.device) if param.grad is None else digest(param.grad)


def optimizer_digests(params: Mapping[str, Tensor], optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """For each parameter, a digest of what optimizers remember of it and of their options for it."""
    names = {id(param): name for name, param in params.items()}
    found: dict[str, list[Tensor | int]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = [_of_value(group[key]) for key in sorted(group) if key != "params"]
            for param in group["params"]:
                if id(param) in names and param in optimizer.state:
                    state = optimizer.state[param]
                    parts = [_of_value(state[key]) for key in sorted(state, key=str)]
                    found.setdefault(names[id(param)], []).extend([*options, *parts])
    return {name: combine(parts) for name, parts in found.items()}


def _of_value(value: object) -> Tensor | int:
    if isinstance(value, Tensor):
        return digest(value)
    # Only plain values count. The text of another one may hold an address, which differs between equal replicas.
    plain = isinstance(value, (int, float, bool, str, tuple, type(None)))
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little") if plain else 0
