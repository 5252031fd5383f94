"""Gradients that have become ready and have not been looked at yet.

A hook on each parameter drops its slot here, and the recipient is handed the slots in batches. With a thousand small
parameters that is the difference between calling Python code a thousand times a step and thirty times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline import _torch
from paceline.gradients.slots import Slot, Slots
from paceline.reduction.gradient_hooks import HookKey, HookTable, add_hook, table_of
from paceline.reduction.one_thread import OneThread

# The most gradients in a batch. It bounds the memory of gradients that are ready and not yet in their buckets.
BATCH = 32
# A backward needs most memory when it begins, with all activations alive: there a gradient must not wait. For each
# GROWTH gradients that have come, activations have been freed, and one more gradient may wait.
GROWTH = 4


class Recipient(Protocol):
    @property
    def slots(self) -> Slots: ...

    def gradients_ready(self, slots: list[Slot]) -> None:
        """Look at the gradients of these slots, which have become ready in this order."""

    def brings_more(self, slot: Slot) -> bool:
        """The stand-in of a gradient that was taken early has come. Say whether something else came with it."""

    def stranger_ready(self, param: Tensor) -> None:
        """Hear that a parameter has a gradient, though it was frozen or not there when the roster was last read."""


class _Key(HookKey):
    """The key of one inbox. It refers to the inbox weakly, because hooks must not keep an inbox alive."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = weakref.ref(inbox)

    def averages(self, param: Tensor) -> bool:
        inbox = self._inbox()
        return inbox is not None and inbox.averages(param)

    def share(self) -> None:
        inbox = self._inbox()
        recipient = None if inbox is None else inbox.recipient()
        if recipient is not None:
            recipient.slots.shared = True

    def own(self, param_id: int) -> None:
        inbox = self._inbox()
        if inbox is not None:
            inbox.own(param_id)


class _Listening(NamedTuple):
    """What belongs to a parameter that has a hook of ours.

    A stranger has no slot, and is not kept alive. It is the table that is referred to weakly, which lives as long as
    the parameter: torch does not swap the contents of a tensor that has a weak reference.
    """

    slot: Slot | None
    table: Callable[[], HookTable | None]


class Inbox:
    """The slots whose gradients have come, in order. It decides when the recipient gets them."""

    def __init__(self, recipient: Recipient) -> None:
        # The reference is weak: a wrapper that is dropped must take its hooks off the module at once, and not when
        # the garbage collector comes by.
        self.recipient = weakref.ref(recipient)
        self._slots: list[Slot] = []
        self._listening: dict[int, _Listening] = {}
        """By the id of the parameter."""
        self._key = _Key(self)
        self.limit = 1
        """How many gradients make a batch. It is 1 between backwards, so that the next backward is noticed at once."""
        self.thread = OneThread()
        self._in_backward = False
        self._averaging = False
        self._came = 0
        self._stranger_hook = self._make_stranger_hook()
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

    def begin_backward(self, *, averaging: bool = False) -> None:
        self._in_backward, self._averaging = True, averaging

    def end_backward(self) -> None:
        self._in_backward, self._averaging, self.limit, self._came = False, False, 1, 0

    def averages(self, param: Tensor) -> bool:
        """Whether the gradient of ``param`` is averaged at the end of the backward that runs."""
        heard = self._listening.get(id(param))
        slot = None if heard is None else heard.slot
        return self._averaging and slot is not None and slot.owned and slot.bucket >= 0

    def take_over(self) -> set[int]:
        """Own all parameters that have a hook of ours; return their ids."""
        for param_id, heard in self._listening.items():
            if (table := heard.table()) is not None:
                table.owner = self._key
            self.own(param_id)
        return set(self._listening)

    def own(self, param_id: int) -> None:
        """Reduce the parameter with this id from now on, if it has a slot."""
        heard = self._listening.get(param_id)
        if heard is not None and heard.slot is not None:
            heard.slot.owned = True

    def listen_to(self, slots: Mapping[int, Slot], strangers: Iterable[Tensor] = ()) -> None:
        """Have hooks on the parameters of exactly these slots, given by the parameter's id, and on ``strangers``.

        A stranger is a parameter that is not reduced at the moment, because it is frozen. If the program calls the
        module and not the wrapper, only this hook can tell that the parameter is trained again.
        """
        listening, key = self._listening, self._key
        without_slot = {id(param): param for param in strangers if id(param) not in slots}
        for param_id in listening.keys() - slots.keys() - without_slot.keys():
            _take_out(listening.pop(param_id), key, param_id)
        for param_id, param in without_slot.items():
            if param_id not in listening or listening[param_id].slot is not None:
                self.listen_to_stranger(param)
        hook_of = self._hook_maker()
        hook: Callable[[Tensor], None] | None = None
        for param_id, slot in slots.items():
            if param_id not in listening or listening[param_id].slot is not slot:
                hook = hook_of(slot)
                table = add_hook(slot.leaf, key, hook)
                listening[param_id] = _Listening(slot, _strong_ref(table))
                slot.owned = table.owner is key
        if hook is not None:
            # Marking one hook is enough, since the mark is on the code that they share.
            _torch.unseen_by_compiler(hook)

    def listen_to_stranger(self, param: Tensor) -> None:
        """Have a hook on ``param``, which has no slot."""
        listening, param_id = self._listening, id(param)
        # A program may put new parameters into the module again and again, so those that are gone are forgotten.
        table = add_hook(param, self._key, self._stranger_hook)
        listening[param_id] = _Listening(None, weakref.ref(table, lambda ref: _forget(listening, param_id, ref)))

    def stop_listening(self) -> None:
        _remove_all(self._listening, self._key)

    def hook(self, slot: Slot) -> Callable[[Tensor], None]:
        """What autograd calls when the slot's gradient is ready."""
        return self._hook_maker()(slot)

    def _make_stranger_hook(self) -> Callable[[Tensor], None]:
        ref, key = self.recipient, self._key

        @_torch.unseen_by_compiler
        def stranger_ready(param: Tensor) -> None:
            recipient = ref()
            if recipient is not None and table_of(param).owner is key:
                recipient.stranger_ready(param)

        return stranger_ready

    def _hook_maker(self) -> Callable[[Slot], Callable[[Tensor], None]]:
        # There may be thousands of hooks. They have all this in common, and only the slot is their own.
        slots, append, thread = self._slots, self._slots.append, self.thread

        def hook(slot: Slot) -> Callable[[Tensor], None]:
            def grad_ready(param: Tensor) -> None:
                if not slot.owned:
                    return
                if get_ident() != thread.ident:
                    thread.enter()
                if slot.awaits_stand_in:
                    # This cannot wait: the stand-in must be gone before autograd adds something else to it.
                    recipient = self.recipient()
                    if recipient is None or not recipient.brings_more(slot):
                        return
                append(slot)
                if slot.immediate or len(slots) >= self.limit:
                    recipient = self.recipient()
                    if recipient is not None:
                        recipient.gradients_ready(self.take())

            return grad_ready

        return hook


def _remove_all(listening: dict[int, _Listening], key: HookKey) -> None:
    for param_id, heard in listening.items():
        _take_out(heard, key, param_id)
    listening.clear()


def _strong_ref(table: HookTable) -> Callable[[], HookTable]:
    """What is called as a weak reference is, and keeps the table."""
    return lambda: table


def _take_out(heard: _Listening, key: HookKey, param_id: int) -> None:
    table = heard.table()
    if table is not None:
        table.take_out(key, param_id)


def _forget(listening: dict[int, _Listening], param_id: int, ref: weakref.ref[HookTable]) -> None:
    # The id may be that of another parameter by now.
    if param_id in listening and listening[param_id].table is ref:
        del listening[param_id]
