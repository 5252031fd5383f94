"""Weighted averages: ``sum(weight * gradient) / sum(weight)`` over ranks and over backwards."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from paceline.errors import BadArgumentError, BadTypeError, DisagreementError, StateError
from paceline.gradients.bucket import Bucket
from paceline.gradients.slots import Slot
from paceline.gradients.status import Status


class Weighing:
    """How much this rank's gradients weigh since the last synchronisation."""

    def __init__(self) -> None:
        self.weight: float | None = None
        """What each backward of the open ``weighted`` block weighs."""
        self.by_participants = False
        """Whether ranks that still have inputs weigh 1 each, and the others nothing (``join``)."""
        self.apart = False
        """Whether what an earlier sum left stays out of the next one, as some ranks no longer have it (``join``)."""
        self._begun = False
        """Whether there was a backward since the last synchronisation; its weight may be 0."""
        self._total = 0.0
        self._weighed = False
        self.abstains = False
        """Whether this rank has run out of inputs (``join``)."""
        self._adds_to_kept = False
        self._fresh: set[int] = set()
        self._mixed: list[str] = []
        self._warned = False

    @property
    def active(self) -> bool:
        """Whether sums are divided by the weights afterwards, and not by the number of ranks beforehand."""
        return self._weighed or self.by_participants

    @contextlib.contextmanager
    def block(self, weight: float, params: Iterable[Tensor]) -> Iterator[None]:
        """Let backwards inside weigh ``weight``: the gradients that they bring for ``params`` are multiplied by it."""
        if self.weight is not None:
            raise StateError("weighted() blocks cannot be nested: a backward has one weight. Multiply the weights.")
        with contextlib.ExitStack() as stack:
            for param in params:
                stack.callback(param.register_hook(lambda grad: grad * weight).remove)
            self.weight = weight
            try:
                yield
            finally:
                self.weight = None

    def share(self) -> float:
        """This rank's part of the sum of weights. If no backward was weighed, all of them together count as 1."""
        if self.abstains:
            return 0.0
        return self._total if self._weighed else 1.0

    def vote(self, n_ranks: int) -> float:
        """This rank's part of the count of ranks that weigh: either all weigh or none. Ranks without inputs abstain.

        An abstention counts as ``n_ranks + 1``, so that `check` can tell both counts from their sum.
        """
        if self.abstains:
            return float(n_ranks + 1)
        return float(self._weighed)

    def notice(self, came: Sequence[Slot], stranger: str = "") -> None:
        """A backward is about to begin. These gradients gave notice of it, so they are there already.

        Autograd has added them, in place, to what was there. If that was a gradient at rest, it lives in the bucket.
        ``stranger`` names a parameter without a slot that gave notice. What its gradient held before cannot be told.
        """
        self._fresh = {id(slot.leaf) for slot in came if slot.param.grad is not slot.view}
        self._mixed = [slot.name for slot in came if id(slot.leaf) not in self._fresh]
        self._mixed += [stranger] if stranger else []

    def begin_backward(self, slots: Sequence[Slot], *, syncing: bool) -> None:
        self.abstains = False
        if self._begun and (self._weighed or self.weight is not None or self.apart) and self._are_dropped(slots):
            # The user has thrown the gradients away, and with them what they weighed.
            self.end_backward()
            for slot in slots:
                slot.base = None
        if self.apart and not self._begun:
            self._set_apart(slots)
        if self.weight is None:
            if not syncing and not self._begun:
                self._adds_to_kept = bool(self._kept(slots))
        elif self._adds_to_kept and not self._weighed:
            raise StateError(
                "Gradients of an earlier step were there when this step began with an unweighted backward in "
                "no_sync(); now they cannot be told apart from what is to be weighed. Call zero_grad() at the start of "
                "the step, or weigh all its backwards."
            )
        elif not self._begun:
            self._set_apart(slots)
        self._fresh, self._mixed = set(), []
        self._begun = True
        self._weighed = self._weighed or self.weight is not None
        self._total += 1.0 if self.weight is None else self.weight

    def _kept(self, slots: Sequence[Slot]) -> list[Slot]:
        """The slots whose gradients held something before this backward."""
        return [slot for slot in slots if slot.param.grad is not None and id(slot.leaf) not in self._fresh]

    def _are_dropped(self, slots: Sequence[Slot]) -> bool:
        """Whether ``zero_grad()`` was called, in either way."""
        grads = (slot.param.grad for slot in self._kept(slots))
        return all(grad is None or (grad.layout is torch.strided and not grad.any()) for grad in grads)

    def _set_apart(self, slots: Sequence[Slot]) -> None:
        """Keep what gradients hold from an earlier synchronisation out of the sum; it is added afterwards."""
        if self._mixed:
            names = ", ".join(self._mixed)
            raise StateError(
                f"This backward did not come through the wrapper's forward, and {names} still had the gradient of an "
                "earlier step when it began. So weighted() and join() cannot tell the old gradient from the new one. "
                "Call zero_grad() at the start of the step, or call the wrapper instead of its module."
            )
        for slot in self._kept(slots):
            if slot.base is None and slot.param.grad is not None:
                slot.base, slot.param.grad = slot.param.grad.clone(), None

    def take_no_part(self) -> None:
        """Add nothing: this rank has run out of inputs."""
        self._begun, self._total, self._weighed, self.abstains = False, 0.0, False, True

    def end_backward(self) -> None:
        self._begun, self._total, self._weighed, self.abstains, self._adds_to_kept = False, 0.0, False, False, False

    def check(self, status: Status, *, n_ranks: int, rank: int) -> None:
        """Raise on all ranks if some weighed and some did not."""
        abstained, weighed = divmod(int(status.weighing), n_ranks + 1)
        if weighed not in (0, n_ranks - abstained):
            raise DisagreementError(
                f"{weighed} of {n_ranks - abstained} ranks weighed their backward and the others did not (this rank, "
                f"{rank}, {'did' if self._weighed else 'did not'}). Use `with ddp.weighted(n):` around backward on "
                "every rank or on none."
            )

    def factor(self, status: Status, *, n_ranks: int, divided_by: int) -> float | None:
        """The factor for sums that were divided by ``divided_by`` already; None if nobody weighed."""
        weighed = int(status.weighing) % (n_ranks + 1)
        if not weighed and not self.by_participants:
            return None
        # If all weights are 0, the gradients are 0.
        return divided_by / status.weight if status.weight else 0.0

    def warn_of_overflow(self, buckets: Sequence[Bucket], sent_as: torch.dtype | None) -> None:
        """Say once that weighed gradients were too large for float16, in which they travelled.

        ``sent_as`` is the dtype in which buckets travel; None stands for their own. They could not be divided by the
        sum of the weights before they left, as it is known only when they have come back.
        """
        if self._warned or not self._weighed:
            return
        for bucket in buckets:
            payload = bucket.payload
            if payload is None or (sent_as or payload.dtype) is not torch.float16 or payload.isfinite().all():
                continue
            self._warned = True
            warnings.warn(
                f"A gradient in {bucket.describe()} is infinite or not a number after weighted(): in float16, in which "
                "it travels, weight times gradient has to be less than 65504. Unless it was so before, weigh by a "
                "fraction, such as weighted(n / 1024): only the ratio of the weights matters.",
                stacklevel=2,
            )
            return


def as_weight(weight: object) -> float:
    """``weight`` as a number; raises if nothing can be weighed by it."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise BadTypeError(f"A weight must be a number, not {weight!r}.")
    if not 0 <= weight < float("inf"):
        raise BadArgumentError(f"A weight must be a finite number of at least 0, not {weight!r}.")
    return float(weight)
