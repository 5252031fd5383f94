"""How gradients cross the ranks: by a plain all-reduce, through a comm hook, or as a sparse all-reduce.

Each ``start*`` begins the communication in the calling thread and returns a *finish*: a function that waits and leaves
the result where it belongs. What happens between the two is the overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import transport
from paceline.control import Channel
from paceline.errors import BadTypeError, DisagreementError
from paceline.gradients.bucket import Bucket
from paceline.gradients.grad_bucket import CommHook, GradBucket
from paceline.gradients.slots import Slot
from paceline.gradients.status import STATUS_DTYPES
from paceline.transport.c10d.sparse import are_coalesced

Finish = Callable[[], None]


class Exchange:
    """Sends buckets over a process group in the way that the user chose."""

    def __init__(self, group: dist.ProcessGroup, channel: Channel) -> None:
        self.move_to(group, channel)
        self.hook: CommHook | None = None
        self.hook_state: object = None
        self.hook_overlaps = True
        """Whether the hook starts all its collectives before it returns ([Note: order of collectives])."""
        self.hook_takes_group = False
        """Whether the hook's state is a process group, or None, which stands for one."""
        self.reduce_dtype: torch.dtype | None = None
        """The dtype in which buckets travel; None for their own."""

    def move_to(self, group: dist.ProcessGroup, channel: Channel) -> None:
        """Send over another group from now on."""
        self.group, self.channel = group, channel
        self.mean_factor = torch.tensor(1.0 / channel.size, dtype=torch.float64)
        """What makes an average of a sum, as a tensor: see ``bucket.absorb``."""

    def use_hook(
        self, hook: CommHook | None, state: object = None, *, overlaps: bool = True, takes_group: bool = False
    ) -> None:
        """Let ``hook`` communicate the buckets; None stands for the plain average."""
        self.hook, self.hook_state, self.hook_overlaps, self.hook_takes_group = hook, state, overlaps, takes_group

    @property
    def size(self) -> int:
        return self.channel.size

    def allocate(self, size_bytes: int) -> Tensor | None:
        """Memory that the group's ranks share. This is a collective; None on all ranks if there is no such memory."""
        what = "the sharing of memory for the buckets"
        return transport.allocate(size_bytes, group=self.group, wait=lambda work: self.channel.wait(work, what))

    # -- status --------------------------------------------------------------------------------------

    def can_carry_status(self, bucket: Bucket) -> bool:
        """Whether ``bucket`` could carry the status ([Note: the last bucket carries the status] in status.py)."""
        param = bucket.slots[0].local
        return (
            self.hook is None
            and self.reduce_dtype is None
            and not bucket.spec.sparse
            and param.dtype in STATUS_DTYPES
            and param.device.type == "cpu"
        )

    def start_status(self, numbers: Tensor) -> Finish:
        """Sum a status that travels beside the buckets, from host to host ([Note: what the host has to know])."""
        if self.size == 1:
            return lambda: None
        return self.channel.start_all_reduce(numbers, "the status")

    # -- buckets -------------------------------------------------------------------------------------

    def start(self, bucket: Bucket, buffer: Tensor, *, is_last: bool) -> Finish:
        """Sum ``buffer``, which is laid out like ``bucket``, or hand it to the comm hook."""
        what = bucket.describe()
        if self.hook is not None:
            return self._start_hook(GradBucket(bucket, is_last=is_last, buffer=buffer), buffer, what)
        if self.reduce_dtype in (None, buffer.dtype):
            return self.channel.start_all_reduce(buffer, what)
        sent = buffer.to(self.reduce_dtype)
        wait = self.channel.start_all_reduce(sent, what)

        def finish() -> None:
            wait()
            buffer.copy_(sent)

        return finish

    # -- sparse gradients ----------------------------------------------------------------------------

    def start_sparse(self, bucket: Bucket, grad: Tensor | None, *, scale: float, is_last: bool) -> Finish:
        """Send a sparse gradient; None stands for one without rows. The sum is added to the slot's view."""
        (slot,) = bucket.slots
        what = bucket.describe()
        was_dense = grad is not None and grad.layout is torch.strided
        if grad is None:
            grad = _no_rows(slot)
        elif was_dense:
            # The weight is also used densely. Its rows travel all the same, as other ranks expect a sparse exchange.
            grad = grad.to_sparse(1)

        def deliver(total: Tensor) -> None:
            total = total.to_dense() if was_dense else total
            slot.view = total if slot.view is None else slot.view + total

        if self.hook is not None:
            # It gets a copy: embeddings that are summed share the values of their gradients, and hooks divide in place.
            future = self.hook(self._state, GradBucket(bucket, is_last=is_last, buffer=grad.clone()))
            doing = self._doing_hook(what)
            return lambda: deliver(self.channel.wait_future(future, doing))
        rows = (grad.detach() * scale).coalesce()
        if transport.checks_sparse(self.group):
            return self._start_sparse_sum(rows, what, deliver)
        if dist.get_backend(self.group) == dist.Backend.GLOO or transport.adds_sparse(self.group):
            return self._start_sparse_sum(rows, what, lambda total: deliver(_checked(total.coalesce(), what)))
        return self.gather_sparse(rows, what, deliver)

    def _start_sparse_sum(self, tensor: Tensor, what: str, deliver: Callable[[Tensor], None]) -> Finish:
        wait = self.channel.start_all_reduce(tensor, what, kind="sparse all-reduce")

        def finish() -> None:
            wait()
            deliver(tensor)

        return finish

    def gather_sparse(self, tensor: Tensor, what: str, deliver: Callable[[Tensor], None]) -> Finish:
        """Gather everybody's rows, padded, and add them up, for backends that cannot sum sparse tensors."""
        channel, group, size = self.channel, self.group, self.size
        lengths = torch.zeros(size, dtype=torch.long, device="cpu")
        lengths[channel.rank] = len(tensor.values())
        self.channel.start_all_reduce(lengths, f"the row counts of {what}")()
        counts = lengths.tolist()
        longest = max(counts)
        if (
            min(counts) < 0
            or longest > math.prod(tensor.shape[: tensor.sparse_dim()])
            or counts[channel.rank] != len(tensor.values())
        ):
            raise _damaged(what)

        def padded(part: Tensor) -> Tensor:
            full = part.new_zeros((longest, *part.shape[1:]))
            full[: len(part)] = part
            return full

        indices, values = padded(tensor.indices().t()), padded(tensor.values())
        all_indices, all_values = indices.new_empty((size, *indices.shape)), values.new_empty((size, *values.shape))
        channel.progress.start("sparse gather", what, values)
        works = [
            dist.all_gather(list(all_indices), indices, group=group, async_op=True),
            dist.all_gather(list(all_values), values, group=group, async_op=True),
        ]

        def finish() -> None:
            for work in works:
                assert work is not None
                channel.wait(work, f"the sparse gather of {what}", device=tensor.device.type)
            index = torch.cat([part[:n] for part, n in zip(all_indices, counts, strict=True)]).t()
            value = torch.cat([part[:n] for part, n in zip(all_values, counts, strict=True)])
            total = torch.sparse_coo_tensor(index, value, tensor.shape, check_invariants=False).coalesce()
            deliver(_checked(total, what))

        return finish

    # -- comm hooks ----------------------------------------------------------------------------------

    @property
    def _state(self) -> object:
        """What the hook is given. If None stands for a group, it gets the one in which buckets are averaged."""
        is_ours = self.hook_state is None and self.hook_takes_group and self.group is not dist.group.WORLD
        return self.group if is_ours else self.hook_state

    def _doing_hook(self, what: str) -> str:
        return f"the comm hook {hook_name(self.hook)} for {what}"

    def _start_hook(self, bucket: GradBucket, target: Tensor, what: str) -> Finish:
        """Let the comm hook communicate ``bucket``; its result ends up in ``target``."""
        hook, channel = self.hook, self.channel
        assert hook is not None
        name, doing = hook_name(hook), self._doing_hook(what)
        channel.progress.start(f"comm hook {name}", what, target)
        future = hook(self._state, bucket)
        # We do not ask for its class: a backend's futures are of a C++ class that torch.futures.Future derives from.
        if not callable(getattr(future, "wait", None)):
            raise BadTypeError(
                f"The comm hook {name} returned a {type(future).__name__} for {what}; it must return a "
                "torch.futures.Future that will hold one tensor. A hook that has nothing to wait for returns a "
                "future with set_result(bucket.buffer()) called on it."
            )
        if not self.hook_overlaps:
            # The hook may start further collectives from its callbacks, on a communication thread. With a second
            # bucket under way, ranks would issue them in different orders.
            channel.wait_future(future, doing)

        def finish() -> None:
            result = _flat_result(channel.wait_future(future, doing), target, name=name, what=what)
            if result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
                target.copy_(result)

        return finish


def _checked(total: Tensor, what: str) -> Tensor:
    """A sum of rows that other ranks have sent. Nothing else looks whether they are inside the parameter."""
    if not are_coalesced(total.indices(), total.shape):
        raise _damaged(what)
    return total


def _damaged(what: str) -> DisagreementError:
    return DisagreementError(
        f"The rows that some rank sent for {what} are damaged: their number or their indices do not fit the parameter. "
        "Look at what ranks do differently before backward."
    )


def _flat_result(result: object, target: Tensor, *, name: str, what: str) -> Tensor:
    """The gradients that the future of comm hook ``name`` holds, as flat as ``target``."""
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, Tensor):
        raise BadTypeError(
            f"The future of comm hook {name} holds a {type(result).__name__} for {what}; it must hold one tensor."
        )
    if target.is_complex() and not result.is_complex() and result.numel() == 2 * target.numel():
        # Backends send complex numbers as pairs of real ones, and hand those to a future.
        result = torch.view_as_complex(result.view(*target.shape, 2))
    if result.numel() < target.numel():
        raise BadTypeError(
            f"Comm hook {name} returned {result.numel()} elements for {what}, which has {target.numel()}: return the "
            "whole bucket."
        )
    # Some hooks pad the buffer that they return; the gradients are its beginning.
    return result.view(-1)[: target.numel()]


def _no_rows(slot: Slot) -> Tensor:
    index = torch.empty((1, 0), dtype=torch.long, device=slot.local.device)
    values = slot.local.new_empty((0, *slot.local.shape[1:]))
    return torch.sparse_coo_tensor(index, values, slot.local.shape, check_invariants=False)


def hook_name(hook: object) -> str:
    """The name of a comm hook, which may be a ``functools.partial`` or an object with ``__call__``."""
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
