"""``backward(create_graph=True)``: averaged gradients that can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bucket import Bucket, is_dense
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


def _flatten(grad: Tensor, param: Tensor) -> Tensor:
    """The elements in the order in which the parameter's lie in memory."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    if param.is_contiguous() or not is_dense(param):
        return grad.reshape(-1)
    by_stride = sorted(range(param.dim()), key=param.stride, reverse=True)
    return grad.permute(by_stride).reshape(-1)


def _unflatten(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    part = flat[offset : offset + param.numel()]
    if param.is_contiguous() or not is_dense(param):
        return part.view(param.shape)
    by_stride = sorted(range(param.dim()), key=param.stride, reverse=True)
    back = sorted(range(param.dim()), key=by_stride.__getitem__)
    return part.view([param.shape[d] for d in by_stride]).permute(back)


def blocking_sum(group: dist.ProcessGroup, channel: Channel) -> Callable[[Tensor], None]:
    def reduce(tensor: Tensor) -> None:
        channel.progress.start("all-reduce", "a bucket with create_graph=True", tensor)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        channel.wait(work, "an all-reduce of backward(create_graph=True)")

    return reduce
