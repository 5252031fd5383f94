"""Collectives that autograd sees: ``torch.distributed.nn.functional``.

torch refuses them while compiling. Here each is an autograd function over our operators: forward and backward have one
operator each, and both are in the graph.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.nn import functional as nn_functional

from paceline.tracing.collectives import named, reduction
from paceline.tracing.operator_namespace import operators
from paceline.tracing.ops import NOBODY
from paceline.tracing.registry import FunctionRow


def run(name: str, written, read, group: str, how: str = "", ranks=()) -> list[Tensor]:
    return getattr(operators, name)(list(written), list(read), group, how, list(ranks), True)


def shapes_of(tensors) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def gathered(tensor: Tensor, root: int, rank: int, size: int, group: str) -> list[Tensor]:
    """What everybody has, at the root; zeros elsewhere."""
    if rank == root:
        return run("gather", [tensor.new_empty(tensor.shape) for _ in range(size)], [tensor], group, "", (root, NOBODY))
    run("gather", [], [tensor], group, "", (root, NOBODY))
    return [torch.zeros_like(tensor) for _ in range(size)]


def scattered(tensors, root: int, rank: int, group: str) -> Tensor:
    parts = tensors if rank == root else []
    return run("scatter", [tensors[0].new_empty(tensors[0].shape)], parts, group, "", (root, NOBODY))[0]


class AllReduce(Function):
    @staticmethod
    def forward(ctx, group, how, tensor):
        ctx.call = (group, how)
        return run("all_reduce", [tensor], [], group, how)[0]

    @staticmethod
    def backward(ctx, grad):
        group, how = ctx.call
        return None, None, run("all_reduce", [grad], [], group, how)[0]


class Broadcast(Function):
    @staticmethod
    def forward(ctx, group, root, rank, tensor):
        ctx.call = (group, root, rank)
        return run("broadcast", [tensor], [], group, "", (root, NOBODY))[0]

    @staticmethod
    def backward(ctx, grad):
        group, root, rank = ctx.call
        total = run("reduce", [grad], [], group, "sum", (root, NOBODY))[0]
        return None, None, None, total if rank == root else torch.zeros_like(total)


class Reduce(Function):
    @staticmethod
    def forward(ctx, group, root, how, tensor):
        ctx.call = (group, root)
        return run("reduce", [tensor], [], group, how, (root, NOBODY))[0]

    @staticmethod
    def backward(ctx, grad):
        group, root = ctx.call
        return None, None, None, run("broadcast", [grad], [], group, "", (root, NOBODY))[0]


class Gather(Function):
    @staticmethod
    def forward(ctx, group, root, rank, size, tensor):
        ctx.call = (group, root, rank)
        return tuple(gathered(tensor, root, rank, size, group))

    @staticmethod
    def backward(ctx, *grads):
        group, root, rank = ctx.call
        return None, None, None, None, scattered(list(grads), root, rank, group)


class Scatter(Function):
    @staticmethod
    def forward(ctx, group, root, rank, size, *tensors):
        ctx.call = (group, root, rank, size)
        return scattered(list(tensors), root, rank, group)

    @staticmethod
    def backward(ctx, grad):
        group, root, rank, size = ctx.call
        return None, None, None, None, *gathered(grad, root, rank, size, group)


class AllGather(Function):
    @staticmethod
    def forward(ctx, group, size, tensor):
        ctx.call = group
        return tuple(run("all_gather", [tensor.new_empty(tensor.shape) for _ in range(size)], [tensor], group))

    @staticmethod
    def backward(ctx, *grads):
        # This is not a reduce-scatter, which would add in another order than eager does.
        parts = run("all_to_all", shapes_of(grads), grads, ctx.call)
        return None, None, torch.stack(parts).sum(0)


class ReduceScatter(Function):
    @staticmethod
    def forward(ctx, group, how, output, *tensors):
        ctx.call = (group, len(tensors))
        return run("reduce_scatter", [output], tensors, group, how)[0]

    @staticmethod
    def backward(ctx, grad):
        group, size = ctx.call
        return None, None, None, *run("all_gather", [grad.new_empty(grad.shape) for _ in range(size)], [grad], group)


class AllToAll(Function):
    @staticmethod
    def forward(ctx, group, outputs, *tensors):
        ctx.call = group
        ctx.shapes = [tensor.shape for tensor in tensors[outputs:]]
        return tuple(run("all_to_all", tensors[:outputs], tensors[outputs:], group))

    @staticmethod
    def backward(ctx, *grads):
        written = [grads[0].new_empty(shape) for shape in ctx.shapes]
        return None, None, *([None] * len(grads)), *run("all_to_all", written, grads, ctx.call)


class AllToAllSingle(Function):
    @staticmethod
    def forward(ctx, group, output_sizes, input_sizes, output, tensor):
        ctx.call = (group, output_sizes, input_sizes, tensor.shape)
        return run("all_to_all_single", [output], [tensor], group, "", (*output_sizes, *input_sizes))[0]

    @staticmethod
    def backward(ctx, grad):
        group, output_sizes, input_sizes, shape = ctx.call
        sizes = (*input_sizes, *output_sizes)
        return None, None, None, None, run("all_to_all_single", [grad.new_empty(shape)], [grad], group, "", sizes)[0]


# --- what is traced in place of torch's functions ----------------------------------------------------------


def keep(targets, results) -> None:
    """Write results to the tensors that were given, as eager does."""
    for target, result in zip(targets, results, strict=True):
        target.detach().copy_(result.detach())


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None):
    return AllReduce.apply(named(group), reduction(op), tensor)


def broadcast(tensor, src, group=None):
    return Broadcast.apply(named(group), src, dist.get_rank(group), tensor)


def reduce(tensor, dst, op=dist.ReduceOp.SUM, group=None):
    return Reduce.apply(named(group), dst, reduction(op), tensor)


def gather(tensor, dst=0, group=None):
    return Gather.apply(named(group), dst, dist.get_rank(group), dist.get_world_size(group), tensor)


def scatter(tensors, src=0, group=None):
    return Scatter.apply(named(group), src, dist.get_rank(group), dist.get_world_size(group), *tensors)


def all_gather(tensor, group=None):
    return AllGather.apply(named(group), dist.get_world_size(group), tensor)


def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None):
    result = ReduceScatter.apply(named(group), reduction(op), output, *input_list)
    keep([output], [result])
    return result


def all_to_all(output_tensor_list, input_tensor_list, group=None):
    outputs = list(output_tensor_list)
    results = AllToAll.apply(named(group), len(outputs), *outputs, *input_tensor_list)
    keep(outputs, results)
    return results


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
    size = dist.get_world_size(group)
    output_sizes = tuple(output_split_sizes or [output.shape[0] // size] * size)
    input_sizes = tuple(input_split_sizes or [input.shape[0] // size] * size)
    result = AllToAllSingle.apply(named(group), output_sizes, input_sizes, output, input)
    keep([output], [result])
    return result


_TRACED = (all_reduce, broadcast, reduce, gather, scatter, all_gather, reduce_scatter, all_to_all, all_to_all_single)

ROWS = tuple(
    FunctionRow(
        f"dist.nn.functional.{traced.__name__}",
        "an operator of ours in forward, and one in backward",
        getattr(nn_functional, traced.__name__),
        traced,
        is_checked=False,
    )
    for traced in _TRACED
)
