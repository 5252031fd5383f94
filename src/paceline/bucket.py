"""Flat storage for gradients that travel together, and what a comm hook receives.

[Note: gradients live in the bucket]
A bucket's flat buffer is the only memory a gradient has at rest: ``param.grad`` is a tensor on the bucket's
storage. While a synchronised backward runs, the reducer *absorbs* each gradient as it becomes ready and takes
``param.grad`` away; it hands the averaged one back when backward ends. So autograd can never add to a buffer
that is being sent: a contribution that comes after its bucket has left finds no ``param.grad``, lands in a
tensor of its own, and is sent in a second round (see [Note: late gradients] in backward.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.futures import Future

from paceline import _torch
from paceline.plan import BucketSpec
from paceline.portion import Portion

# Gradients up to this size are copied into the bucket together when it leaves: one call for many. Larger
# ones are copied (and scaled in the same pass) as they come, so that their memory is free at once.
SMALL_NUMEL = 4096
# In modules without many parameters only the smallest: there it is not Python calls that cost.
TINY_NUMEL = 1024
# A whole bucket of up to this size is scaled in one call at its end: less than a scaling call for each gradient.
SMALL_BUCKET_NUMEL = 1 << 19

Allocator = Callable[[int, torch.dtype, torch.device], Tensor]


def empty_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The default allocator of bucket storage; transports may bring their own."""
    return torch.empty(numel, dtype=dtype, device=device)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory without holes or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def has_default_strides(tensor: Tensor) -> bool:
    """Stricter than ``is_contiguous()``, to which the strides of dimensions of size 1 do not matter."""
    if 1 not in tensor.shape:
        return tensor.is_contiguous()
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """The strides of a parameter's gradient: its own, or where those leave holes the nearest without."""
    return param.stride() if is_dense(param) else torch.empty_like(param, device="meta").stride()


class Slot:
    """A parameter's place in a bucket, and whether its gradient is there already."""

    __slots__ = (
        "accumulator",
        "awaits_stand_in",
        "base",
        "bucket",
        "deferred",
        "filled",
        "index",
        "late",
        "leaf",
        "name",
        "owned",
        "param",
        "place",
        "prompt",
        "saved",
        "steps_in_backward",
        "view",
    )

    def __init__(self, name: str, param: Tensor) -> None:
        self.name = name
        self.leaf = param
        """The parameter as autograd and the user know it."""
        self.param: Tensor | Portion = Portion(param) if _torch.is_dtensor(param) else param
        """What has its gradient: itself, or what stands for it where it is distributed."""
        self.index = self.place = -1
        """The number among all parameters, and among the trainable ones of the plan."""
        self.bucket = -1
        """The number of its bucket; -1 when the plan leaves it out."""
        self.deferred = False
        """Copied together with others and scaled with the whole bucket, instead of both in one pass."""
        self.prompt = True
        """Looked at as soon as it is ready, not with the next batch."""
        self.owned = True
        """Another wrapper of the same parameter may be the one in use: then this one stays out of its way."""
        self.steps_in_backward = False
        """An optimizer waits for the averaged gradient."""
        self.view: Tensor | None = None
        self.accumulator: Node | None = None
        self.base: Tensor | None = None
        """A gradient that must survive unscaled until after the reduction (weighted averaging)."""
        self.forget()

    def forget(self) -> None:
        """Drop what a backward has left."""
        self.filled = False
        self.awaits_stand_in = False
        """[Note: early gradients] in early.py: autograd has yet to bring zeros in the place of what was taken."""
        self.late: Tensor | None = None
        self.saved: Tensor | None = None

    @property
    def local(self) -> Tensor:
        """What this rank holds of the parameter."""
        return self.param.local if isinstance(self.param, Portion) else self.param

    def node(self) -> Node:
        """Where autograd accumulates the gradient. Kept: asking for it costs more than what it is asked for."""
        if self.accumulator is None:
            self.accumulator = _torch.accumulate_grad_node(self.leaf)
        return self.accumulator

    def absorb(self, scale: float, factor: Tensor | None = None) -> bool:
        """Move what ``param.grad`` holds into the bucket, scaled; ``param.grad`` is None afterwards.

        ``factor`` is the scale as a tensor of no dimensions, which torch multiplies by in half the time. False if
        there was nothing: autograd may announce a gradient that is undefined.
        """
        grad, view = self.param.grad, self.view
        if grad is None:
            return False
        assert view is not None
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if self.filled:
            view.add_(grad, alpha=scale)
        elif grad is view:
            if scale != 1.0:
                view.mul_(scale)
        elif scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale if factor is None else factor, out=view)
        self.filled = True
        self.param.grad = None
        return True

    def absorb_early(self, grad: Tensor, scale: float, factor: Tensor | None = None) -> None:
        """Add ``grad``, which did not come through autograd, to what is there."""
        view = self.view
        assert view is not None
        if not self.filled:
            self.absorb(scale, factor)
        if self.filled:
            view.add_(grad, alpha=scale)
        elif scale == 1.0:
            view.copy_(grad)
        else:
            torch.mul(grad, scale if factor is None else factor, out=view)
        self.filled = True

    def hand_out(self, *, used: bool) -> None:
        """Give ``param.grad`` back: the reduced one if any rank used the parameter, else what it was."""
        param, view = self.param, self.view
        if used:
            param.grad = view
            if self.base is not None and view is not None:
                view.add_(self.base)
            if self.steps_in_backward:
                for optimizer in _torch.optimizers_of(self.leaf):
                    optimizer.step()
                param.grad = None
        elif self.saved is not None:
            if view is not None and not self.saved.is_sparse:
                view.copy_(self.saved)
                param.grad = view
            else:
                param.grad = self.saved
        elif self.base is not None:
            param.grad = self.base


def absorb_together(slots: Sequence[Slot], used: list[float]) -> list[Slot]:
    """``slot.absorb(1.0)`` for many in one go; those that had a gradient, which are marked in ``used``."""
    views: list[Tensor] = []
    grads: list[Tensor] = []
    came: list[Slot] = []
    for slot in slots:
        param = slot.param
        grad, view = param.grad, slot.view
        if grad is None:
            continue
        if grad is not view:
            if slot.filled or grad.layout is not torch.strided:
                slot.absorb(1.0)
            else:
                views.append(view)  # type: ignore[arg-type]
                grads.append(grad)
        slot.filled = True
        used[slot.place] = 1.0
        param.grad = None
        came.append(slot)
    if views:
        _torch.copy_each(views, grads)
    return came


class Bucket:
    """The flat buffer of one :class:`BucketSpec` with its slots."""

    def __init__(self, spec: BucketSpec, slots: Sequence[Slot]) -> None:
        self.spec = spec
        self.slots = tuple(slots)
        self.flat: Tensor | None = None
        self.payload: Tensor | None = None
        self.tail: Tensor | None = None
        self._views: list[Tensor] = []
        self._users_at_rest = 0
        self._refs_at_rest: list[int] = []
        self._runs: list[Tensor] = []

    # -- storage -------------------------------------------------------------------------------------

    def allocate(self, allocator: Allocator, *, tail_numel: int = 0) -> None:
        """Make the flat buffer, with ``tail_numel`` extra elements behind the gradients."""
        if self.spec.sparse:
            return
        first = self.slots[0].local
        numel = self.spec.numel
        self.flat = allocator(numel + tail_numel, first.dtype, first.device)
        self.payload = self.flat[:numel]
        self.tail = self.flat[numel:] if tail_numel else None
        self._views = self._make_views(self.payload)
        self._runs = self._deferred_runs()
        self._users_at_rest = _torch.storage_users(self.flat)
        self._refs_at_rest = list(map(sys.getrefcount, self._views))

    def _make_views(self, flat: Tensor) -> list[Tensor]:
        """Give each slot its view of ``flat``; they are counted once nothing but the slots and this list has them."""
        tensors = [slot.local for slot in self.slots]
        if all(tensor.numel() and has_default_strides(tensor) for tensor in tensors):
            # In half the time. ``data``, as what is made here must not be a view in autograd's sense: see `_alias`.
            views = [view.data for view in _torch.unflatten_dense(flat, tensors)]
        else:
            views = [_alias(flat, offset, tensor) for tensor, offset in zip(tensors, self.spec.offsets, strict=True)]
        for slot, view in zip(self.slots, views, strict=True):
            slot.view = view
        return views

    def is_kept_by_somebody(self) -> bool:
        """Whether the user kept a gradient that its parameter has let go of: it is his to keep."""
        if self.flat is None:
            return False
        held = list(map(sys.getrefcount, self._views)) != self._refs_at_rest
        if not held and _torch.storage_users(self.flat) == self._users_at_rest:
            return False
        # The very tensor, or another one on the same storage, which could be of any slot.
        aliased = _torch.storage_users(self.flat) != self._users_at_rest
        return any(
            slot.param.grad is not slot.view and (aliased or sys.getrefcount(slot.view) > count)
            for slot, count in zip(self.slots, self._refs_at_rest, strict=True)
        )

    def renew(self, allocator: Allocator) -> None:
        """Move to new storage; whoever holds a gradient on the old one keeps it."""
        assert self.flat is not None
        old_views = [slot.view for slot in self.slots]
        self.allocate(allocator, tail_numel=self.flat.numel() - self.spec.numel)
        for slot, old in zip(self.slots, old_views, strict=True):
            if slot.param.grad is old and old is not None and slot.view is not None:
                slot.param.grad = slot.view.copy_(old)

    def _deferred_runs(self) -> list[Tensor]:
        """The stretches of the buffer that consist of deferred slots: each is scaled in one call."""
        assert self.flat is not None
        runs: list[Tensor] = []
        start: int | None = None
        end = 0
        for slot, offset in zip(self.slots, self.spec.offsets, strict=True):
            if slot.deferred and start is None:
                start = offset
            elif not slot.deferred and start is not None:
                runs.append(self.flat[start:offset])
                start = None
            end = offset + slot.local.numel()
        if start is not None:
            runs.append(self.flat[start:end])
        return runs

    def describe(self) -> str:
        """For messages: its number and the first few parameters in it."""
        told = ", ".join(slot.name for slot in self.slots[:3]) + (", ..." if len(self.slots) > 3 else "")
        return f"bucket {self.spec.index} ({told})"

    # -- a step --------------------------------------------------------------------------------------

    def complete(self, scale: float, used: Sequence[float]) -> None:
        """Fill the places for which nothing came, and scale what was absorbed unscaled.

        ``used`` says, by place, what got a gradient since the last synchronisation.
        """
        for slot in self.slots:
            if slot.filled:
                continue
            param, view = slot.param, slot.view
            assert view is not None
            grad = param.grad if slot.owned else None
            if grad is None:
                view.zero_()
                continue
            if not used[slot.place]:
                # Nothing came for it since the last synchronisation, yet it holds a value that has to stay
                # as it is should no other rank have used it either.
                slot.saved = grad.clone() if grad is view else grad
            slot.absorb(1.0 if slot.deferred else scale)
        if scale != 1.0:
            for run in self._runs:
                run.mul_(scale)

    def lay_out_late(self, scale: float) -> Tensor:
        """A buffer like this bucket's with only the late contributions in it, scaled."""
        assert self.payload is not None
        scratch = torch.zeros_like(self.payload)
        for slot, offset in zip(self.slots, self.spec.offsets, strict=True):
            if slot.late is not None and slot.view is not None:
                place = scratch.as_strided(slot.view.shape, slot.view.stride(), offset)
                torch.mul(slot.late, scale, out=place)
        return scratch


def _alias(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    """A tensor like ``param`` on ``flat``'s storage.

    Not a view in autograd's sense: users may call ``detach_()`` or ``requires_grad_()`` on a gradient.
    """
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return alias.set_(flat.untyped_storage(), flat.storage_offset() + offset, param.shape, dense_stride(param))


class GradBucket:
    """What a comm hook receives; the methods are those of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, *, is_last: bool, buffer: Tensor | None = None) -> None:
        self._bucket = bucket
        self._is_last = is_last
        flat = bucket.payload if buffer is None else buffer
        assert flat is not None
        # A tensor object of its own: hooks may resize what they are given, and ours must not change.
        self._buffer = flat if flat.is_sparse else flat.view(-1)

    def index(self) -> int:
        """The bucket's place in launch order."""
        return self._bucket.spec.index

    def buffer(self) -> Tensor:
        """The flat gradients, not divided by anything."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let ``buffer`` stand for the flat gradients from now on (of this bucket, in this step)."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The parts of :meth:`buffer`, shaped as the parameters."""
        buffer, start = self._buffer, self._buffer.storage_offset()
        slots, offsets = self._bucket.slots, self._bucket.spec.offsets
        return [
            buffer.as_strided(slot.local.shape, dense_stride(slot.local), start + offset)
            for slot, offset in zip(slots, offsets, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """The parameters, or what this rank holds of them, in the order of :meth:`gradients`."""
        return [slot.local for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last


CommHook = Callable[[object, GradBucket], "Future[Tensor]"]
