"""Gradients that have become ready and have not been looked at yet.

A hook on each parameter drops its slot here, and the recipient is handed the slots in batches. With a thousand small
parameters that is the difference between calling Python code a thousand times a step and thirty times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paceline import _torch
from paceline.gradients.slots import Slot

# The most gradients in a batch. It bounds the memory of gradients that are ready and not yet in their buckets.
BATCH = 32
# A backward needs most memory when it begins, with all activations alive: there a gradient must not wait. For each
# GROWTH gradients that have come, activations have been freed, and one more gradient may wait.
GROWTH = 4


class Recipient(Protocol):
    def gradients_ready(self, slots: list[Slot]) -> None:
        """Look at the gradients of these slots, which have become ready in this order."""

    def brings_more(self, slot: Slot) -> bool:
        """The stand-in of a gradient that was taken early has come. Say whether something else came with it."""


class HookKey:
    """What a hook of an inbox is registered under, so that it can be told from the hooks of others."""


def hears_alone(param: Tensor) -> bool:
    """Whether hooks of inboxes, and no hooks of others, see the accumulated gradient of ``param``."""
    keys = _torch.gradient_hook_keys(param)
    return bool(keys) and all(isinstance(key, HookKey) for key in keys)


class Inbox:
    """The slots whose gradients have come, in order. It decides when the recipient gets them."""

    def __init__(self, recipient: Recipient) -> None:
        # The reference is weak: a wrapper that is dropped must take its hooks off the module at once, and not when
        # the garbage collector comes by.
        self._recipient = weakref.ref(recipient)
        self._slots: list[Slot] = []
        self._listening: dict[int, _torch.GradientHooks] = {}
        """The hooks of each parameter that has one of ours, by the id of the parameter."""
        self._key = HookKey()
        self.limit = 1
        """How many gradients make a batch. It is 1 between backwards, so that the next backward is noticed at once."""
        self._in_backward = False
        self._came = 0
        self._finalizer = weakref.finalize(recipient, _remove_all, self._listening, self._key)

    def take(self) -> list[Slot]:
        """Take out what has come and was not handed over."""
        slots = self._slots.copy()
        # The list stays the same object, since the hooks hold its append.
        self._slots.clear()
        self._came += len(slots)
        if self._in_backward:
            self.limit = min(BATCH, 1 + self._came // GROWTH)
        return slots

    def begin_backward(self) -> None:
        self._in_backward = True

    def end_backward(self) -> None:
        self._in_backward, self.limit, self._came = False, 1, 0

    def listen_to(self, slots: dict[int, Slot]) -> None:
        """Have hooks on the parameters of exactly these slots, which are given by the parameter's id."""
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
            # Marking one hook is enough, since the mark is on the code that they share.
            _torch.unseen_by_compiler(hook)

    def stop_listening(self) -> None:
        _remove_all(self._listening, self._key)

    def hook(self, slot: Slot) -> Callable[[Tensor], None]:
        """What autograd calls when the slot's gradient is ready."""
        return self._hook_maker()(slot)

    def _hook_maker(self) -> Callable[[Slot], Callable[[Tensor], None]]:
        # There may be thousands of hooks. They have all this in common, and only the slot is their own.
        slots, append = self._slots, self._slots.append

        def hook(slot: Slot) -> Callable[[Tensor], None]:
            def grad_ready(param: Tensor) -> None:
                if not slot.owned:
                    return
                if slot.awaits_stand_in:
                    # This cannot wait: the stand-in must be gone before autograd adds something else to it.
                    recipient = self._recipient()
                    if recipient is None or not recipient.brings_more(slot):
                        return
                append(slot)
                if slot.immediate or len(slots) >= self.limit:
                    recipient = self._recipient()
                    if recipient is not None:
                        recipient.gradients_ready(self.take())

            return grad_ready

        return hook


def _remove_all(listening: dict[int, _torch.GradientHooks], key: object) -> None:
    for hooks in listening.values():
        hooks.pop(key, None)
    listening.clear()
