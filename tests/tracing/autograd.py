"""Collectives that are differentiated."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

from tests.tracing.row import Rows

row = Rows(4, grad=True)


@row("funcol.all_reduce, differentiated", inductor=True)
def all_reduce(x, group):
    return funcol.all_reduce(x * 2, "sum", group) * 3


@row("funcol.all_gather_tensor_autograd", inductor=True)
def all_gather(x, group):
    return funcol.all_gather_tensor_autograd(x * 2, 0, group) * 3


@row("funcol.reduce_scatter_tensor_autograd", inductor=True)
def reduce_scatter(x, group):
    return funcol.reduce_scatter_tensor_autograd(x * 2, "sum", 0, group) * 3


@row("funcol.all_to_all_single_autograd", inductor=True)
def all_to_all(x, group):
    return funcol.all_to_all_single_autograd(x * 2, None, None, group) * 3


row.add("dist.nn.functional.all_reduce(x)", None, lambda x: dist_nn.all_reduce(x * 2) * 3, inductor=True)


@row("dist.nn.functional.all_reduce(op, group)")
def nn_all_reduce_of_group(x, other):
    return dist_nn.all_reduce(x * 2, op=dist.ReduceOp.SUM, group=other) * 3


row.add("dist.nn.functional.all_gather(x)", None, lambda x: torch.cat(dist_nn.all_gather(x * 2)) * 3, inductor=True)
row.add("dist.nn.functional.broadcast(x, src)", None, lambda x: dist_nn.broadcast(x * 2, 0) * 3)


@row("dist.nn.functional.reduce(x, dst)")
def nn_reduce(x):
    y = dist_nn.reduce(x * 2, 0)
    # What is left on the other ranks is not defined.
    return y * 3 if dist.get_rank() == 0 else y * 0


@row("dist.nn.functional.gather(x, dst)")
def nn_gather(x):
    parts = dist_nn.gather(x * 2, 0)
    return torch.cat(parts) * (3 if dist.get_rank() == 0 else 0)


@row("dist.nn.functional.scatter([...], src)")
def nn_scatter(x, size):
    return dist_nn.scatter([x * (r + 1) for r in range(size)], 0) * 3


@row("dist.nn.functional.reduce_scatter(out, [...])")
def nn_reduce_scatter(x, size):
    parts = list((x * 2).chunk(size))
    return dist_nn.reduce_scatter(torch.empty_like(parts[0]), parts) * 3


@row("dist.nn.functional.all_to_all([...], [...])")
def nn_all_to_all(x, size):
    parts = list((x * 2).chunk(size))
    return torch.cat(dist_nn.all_to_all([torch.empty_like(part) for part in parts], parts)) * 3


@row("dist.nn.functional.all_to_all_single(out, x)", inductor=True)
def nn_all_to_all_single(x):
    return dist_nn.all_to_all_single(torch.empty_like(x), x * 2) * 3


class Summed(torch.autograd.Function):
    """The pair of tensor-parallel layers, as Megatron-like code writes it: sum forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Copied(torch.autograd.Function):
    """Its dual: identity forward, sum backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


@row("a collective in autograd.Function.forward", inductor=True)
def in_forward(x, other):
    return Summed.apply(x * 2, other) * 3


@row("a collective in autograd.Function.backward", inductor=True)
def in_backward(x, other):
    return Copied.apply(x * 2, other) * 3
