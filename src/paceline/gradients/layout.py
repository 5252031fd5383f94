"""The buckets of one plan, the slots in them, the ledger of their gradients, and the code of the status."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline import _torch
from paceline.gradients.bucket import Allocator, Bucket, empty_flat
from paceline.gradients.ledger import Ledger
from paceline.gradients.plan import BucketPlan
from paceline.gradients.portion import Portion
from paceline.gradients.slots import Slot
from paceline.gradients.status import StatusCode

# A module with this many parameters spends its time in Python calls.
MANY = 256
# In such a module, gradients up to this size are copied into the bucket together when a batch of them is ready. Larger
# ones are copied (and scaled in the same pass) as they come, so that their memory is free at once.
SMALL_NUMEL = 4096
# In other modules only the smallest gradients are copied together.
TINY_NUMEL = 1024
# A whole bucket of up to this size is scaled in one call at its end, which costs less than a call for each gradient.
SMALL_BUCKET_NUMEL = 1 << 19
# No two buckets lie on one cache line, since different ranks write them.
ALIGNMENT_BYTES = 64


class Pool:
    """Cuts buckets from a block of memory. What no longer fits, such as a bucket that moves, gets ordinary memory."""

    def __init__(self, block: Tensor) -> None:
        self._storage = block.untyped_storage()
        self._next = 0

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        start, size_bytes = self._next, numel * dtype.itemsize
        if start + size_bytes > self._storage.nbytes():
            return empty_flat(numel, dtype, device)
        self._next = start + aligned(size_bytes)
        # Each bucket has a storage of its own, whose users show whether somebody keeps a gradient of this bucket.
        return torch.empty(0, dtype=dtype).set_(self._storage[start : start + size_bytes], 0, (numel,), (1,))


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Layout:
    """Where each parameter's gradient lives while ``plan`` is in force.

    ``wrapper`` is the number of the wrapper in its group.

    ``slots`` maps the id of each parameter to its slot. Slots that the plan leaves out are in no bucket. ``ledger`` is
    the ledger of an earlier plan for the same parameters, if there was one.
    """

    def __init__(
        self,
        plan: BucketPlan,
        slots: Mapping[int, Slot],
        *,
        n_ranks: int,
        wrapper: int,
        copy_in_batches: bool,
        ledger: Ledger | None = None,
    ) -> None:
        self.plan = plan
        self.allocator: Allocator = empty_flat
        self.sharing_is_settled = False
        """Whether the layout has tried to put its buckets into memory that the ranks share."""
        self.optimizers_taken = 0
        """How many optimizers ran in backward when we last looked."""
        slot_of = {slot.index: slot for slot in slots.values()}
        for slot in slot_of.values():
            slot.view, slot.bucket, slot.accumulator = None, -1, None
        self.buckets = [Bucket(spec, [slot_of[i] for i in spec.params]) for spec in plan.buckets]
        self.slots = sorted((s for b in self.buckets for s in b.slots), key=lambda slot: slot.index)
        """The slots by position: the parameters that the plan reduces, in registration order."""
        self.ledger = ledger or Ledger(plan, [slot.index for slot in self.slots])
        for position, slot in enumerate(self.slots):
            slot.position = position
        limit = SMALL_NUMEL if len(self.slots) >= MANY else TINY_NUMEL
        for bucket in self.buckets:
            scaled_at_end = bucket.spec.numel <= SMALL_BUCKET_NUMEL
            for slot in bucket.slots:
                slot.bucket = bucket.spec.index
                small = copy_in_batches or slot.local.numel() <= limit
                slot.deferred = (small or scaled_at_end) and not bucket.spec.sparse
                # Looking at a portion's gradient may be a collective of its mesh ([Note: portions] in portion.py). It
                # has to happen at the same moment on all ranks of the mesh. In batches it would not, because portions
                # differ in size between these ranks, and so would the batches.
                slot.immediate = not small or bucket.spec.sparse or isinstance(slot.param, Portion)
            # Going by the order seen so far, this gradient completes the bucket.
            bucket.slots[-1].immediate = True
        self.status_code = StatusCode(
            n_ranks=n_ranks, n_buckets=len(self.buckets), n_params=len(self.slots), wrapper=wrapper
        )

    def used_ids(self) -> set[int]:
        """The ids of the parameters that got a gradient since the last synchronisation."""
        return {id(slot.leaf) for slot in self.slots if self.ledger.used[slot.position]}

    def mark_used(self, param_ids: set[int]) -> None:
        self.ledger.used = [float(id(slot.leaf) in param_ids) for slot in self.slots]

    def why_not_early(self, slot: Slot) -> str | None:
        """Why nothing is gained by taking a slot's gradient before autograd brings it; None if something is."""
        if isinstance(slot.param, Portion):
            return "it is a DTensor, whose gradient is brought to its placement first"
        if slot.bucket < 0:
            return "no rank used it in the first step (skip_all_reduce_unused_params)"
        if self.buckets[slot.bucket].spec.sparse:
            return "its gradient is sparse"
        if len(self.buckets) == 1:
            return "there is one bucket, which leaves when backward has ended"
        return None

    def take_optimizers(self) -> None:
        """Take over the optimizers that run in backward: from now on we call them, with the averaged gradient."""
        self.optimizers_taken = _torch.optimizers_in_backward()
        for slot in self.slots:
            slot.steps_in_backward = _torch.take_optimizers_in_backward(slot.leaf)

    def share(self, allocate: Callable[[int], Tensor | None]) -> None:
        """Move the buckets into memory that the ranks share. This is a collective, once in the life of a layout.

        ``allocate`` takes a size in bytes and returns memory of that size, or None on all ranks alike.
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
        # There is room for the status even while a comm hook keeps it from travelling there, since hooks come and go.
        return self.status_code.numel if bucket is self.buckets[-1] else 0

    def prepare_storage(self, *, is_stable: bool) -> None:
        """Give every bucket storage that nobody else looks at.

        ``is_stable`` says that the user promised not to keep gradients, so there is no need to look who does.
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
