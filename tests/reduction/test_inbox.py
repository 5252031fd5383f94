"""The inbox: when the reader is called, and how many gradients may wait."""

from __future__ import annotations

import torch
from torch import nn

from paceline.gradients.slots import Slot, Slots
from paceline.reduction.gradient_hooks import hears_alone
from paceline.reduction.inbox import BATCH, GROWTH, Inbox


class Recipient:
    """Remembers how many gradients it was told of each time."""

    def __init__(self) -> None:
        self.slots = Slots()
        self.inbox = Inbox(self)
        self.taken: list[int] = []

    def gradients_ready(self, slots: list[Slot]) -> None:
        self.taken.append(len(slots))


def _slots(count: int) -> list[Slot]:
    slots = [Slot(str(number), nn.Parameter(torch.zeros(1))) for number in range(count)]
    for slot in slots:
        slot.immediate = False
    return slots


def _bring(reader: Recipient, slots: list[Slot]) -> None:
    for slot in slots:
        reader.inbox.hook(slot)(slot.param)


def test_no_gradient_waits_when_a_backward_begins_and_more_may_as_it_goes_on() -> None:
    """Memory peaks at the start of a backward, with all activations alive."""
    reader = Recipient()
    reader.inbox.begin_backward()
    _bring(reader, _slots(2000))
    came = 0
    for count in reader.taken:
        assert count == min(BATCH, 1 + came // GROWTH)
        came += count
    assert reader.taken[:GROWTH] == [1] * GROWTH
    assert reader.taken[-1] == BATCH


def test_between_backwards_the_reader_hears_of_every_gradient_at_once() -> None:
    reader = Recipient()
    for _ in range(2):
        reader.inbox.begin_backward()
        _bring(reader, _slots(300))
        reader.inbox.end_backward()
        reader.inbox.take()
        reader.taken.clear()
        _bring(reader, _slots(3))
        assert reader.taken == [1, 1, 1]
        reader.taken.clear()


def test_an_immediate_gradient_takes_the_waiting_ones_along() -> None:
    reader = Recipient()
    reader.inbox.begin_backward()
    _bring(reader, _slots(100))
    reader.inbox.take()
    reader.taken.clear()
    slots = _slots(3)
    slots[2].immediate = True
    _bring(reader, slots)
    assert reader.taken == [3]


def test_another_wrappers_gradient_is_left_alone() -> None:
    reader = Recipient()
    (slot,) = _slots(1)
    slot.owned = False
    _bring(reader, [slot])
    assert reader.taken == []


def test_hooks_of_others_stay_when_ours_go() -> None:
    """Those that were there before and those that came later, and whoever holds a handle can take his away."""
    reader, (slot,) = Recipient(), _slots(1)
    slot.immediate = True
    heard: list[str] = []
    slot.leaf.register_post_accumulate_grad_hook(lambda _: heard.append("before"))
    reader.inbox.listen_to({id(slot.leaf): slot})
    later = slot.leaf.register_post_accumulate_grad_hook(lambda _: heard.append("later"))
    slot.leaf.sum().backward()
    assert (heard, reader.taken) == (["before", "later"], [1])
    # A wrapper that is dropped takes its hooks along at once.
    del reader.inbox
    del reader
    later.remove()
    slot.leaf.sum().backward()
    assert heard == ["before", "later", "before"]
    assert len(slot.leaf._post_accumulate_grad_hooks) == 1


def test_hooks_of_inboxes_are_told_from_those_of_others() -> None:
    first, second, (slot,) = Recipient(), Recipient(), _slots(1)
    assert not hears_alone(slot.leaf)
    for reader in (first, second):
        reader.inbox.listen_to({id(slot.leaf): slot})
        assert hears_alone(slot.leaf)
    handle = slot.leaf.register_post_accumulate_grad_hook(lambda _: None)
    assert not hears_alone(slot.leaf)
    handle.remove()
    assert hears_alone(slot.leaf)
    first.inbox.stop_listening()
    second.inbox.listen_to({})
    assert not hears_alone(slot.leaf)


def test_a_parameter_without_hooks_takes_more_after_ours() -> None:
    reader, (slot,) = Recipient(), _slots(1)
    reader.inbox.listen_to({id(slot.leaf): slot})
    heard: list[str] = []
    slot.leaf.register_post_accumulate_grad_hook(lambda _: heard.append("later"))
    reader.inbox.listen_to({})
    slot.leaf.sum().backward()
    assert (heard, reader.taken) == (["later"], [])
