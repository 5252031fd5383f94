"""Flat storage for gradients that travel together, and how gradients get into it and back to their parameters.

[Note: gradients live in the bucket]
A bucket's flat buffer is the only memory that a gradient has at rest: ``param.grad`` is a tensor on the bucket's
storage. While a synchronised backward runs, each gradient that becomes ready is *absorbed* into its bucket, and
``param.grad`` is taken away. The averaged gradient is handed back when the backward ends. So autograd can never add
to a buffer that is being sent. A contribution that comes after its bucket has left finds no ``param.grad``, lands in
a tensor of its own, and is sent by itself (see [Note: late gradients] in reduction/backward.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline import _torch
from paceline.errors import MisuseError
from paceline.gradients.plan import BucketSpec
from paceline.gradients.slots import Slot
from paceline.gradients.strides import dense_stride, has_default_strides

Allocator = Callable[[int, torch.dtype, torch.device], Tensor]


def empty_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The default allocator of bucket storage; transports may bring their own."""
    return torch.empty(numel, dtype=dtype, device=device)


def absorb(slots: Iterable[Slot], used: list[float], *, scale: float = 1.0, factor: Tensor | None = None) -> list[Slot]:
    """Move the gradients of ``slots`` into their buckets, and take ``param.grad`` away.

    Returns the slots that had a gradient (autograd may announce one that is undefined) and marks them in ``used``, by
    position. Deferred slots are copied in one call and stay unscaled: their bucket scales them when it is completed.
    ``factor`` is ``scale`` as a tensor of no dimensions, by which torch multiplies in half the time.
    """
    slots = list(slots)
    try:
        return _absorb(slots, used, scale, factor)
    except RuntimeError as error:
        raise _misfit(slots) or error from None


def _absorb(slots: list[Slot], used: list[float], scale: float, factor: Tensor | None) -> list[Slot]:
    views: list[Tensor] = []
    grads: list[Tensor] = []
    came: list[Slot] = []
    for slot in slots:
        param, view = slot.param, slot.view
        if view is None or (grad := param.grad) is None:
            continue
        if not slot.deferred:
            add(slot, grad, scale, factor)
        elif grad is not view:
            if slot.filled or grad.layout is not torch.strided:
                add(slot, grad)
            else:
                views.append(view)
                grads.append(grad)
        slot.filled = True
        used[slot.position] = 1.0
        param.grad = None
        came.append(slot)
    if views:
        _torch.copy_each(views, grads)
    return came


def absorb_early(pairs: Iterable[tuple[Slot, Tensor]], *, scale: float = 1.0, factor: Tensor | None = None) -> None:
    """Add gradients that did not come through autograd to those that ``param.grad`` and the buckets already hold."""
    views: list[Tensor] = []
    grads: list[Tensor] = []
    for slot, grad in pairs:
        before = slot.param.grad
        if slot.deferred and not slot.filled and before is None:
            assert slot.view is not None
            views.append(slot.view)
            grads.append(grad)
            slot.filled = True
            continue
        scaling = (1.0, None) if slot.deferred else (scale, factor)
        if before is not None and not slot.filled:
            add(slot, before, *scaling)
            slot.param.grad = None
        add(slot, grad, *scaling)
    if views:
        _torch.copy_each(views, grads)


def add(slot: Slot, grad: Tensor, scale: float = 1.0, factor: Tensor | None = None) -> None:
    """Add ``grad``, scaled, to what the bucket holds for ``slot`` in this backward."""
    view = slot.view
    assert view is not None
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if grad.shape != view.shape:
        # The product below would make the view larger, beyond the bucket's end.
        raise _misfit([slot]) or AssertionError(f"the gradient of {slot.name} has shape {tuple(grad.shape)}")
    if slot.filled:
        view.add_(grad, alpha=scale)
    elif grad is view:
        if scale != 1.0:
            view.mul_(scale)
    elif scale == 1.0:
        view.copy_(grad)
    else:
        torch.mul(grad, scale if factor is None else factor, out=view)
    slot.filled = True


def hand_out(slots: Sequence[Slot], used: Sequence[float] | None) -> None:
    """Give every parameter its gradient back: averaged if any rank used it, untouched if none did.

    ``used`` is by position. It is None if all ranks used all parameters and there is nothing else to see to.
    """
    try:
        _hand_out(slots, used)
    except RuntimeError as error:
        raise _misfit(slots) or error from None


def _hand_out(slots: Sequence[Slot], used: Sequence[float] | None) -> None:
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


def _misfit(slots: Iterable[Slot]) -> MisuseError | None:
    """The error for the first parameter that is no longer like its place in the bucket; None if all are."""
    for slot in slots:
        param, view = slot.local, slot.view
        # A tensor may ask for gradients in another dtype than its own.
        wanted = getattr(slot.leaf, "grad_dtype", None) or param.dtype
        if view is None or (param.shape == view.shape and wanted == view.dtype):
            continue
        if wanted != param.dtype:
            return MisuseError(
                f"Parameter {slot.name!r} is {param.dtype} and has {wanted} as its grad_dtype, but gradients are "
                "averaged in the dtype of the parameter. Leave grad_dtype as it is."
            )
        return MisuseError(
            f"Parameter {slot.name!r} has shape {tuple(param.shape)} and dtype {param.dtype}, but had shape "
            f"{tuple(view.shape)} and dtype {view.dtype} when the buckets were made. An assignment to its .data is not "
            "noticed. Assign a new nn.Parameter to the module instead."
        )
    return None


class Bucket:
    """The flat buffer of one :class:`BucketSpec` with its slots."""

    def __init__(self, spec: BucketSpec, slots: Sequence[Slot]) -> None:
        self.spec = spec
        self.slots = tuple(slots)
        self.flat: Tensor | None = None
        """The whole buffer; None until it is allocated, and for a sparse gradient."""
        self.payload: Tensor | None = None
        """The part of the buffer that holds the gradients."""
        self.tail: Tensor | None = None
        """The part behind the gradients, for the status."""
        self._views: list[Tensor] = []
        self._users_at_rest = 0
        self._refs_at_rest: list[int] = []
        self._deferred_runs: list[Tensor] = []

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
        self._deferred_runs = self._find_deferred_runs(self.flat)
        self._users_at_rest = _torch.storage_users(self.flat)
        self._refs_at_rest = list(map(sys.getrefcount, self._views))

    def _make_views(self, flat: Tensor) -> list[Tensor]:
        """Give each slot its view of ``flat``. References to views are counted when no local variable holds them."""
        tensors = [slot.local for slot in self.slots]
        if all(tensor.numel() and has_default_strides(tensor) for tensor in tensors):
            # This takes half the time. Because of ``data`` they are not views in autograd's sense: see `_alias`.
            views = [view.data for view in _torch.unflatten_dense(flat, tensors)]
        else:
            views = [_alias(flat, offset, tensor) for tensor, offset in zip(tensors, self.spec.offsets, strict=True)]
        for slot, view in zip(self.slots, views, strict=True):
            slot.view = view
        return views

    def is_kept_by_somebody(self) -> bool:
        """Whether the user kept a gradient that its parameter has let go of, so that it must not change any more."""
        if self.flat is None:
            return False
        held = list(map(sys.getrefcount, self._views)) != self._refs_at_rest
        if not held and _torch.storage_users(self.flat) == self._users_at_rest:
            return False
        # The user holds the very tensor, or another one on the same storage, which could be of any slot.
        aliased = _torch.storage_users(self.flat) != self._users_at_rest
        return any(
            slot.param.grad is not slot.view and (aliased or sys.getrefcount(slot.view) > count)
            for slot, count in zip(self.slots, self._refs_at_rest, strict=True)
        )

    def renew(self, allocator: Allocator) -> None:
        """Move to new storage. Whoever holds a gradient on the old storage keeps it."""
        assert self.flat is not None
        old_views = [slot.view for slot in self.slots]
        self.allocate(allocator, tail_numel=self.flat.numel() - self.spec.numel)
        for slot, old in zip(self.slots, old_views, strict=True):
            if slot.param.grad is old and old is not None and slot.view is not None:
                slot.param.grad = slot.view.copy_(old)

    def _find_deferred_runs(self, flat: Tensor) -> list[Tensor]:
        """The stretches of the buffer that consist of deferred slots: each is scaled in one call."""
        runs: list[Tensor] = []
        start: int | None = None
        end = 0
        for slot, offset in zip(self.slots, self.spec.offsets, strict=True):
            if slot.deferred and start is None:
                start = offset
            elif not slot.deferred and start is not None:
                runs.append(flat[start:offset])
                start = None
            end = offset + slot.local.numel()
        if start is not None:
            runs.append(flat[start:end])
        return runs

    def describe(self) -> str:
        """The bucket's number and first few parameters, for messages."""
        told = ", ".join(slot.name for slot in self.slots[:3]) + (", ..." if len(self.slots) > 3 else "")
        return f"bucket {self.spec.index} ({told})"

    # -- a step --------------------------------------------------------------------------------------

    def complete(self, scale: float, used: Sequence[float]) -> None:
        """Fill the slots for which nothing came, and scale what was absorbed unscaled.

        ``used`` marks, by position, the parameters that got a gradient since the last synchronisation.
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
            if not used[slot.position]:
                # Nothing came for it since the last synchronisation, yet it holds a value. The value has to stay as
                # it is if no other rank has used the parameter either.
                slot.saved = grad.clone() if grad is view else grad
            add(slot, grad, 1.0 if slot.deferred else scale)
            param.grad = None
        if scale != 1.0:
            for run in self._deferred_runs:
                run.mul_(scale)

    def late_contributions(self, scale: float) -> Tensor:
        """A buffer like this bucket's with only the late contributions in it, scaled."""
        assert self.payload is not None
        scratch = torch.zeros_like(self.payload)
        for slot, offset in zip(self.slots, self.spec.offsets, strict=True):
            if slot.late is not None and slot.view is not None:
                torch.mul(slot.late, scale, out=scratch.as_strided(slot.view.shape, slot.view.stride(), offset))
        return scratch

    def multiply(self, factor: float) -> None:
        """Scale what the bucket holds, after it has come back."""
        if self.payload is not None and factor == 0.0:
            # A product would leave negative zeros, and NaN wherever a value is infinite or NaN.
            self.payload.zero_()
        elif self.payload is not None:
            self.payload.mul_(factor)
        elif self.slots[0].view is not None:
            self.slots[0].view = self.slots[0].view * factor


def _alias(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    """A tensor like ``param`` on ``flat``'s storage.

    It is not a view in autograd's sense, because users may call ``detach_()`` or ``requires_grad_()`` on a gradient.
    """
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return alias.set_(flat.untyped_storage(), flat.storage_offset() + offset, param.shape, dense_stride(param))
