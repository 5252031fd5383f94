"""What is done with buckets that have come back: late contributions, weights, and giving gradients out."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bucket import Bucket, Slot
from paceline.courier import Courier
from paceline.status import Status


def send_late(buckets: Sequence[Bucket], status: Status, *, courier: Courier, scale: float) -> None:
    """[Note: late gradients]: send the buckets again for which some rank has a late contribution."""
    for bucket, ranks in zip(buckets, status.late, strict=True):
        if not ranks:
            continue
        if bucket.spec.sparse:
            courier.start_sparse(bucket, bucket.slots[0].late, scale=scale, is_last=False)()
            continue
        assert bucket.payload is not None
        scratch = bucket.lay_out_late(scale)
        courier.start(bucket, scratch, is_last=False)()
        bucket.payload.add_(scratch)


def multiply(buckets: Sequence[Bucket], factor: float) -> None:
    """Scale what the buckets hold."""
    for bucket in buckets:
        if bucket.payload is not None:
            bucket.payload.mul_(factor)
        elif bucket.slots[0].view is not None:
            bucket.slots[0].view = bucket.slots[0].view * factor


def hand_out(slots: Sequence[Slot], used: Sequence[float] | None) -> None:
    """Give every parameter its gradient back: averaged if anybody used it, untouched if nobody did.

    ``used`` is by place; None if all were used by all and nothing else is to be seen to.
    """
    if used is None:
        for slot in slots:
            slot.param.grad = slot.view
            slot.filled = False
        return
    for slot, count in zip(slots, used, strict=True):
        if slot.owned:
            slot.hand_out(used=bool(count))
        slot.base = None
        slot.forget()
