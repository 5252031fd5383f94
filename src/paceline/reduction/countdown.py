"""How many gradients the buckets of a backward still wait for: the one place that counts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.gradients.layout import Layout
from paceline.gradients.slots import Slot


class Countdown:
    """Counts the gradients that have arrived, and says which buckets may leave.

    Both kinds of backward tell it what has arrived: an eager one counts the gradients that autograd brings, and a
    compiled one those that it hands over early. No gradient is expected for the parameters with the indices ``unused``.
    """

    def __init__(self, layout: Layout, *, observing: bool = False, unused: frozenset[int] = frozenset()) -> None:
        self.arrivals = [0] * len(layout.slots)
        """How often each gradient has arrived, by position."""
        self.order: list[int] = []
        """The positions in the order in which gradients arrived, if that was to be observed."""
        self.next_bucket = 0
        """The number of the first bucket that has not left."""
        self._observing = observing
        self._slots = layout.slots
        self._left = layout.ledger.expected.copy()
        for index in unused:
            position = layout.ledger.position_of.get(index)
            if position is not None:
                self._left[position] = 0
        if 0 in self._left:
            self._bucket_left = [sum(1 for s in b.slots if self._left[s.position]) for b in layout.buckets]
        else:
            self._bucket_left = [len(b.slots) for b in layout.buckets]
        self._some_completed = False

    def arrived(self, slots: Sequence[Slot]) -> list[Slot]:
        """Count these gradients. Return those that are out of turn.

        A gradient is out of turn if its bucket has left, if it has no bucket, or if another wrapper reduces it.
        """
        # This is the hottest code there is: it sees each of a thousand small parameters in every step.
        arrivals, left, bucket_left = self.arrivals, self._left, self._bucket_left
        next_bucket, observing = self.next_bucket, self._observing
        out_of_turn: list[Slot] = []
        for slot in slots:
            position, number = slot.position, slot.bucket
            if number < next_bucket or not slot.owned:
                out_of_turn.append(slot)
                if number >= 0 and slot.owned:
                    arrivals[position] += 1
                continue
            arrivals[position] += 1
            if observing:
                self.order.append(position)
            left[position] -= 1
            if left[position] == 0:
                bucket_left[number] -= 1
                if bucket_left[number] == 0:
                    self._some_completed = True
        return out_of_turn

    def leaving(self, *, incomplete: bool = False, with_last: bool = False) -> Iterator[int]:
        """The numbers of the buckets that leave now, in the order of the plan.

        A bucket leaves when it is complete and all before it have left; with ``incomplete``, it need not be complete.
        The last one carries the status, so it leaves only ``with_last``, when the backward is over.
        """
        if not (self._some_completed or incomplete):
            return
        self._some_completed = False
        bucket_left = self._bucket_left
        end = len(bucket_left) if with_last else len(bucket_left) - 1
        while self.next_bucket < end and (incomplete or bucket_left[self.next_bucket] <= 0):
            self.next_bucket += 1
            yield self.next_bucket - 1

    def awaited(self) -> list[str]:
        """The names of the parameters whose gradients have not arrived yet."""
        return [slot.name for slot, left in zip(self._slots, self._left, strict=True) if left > 0]
