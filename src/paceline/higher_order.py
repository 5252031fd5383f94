"""``backward(create_graph=True)``: averaged gradients that can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bucket import Bucket, dense_stride, has_default_strides
from paceline.control import Channel


class SumAcrossRanks(torch.autograd.Function):
    """Sum over the ranks. Linear and symmetric in the ranks: its own derivative."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, reduce: Callable[[Tensor], None]) -> Tensor:
        ctx.reduce = reduce
        total = flat.clone()
        reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return SumAcrossRanks.apply(grad, ctx.reduce), None


def average_with_graph(
    bucket: Bucket, scale: float, reduce: Callable[[Tensor], None], tail: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """The averaged gradients of ``bucket`` with the graph of how they came about.

    ``tail`` travels behind them, as it does in an ordinary step: a rank that does not need the graph may take
    part with one that does. Its sum is the second result.
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


def with_strides_of_gradient(grad: Tensor, param: Tensor) -> Tensor:
    """``grad`` with the strides that ``param``'s has in a bucket, down to those of dimensions of size 1."""
    stride = dense_stride(param)
    if grad.stride() == stride:
        return grad
    outer_first = _outer_first(stride)
    grad = grad.permute(outer_first).contiguous().permute(_inverse(outer_first))
    # Sums and products of tensors give dimensions of size 1 whatever strides they like.
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


def blocking_sum(group: dist.ProcessGroup, channel: Channel) -> Callable[[Tensor], None]:
    def reduce(tensor: Tensor) -> None:
        channel.progress.start("all-reduce", "a bucket with create_graph=True", tensor)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        channel.wait(work, "an all-reduce of backward(create_graph=True)")

    return reduce
