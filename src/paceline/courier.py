"""Sends buckets over the process group, in the way the user chose, and the status with the last one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import exchange, transport
from paceline.bucket import Bucket, CommHook, GradBucket, Slot
from paceline.control import Channel
from paceline.exchange import Finish
from paceline.status import CARRIERS


class Courier:
    """Starts the exchange of one bucket at a time; each start returns the function that waits for its end."""

    def __init__(self, group: dist.ProcessGroup, channel: Channel) -> None:
        self.move_to(group, channel)
        self.hook: CommHook | None = None
        self.hook_state: object = None
        self.hook_overlaps = True
        self.hook_takes_group = False
        self.reduce_dtype: torch.dtype | None = None

    def move_to(self, group: dist.ProcessGroup, channel: Channel) -> None:
        """Send over another group from now on."""
        self.group, self.channel = group, channel
        self.mean_factor = torch.tensor(1.0 / channel.size, dtype=torch.float64)
        """What makes an average of a sum, as a tensor: see ``Slot.absorb``."""

    @property
    def size(self) -> int:
        return self.channel.size

    @property
    def _state(self) -> object:
        """What the hook is given: where None stands for a group, it is the one that the buckets are averaged in."""
        is_theirs = self.hook_state is None and self.hook_takes_group and self.group is not dist.group.WORLD
        return self.group if is_theirs else self.hook_state

    def allocate(self, size_bytes: int) -> Tensor | None:
        """Memory that the group's ranks share, if it has such: a collective; None on all ranks alike."""
        what = "the sharing of memory for the buckets"
        return transport.allocate(size_bytes, group=self.group, wait=lambda work: self.channel.wait(work, what))

    def can_carry_status(self, bucket: Bucket) -> bool:
        """[Note: the last bucket carries the status]: whether this one could."""
        param = bucket.slots[0].local
        return (
            self.hook is None
            and self.reduce_dtype is None
            and not bucket.spec.sparse
            and param.dtype in CARRIERS
            and param.device.type == "cpu"
        )

    def status_device(self, device: torch.device) -> torch.device:
        """Where the status travels: on the host where the group can, as reading it must not stall a device."""
        if device.type != "cpu" and "cpu:" in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return device

    def start(self, bucket: Bucket, buffer: Tensor, *, is_last: bool) -> Finish:
        """Average (or, with a hook, whatever it does) ``buffer``, which is laid out like the bucket."""
        if self.hook is not None:
            return exchange.start_hook(
                self.hook,
                self._state,
                GradBucket(bucket, is_last=is_last, buffer=buffer),
                buffer,
                channel=self.channel,
                what=bucket.describe(),
                overlaps=self.hook_overlaps,
            )
        return exchange.start_all_reduce(
            buffer,
            group=self.group,
            channel=self.channel,
            what=bucket.describe(),
            reduce_dtype=self.reduce_dtype,
        )

    def start_status(self, numbers: Tensor) -> Finish:
        """Sum a status that travels beside the buckets."""
        if self.size == 1:
            return lambda: None
        return exchange.start_all_reduce(
            numbers, group=self.group, channel=self.channel, what="the status", reduce_dtype=None
        )

    def start_sparse(self, bucket: Bucket, grad: Tensor | None, *, scale: float, is_last: bool) -> Finish:
        """Send a sparse gradient (None: no rows); the sum is added to the slot's view."""
        (slot,) = bucket.slots
        was_dense = grad is not None and grad.layout is torch.strided
        if grad is None:
            grad = _no_rows(slot)
        elif was_dense:
            # Tied to a dense use: rows travel all the same, as the other ranks expect a sparse exchange.
            grad = grad.to_sparse(1)

        def deliver(total: Tensor) -> None:
            total = total.to_dense() if was_dense else total
            slot.view = total if slot.view is None else slot.view + total

        if self.hook is not None:
            # A copy: embeddings that are added up have gradients on the same values, and hooks divide in place.
            future = self.hook(self._state, GradBucket(bucket, is_last=is_last, buffer=grad.clone()))
            doing = f"the comm hook {exchange.hook_name(self.hook)} for {bucket.describe()}"
            return lambda: deliver(self.channel.wait_future(future, doing))
        return exchange.start_sparse_all_reduce(
            grad.detach() * scale,
            group=self.group,
            channel=self.channel,
            what=bucket.describe(),
            deliver=deliver,
        )


def _no_rows(slot: Slot) -> Tensor:
    index = torch.empty((1, 0), dtype=torch.long, device=slot.local.device)
    values = slot.local.new_empty((0, *slot.local.shape[1:]))
    return torch.sparse_coo_tensor(index, values, slot.local.shape, check_invariants=False)
