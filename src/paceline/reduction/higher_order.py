"""``backward(create_graph=True)``: averaged gradients that can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.gradients.bucket import Bucket
from paceline.gradients.status import Status
from paceline.gradients.strides import dense_stride, has_default_strides
from paceline.reduction.backward import Backward


class SumAcrossRanks(torch.autograd.Function):
    """The sum over the ranks. It is linear and symmetric in the ranks, and so its own derivative."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, reduce: Callable[[Tensor], object]) -> Tensor:
        ctx.reduce = reduce
        total = flat.clone(memory_format=torch.contiguous_format)
        reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return SumAcrossRanks.apply(grad, ctx.reduce), None


def average_with_graph(backward: Backward) -> Status:
    """Do the exchange of an ordinary backward, but differentiably, and all of it at the end.

    A rank that does not need the graph may take part with one that does.
    """
    layout, exchange, weighing = backward.layout, backward.exchange, backward.weighing
    for slot in layout.slots:
        if backward.countdown.arrivals[slot.position] and slot.param.grad is not None:
            layout.ledger.used[slot.position] = 1.0

    def reduce(tensor: Tensor) -> None:
        exchange.channel.start_all_reduce(tensor, "a bucket with create_graph=True")()

    numbers: Tensor | None = None
    averaged: list[tuple[Bucket, list[Tensor]]] = []
    for bucket in layout.buckets:
        tail = None
        if bucket is layout.buckets[-1] and exchange.can_carry_status(bucket):
            tail = bucket.slots[0].local.new_empty(layout.status_code.numel)
            layout.status_code.write(backward.local_status(), tail)
        grads, numbers = _average_bucket(bucket, backward.scale, reduce, tail)
        averaged.append((bucket, grads))
    if numbers is None:
        numbers, finish = backward.start_status()
        finish()
    status = backward.read_status(numbers)
    factor = weighing.factor(status, n_ranks=exchange.size, divided_by=1)
    for bucket, grads in averaged:
        for slot, grad in zip(bucket.slots, grads, strict=True):
            if slot.owned and status.used[slot.position]:
                total = grad if factor is None else grad * factor
                total = total if slot.base is None else total + slot.base
                slot.param.grad = _with_strides_of_gradient(total, slot.local)
            elif slot.base is not None:
                slot.param.grad = slot.base
            slot.base = None
    return status


def _average_bucket(
    bucket: Bucket, scale: float, reduce: Callable[[Tensor], None], tail: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """The averaged gradients of ``bucket`` with the graph of how they came about, and the sum of ``tail``.

    ``tail`` travels behind the gradients, as it does in an ordinary backward.
    """
    parts = []
    for slot in bucket.slots:
        grad = slot.param.grad if slot.owned else None
        parts.append(_flatten(grad if grad is not None else torch.zeros_like(slot.local), slot.local))
    with torch.enable_grad():
        flat = torch.cat(parts) * scale
        if tail is not None:
            flat = torch.cat([flat, tail])
        flat = SumAcrossRanks.apply(flat, reduce)
        grads = [
            _unflatten(flat, offset, slot.local) for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True)
        ]
    total = None if tail is None else flat.detach()[-tail.numel() :]
    return grads, total


def _with_strides_of_gradient(grad: Tensor, param: Tensor) -> Tensor:
    """``grad`` with the strides of ``param``'s gradient in a bucket, also in dimensions of size 1."""
    stride = dense_stride(param)
    if grad.stride() == stride:
        return grad
    outer_first = _outer_first(stride)
    grad = grad.permute(outer_first).contiguous().permute(_inverse(outer_first))
    # Sums and products of tensors may have any strides in dimensions of size 1.
    return grad if grad.stride() == stride else grad.as_strided(grad.shape, stride)


def _flatten(grad: Tensor, param: Tensor) -> Tensor:
    """The elements in the order in which they lie in the bucket."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if has_default_strides(param):
        return grad.reshape(-1)
    return grad.permute(_outer_first(dense_stride(param))).reshape(-1)


def _unflatten(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    part = flat[offset : offset + param.numel()]
    if has_default_strides(param):
        return part.view(param.shape)
    outer_first = _outer_first(dense_stride(param))
    return part.view([param.shape[d] for d in outer_first]).permute(_inverse(outer_first))


def _outer_first(stride: Sequence[int]) -> list[int]:
    return sorted(range(len(stride)), key=stride.__getitem__, reverse=True)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
