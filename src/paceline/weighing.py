"""Weighted averages: ``sum(weight * gradient) / sum(weight)`` over ranks and over backwards."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bucket import Slot
from paceline.status import Status


class Weighing:
    """How much this rank's gradients weigh since the last synchronisation."""

    def __init__(self) -> None:
        self.weight: float | None = None
        """What each backward of the ``weighted`` block that is open weighs."""
        self.by_participants = False
        """Divide by the ranks that still have inputs (``join``): they weigh 1 each, the others nothing."""
        self.total = 0.0
        self._weighed = False

    @property
    def active(self) -> bool:
        """Whether sums are to be divided by the weights afterwards, instead of by the ranks beforehand."""
        return self._weighed or self.by_participants

    def begin_backward(self, slots: Sequence[Slot]) -> None:
        if self.weight is not None and not self.total:
            # What the gradients hold from before was not weighted: it is set aside until afterwards.
            for slot in slots:
                if slot.param.grad is not None and slot.base is None:
                    slot.base, slot.param.grad = slot.param.grad.clone(), None
        self._weighed = self._weighed or self.weight is not None
        self.total += 1.0 if self.weight is None else self.weight

    def take_no_part(self) -> None:
        """A rank that has run out of inputs adds nothing."""
        self.total = 0.0

    def end_backward(self) -> None:
        self.total, self._weighed = 0.0, False

    @staticmethod
    def factor(status: Status, *, divided_by: int) -> float | None:
        """What sums that were ``divided_by`` already are to be multiplied by; None if nobody weighed."""
        if not status.weighing:
            return None
        # No weight at all anywhere: no gradient.
        return divided_by / status.weight if status.weight else 0.0
