"""The buckets of one plan with the slots in them, what is known of those, and the status that rides with the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline import _torch
from paceline.bucket import SMALL_BUCKET_NUMEL, SMALL_NUMEL, TINY_NUMEL, Allocator, Bucket, Slot, empty_flat
from paceline.inbox import MANY
from paceline.ledger import Ledger
from paceline.plan import BucketPlan
from paceline.portion import Portion
from paceline.status import StatusCode

# No two buckets on one cache line: different ranks write them.
ALIGNMENT_BYTES = 64


class Pool:
    """Cuts buckets from a block; what does not fit any more, a bucket that moves say, is ordinary memory."""

    def __init__(self, block: Tensor) -> None:
        self._storage = block.untyped_storage()
        self._next = 0

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        start, size_bytes = self._next, numel * dtype.itemsize
        if start + size_bytes > self._storage.nbytes():
            return empty_flat(numel, dtype, device)
        self._next = start + aligned(size_bytes)
        # A storage of its own: by its users one sees whether somebody keeps a gradient of this bucket.
        return torch.empty(0, dtype=dtype).set_(self._storage[start : start + size_bytes], 0, (numel,), (1,))


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Layout:
    """Where each parameter's gradient lives while ``plan`` is in force.

    ``slots`` is by the id of the parameter; those that the plan leaves out are in no bucket. ``ledger`` is that of an
    earlier plan for the same parameters, if there was one.
    """

    def __init__(
        self,
        plan: BucketPlan,
        slots: Mapping[int, Slot],
        *,
        n_ranks: int,
        copy_in_batches: bool,
        ledger: Ledger | None = None,
    ) -> None:
        self.plan = plan
        self.allocator: Allocator = empty_flat
        self.sharing_is_settled = False
        """Whether it has been tried to put the buckets into memory that the ranks share."""
        self.optimizers_taken = 0
        """How many optimizers that run in backward there were when we last looked."""
        slot_of = {slot.index: slot for slot in slots.values()}
        for slot in slot_of.values():
            slot.view, slot.bucket, slot.accumulator = None, -1, None
        self.buckets = [Bucket(spec, [slot_of[i] for i in spec.params]) for spec in plan.buckets]
        self.slots = sorted((s for b in self.buckets for s in b.slots), key=lambda slot: slot.index)
        """By place: the trainable parameters of the plan in registration order."""
        self.ledger = ledger or Ledger(plan, [slot.index for slot in self.slots])
        for place, slot in enumerate(self.slots):
            slot.place = place
        limit = SMALL_NUMEL if len(self.slots) >= MANY else TINY_NUMEL
        for bucket in self.buckets:
            scaled_at_end = bucket.spec.numel <= SMALL_BUCKET_NUMEL
            for slot in bucket.slots:
                slot.bucket = bucket.spec.index
                small = copy_in_batches or slot.local.numel() <= limit
                slot.deferred = (small or scaled_at_end) and not bucket.spec.sparse
                # To look at a part's gradient may be a collective of its own mesh ([Note: portions] in portion.py): one
                # moment on all ranks of that, though the parts, and so their batches, differ in size.
                slot.prompt = not small or bucket.spec.sparse or isinstance(slot.param, Portion)
            # The gradient that completes a bucket, going by the order seen so far.
            bucket.slots[-1].prompt = True
        self.status_code = StatusCode(n_ranks=n_ranks, n_buckets=len(self.buckets), n_params=len(self.slots))

    def used_ids(self) -> set[int]:
        """The parameters (by id) that got a gradient since the last synchronisation."""
        return {id(slot.leaf) for slot in self.slots if self.ledger.used[slot.place]}

    def mark_used(self, param_ids: set[int]) -> None:
        self.ledger.used = [float(id(slot.leaf) in param_ids) for slot in self.slots]

    def take_optimizers(self) -> None:
        """Optimizers that run in backward are to find the averaged gradient: from now on we call them."""
        self.optimizers_taken = _torch.optimizers_in_backward()
        for slot in self.slots:
            slot.steps_in_backward = _torch.take_optimizers_in_backward(slot.leaf)

    def share(self, allocate: Callable[[int], Tensor | None]) -> None:
        """Move the buckets into memory that the ranks share: a collective, once in the life of a layout.

        ``allocate`` takes a size and gives so many bytes, or None on all ranks alike.
        """
        self.sharing_is_settled = True
        dense = [bucket for bucket in self.buckets if not bucket.spec.sparse]
        if any(bucket.slots[0].local.device.type != "cpu" for bucket in dense):
            return
        numel_of = {bucket: bucket.spec.numel + self._tail_numel(bucket) for bucket in dense}
        size_bytes = sum(aligned(numel * bucket.slots[0].local.dtype.itemsize) for bucket, numel in numel_of.items())
        block = allocate(size_bytes) if size_bytes else None
        if block is None:
            return
        self.allocator = Pool(block)
        with torch.no_grad():
            for bucket in dense:
                if bucket.flat is not None:
                    bucket.renew(self.allocator)

    def _tail_numel(self, bucket: Bucket) -> int:
        # Room for the status even while a hook keeps it from riding there: hooks come and go.
        return self.status_code.numel if bucket is self.buckets[-1] else 0

    def prepare_storage(self, *, is_stable: bool) -> None:
        """See to it that every bucket has storage that nobody else looks at.

        ``is_stable``: the user promised not to keep gradients, so nobody can.
        """
        for bucket in self.buckets:
            if bucket.spec.sparse:
                bucket.slots[0].view = None
                continue
            if not is_stable and bucket.is_kept_by_somebody():
                with torch.no_grad():
                    bucket.renew(self.allocator)
            if bucket.flat is None:
                bucket.allocate(self.allocator, tail_numel=self._tail_numel(bucket))
