"""Gradients that have become ready and were not looked at yet.

A hook on each parameter drops its slot here; the reducer takes them out in batches. With a thousand small
parameters that is the difference between calling Python code a thousand times a step and thirty times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paceline import _torch
from paceline.bucket import Slot

# Bounds the memory of gradients that are ready and not yet in their buckets.
BATCH = 32
# A backward needs most memory when it begins, with all activations alive: there a gradient must not wait. With
# every so many that have come, activations have been freed, and one more may.
GROWTH = 4
# From how many parameters on it is Python calls that cost.
MANY = 256


class Reader(Protocol):
    def gradients_ready(self) -> None:
        """Take out what the inbox holds."""

    def brings_more(self, slot: Slot) -> bool:
        """What stands for a gradient that was taken early has come; whether something else came with it."""


class Inbox:
    """The slots whose gradients have come, in order, and when to call the reader."""

    def __init__(self, reader: Reader) -> None:
        # Weak: a wrapper that is dropped must take its hooks off the module at once, not when gc comes by.
        self._reader = weakref.ref(reader)
        self._slots: list[Slot] = []
        self._listening: dict[int, _torch.GradientHooks] = {}
        """By the id of each parameter whose gradients are heard of: the hooks that it has, ours among them."""
        self._key = object()
        self.limit = 1
        """Call the reader at this many: 1 between backwards, so that it hears of the next one at once."""
        self._in_backward = False
        self._came = 0
        self._finalizer = weakref.finalize(reader, _remove_all, self._listening, self._key)

    def take(self) -> list[Slot]:
        slots = self._slots.copy()
        # The list stays the same: the hooks hold its append.
        self._slots.clear()
        self._came += len(slots)
        if self._in_backward:
            self.limit = min(BATCH, 1 + self._came // GROWTH)
        return slots

    def peek(self) -> list[Slot]:
        """What :meth:`take` would take."""
        return self._slots.copy()

    def begin_backward(self) -> None:
        self._in_backward, self._came = True, 0

    def end_backward(self) -> None:
        self._in_backward, self.limit = False, 1

    def listen_to(self, slots: dict[int, Slot]) -> None:
        """Have hooks on the parameters of exactly these slots (by the parameter's id)."""
        for param_id in self._listening.keys() - slots.keys():
            self._listening.pop(param_id).pop(self._key, None)
        hook_of = self._hook_maker()
        hook: Callable[[Tensor], None] | None = None
        for param_id, slot in slots.items():
            if param_id not in self._listening:
                hook = hook_of(slot)
                hooks = self._listening[param_id] = _torch.gradient_hooks(slot.leaf)
                hooks[self._key] = hook
        if hook is not None:
            # One for all: it is their code that is marked.
            _torch.unseen_by_compiler(hook)

    def stop_listening(self) -> None:
        _remove_all(self._listening, self._key)

    def hook(self, slot: Slot) -> Callable[[Tensor], None]:
        """What autograd calls when the slot's gradient is ready."""
        return self._hook_maker()(slot)

    def _hook_maker(self) -> Callable[[Slot], Callable[[Tensor], None]]:
        # Outside: there may be thousands of hooks, and each has all this in common but for its slot.
        slots, append = self._slots, self._slots.append

        def hook(slot: Slot) -> Callable[[Tensor], None]:
            def grad_ready(param: Tensor) -> None:
                if not slot.owned:
                    return
                if slot.awaits_stand_in:
                    # At once: it must not be there when autograd has something else to add to it.
                    reader = self._reader()
                    if reader is None or not reader.brings_more(slot):
                        return
                append(slot)
                if slot.prompt or len(slots) >= self.limit:
                    reader = self._reader()
                    if reader is not None:
                        reader.gradients_ready()

            return grad_ready

        return hook


def _remove_all(listening: dict[int, _torch.GradientHooks], key: object) -> None:
    for hooks in listening.values():
        hooks.pop(key, None)
    listening.clear()
