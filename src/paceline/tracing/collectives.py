"""Collectives as people write them: in place, on lists, asynchronous.

Each function here is what the compiler traces in place of the function of ``torch.distributed`` whose name and
signature it has. Where torch has a form of its own for the graph and the call is one it handles, that form is traced
and the graph is the one that torch would have made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.tracing.operator_namespace import operators
from paceline.tracing.ops import NOBODY, OUTSIDE
from paceline.tracing.registry import AnswerRow, FunctionRow, SpecialRow, functions
from paceline.tracing.work import AnyWork, TracedWork

functional = _torch.functional_collectives

Group = Any
"""A process group, None for the default one, or torch's marker of a group this rank is not in."""

REDUCTIONS = _torch.reduction_names()
_traced = _torch.traced_forms()
traced_all_reduce = _traced["all_reduce"]
traced_all_gather = _traced["all_gather"]
traced_all_gather_into_tensor = _traced["all_gather_into_tensor"]
traced_reduce_scatter_tensor = _traced["reduce_scatter_tensor"]
traced_all_to_all_single = _traced["all_to_all_single"]


def is_alive(group: ProcessGroup) -> bool:
    """Whether the group was not destroyed. While tracing this is a constant, which the row of groups guards."""
    return _torch.group_is_alive(group)


def is_outside(group: Any) -> bool:
    """Whether this rank has only the marker for a group it is not in."""
    if group is None or isinstance(group, ProcessGroup):
        return False
    if isinstance(group, int):
        return True
    raise ValueError(
        f"Process group {group} is not initialized in the world group map. Please initialize the group first."
    )


def check_tensor(value: Any, name: str) -> None:
    """Raise torch's own error for a value that is not a tensor, since an operator would not even be called."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type torch.Tensor\n"
            f"             but got {type(value)} instead."
        )


def check_tensors(values: Any, name: str) -> None:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, Tensor) for value in values):
        raise TypeError(
            f"Invalid function argument. Expected parameter `{name}` of type List[torch.Tensor]\n"
            f"             but got {type(values)} instead."
        )


def named(group: Group) -> str:
    """What stands for the group in a graph."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            return ""  # the operator says what is wrong, when it runs
    return OUTSIDE if is_outside(group) else group.group_name


def reduction(op: Any) -> str:
    """What stands for a reduction in a graph."""
    name = REDUCTIONS.get(op)
    return refuse_reduction(op) if name is None else name


def given(rank: int | None) -> int:
    return NOBODY if rank is None else rank


def hidden(tensors: list[Tensor]) -> list[Tensor]:
    """Detach ``tensors``: autograd does not see c10d's collectives, neither in a graph nor outside."""
    return [tensor.detach() for tensor in tensors]


def begin(
    name: str,
    written: list[Tensor],
    read: list[Tensor],
    group: Group,
    async_op: bool,
    op: Any = None,
    ranks: list[int] | None = None,
) -> Any:
    """Put one of our operators in the graph. ``op`` is the reduction of those that reduce."""
    if is_outside(group):
        return operators.not_a_member(name)
    operator = getattr(operators, name)
    how = "" if op is None else reduction(op)
    results = operator(hidden(written), hidden(read), named(group), how, ranks or [], not async_op)
    if async_op:
        return TracedWork(written, results)
    for target, value in zip(written, results):  # noqa: B905 (a barrier has a result and writes nothing)
        target.detach().copy_(value)
    return None


def launched(targets: list[Tensor], pending: Tensor) -> TracedWork:
    """A handle for one of torch's own functional collectives."""
    operators.in_flight([pending])
    return TracedWork(targets, [pending], is_torchs=True)


def can_be_torchs(group: Group) -> bool:
    """Whether torch's form of a collective can be used. It looks the group up by name, and a dead group has none."""
    return (dist.group.WORLD is not None) if group is None else not is_outside(group) and is_alive(group)


def refuse_reduction(op: Any) -> str:
    """Raise for a reduction that no graph can hold. Inside a graph, the row of this name in ``refusals`` does it."""
    raise ValueError(f"Unsupported reduction {op}")


# --- everybody to everybody --------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    check_tensor(tensor, "tensor")
    if not can_be_torchs(group):
        return begin("all_reduce", [tensor], [], group, async_op, op)
    how = reduction(op)
    if not async_op:
        return traced_all_reduce(tensor, op=how, group=group)
    return launched([tensor], functional.all_reduce(tensor.detach(), how, named(group)))


def all_reduce_coalesced(tensors: Any, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Any:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return begin("all_reduce_coalesced", tensors, [], group, async_op, op)


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Any:
    check_tensors(tensor_list, "tensor_list")
    check_tensor(tensor, "tensor")
    if (
        not can_be_torchs(group)
        or len(tensor_list) != dist.get_world_size(group)
        or not all(t.shape == tensor.shape and t.dtype == tensor.dtype for t in tensor_list)
    ):
        return begin("all_gather", list(tensor_list), [tensor], group, async_op)
    if not async_op:
        return traced_all_gather(tensor_list, tensor, group=group)
    flat = tensor.detach().contiguous().view(-1)
    return launched(list(tensor_list), functional.all_gather_into_tensor(flat, len(tensor_list), named(group)))


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False
) -> Any:
    check_tensor(input_tensor, "input_tensor")
    check_tensor(output_tensor, "output_tensor")
    size = 1 if not can_be_torchs(group) else dist.get_world_size(group)
    if (
        not can_be_torchs(group)
        or output_tensor.dim() != input_tensor.dim()
        or output_tensor.numel() != size * input_tensor.numel()
        or output_tensor.dtype != input_tensor.dtype
    ):
        return begin("all_gather_into_tensor", [output_tensor], [input_tensor], group, async_op)
    if not async_op:
        return traced_all_gather_into_tensor(output_tensor, input_tensor, group=group)
    pending = functional.all_gather_into_tensor(input_tensor.detach().contiguous(), size, named(group))
    return launched([output_tensor], pending)


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    written = [tensor for tensors in output_tensor_lists for tensor in tensors]
    return begin("all_gather_coalesced", written, list(input_tensor_list), group, async_op)


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    check_tensor(output, "output")
    check_tensors(input_list, "input_list")
    return begin("reduce_scatter", [output], list(input_list), group, async_op, op)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Any:
    check_tensor(output, "output")
    check_tensor(input, "input")
    size = 1 if not can_be_torchs(group) else dist.get_world_size(group)
    if (
        not can_be_torchs(group)
        or output.dim() != input.dim()
        or output.numel() * size != input.numel()
        or output.dtype != input.dtype
    ):
        return begin("reduce_scatter_tensor", [output], [input], group, async_op, op)
    how = reduction(op)
    if not async_op:
        return traced_reduce_scatter_tensor(output, input, op=how, group=group)
    pending = functional.reduce_scatter_tensor(input.detach().contiguous(), how, size, named(group))
    return launched([output], pending)


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: Group = None, async_op: bool = False
) -> Any:
    check_tensors(output_tensor_list, "output_tensor_list")
    check_tensors(input_tensor_list, "input_tensor_list")
    return begin("all_to_all", list(output_tensor_list), list(input_tensor_list), group, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Any:
    check_tensor(output, "output")
    check_tensor(input, "input")
    fits = (output_split_sizes is None or sum(output_split_sizes) == output.shape[0]) and (
        input_split_sizes is None or sum(input_split_sizes) == input.shape[0]
    )
    if fits and not async_op and can_be_torchs(group):
        return traced_all_to_all_single(output, input, output_split_sizes, input_split_sizes, group=group)
    splits = [*output_split_sizes, *input_split_sizes] if output_split_sizes and input_split_sizes else []
    return begin("all_to_all_single", [output], [input], group, async_op, ranks=splits)


# --- one to everybody, everybody to one --------------------------------------------------------------------


def broadcast(
    tensor: Tensor, src: int | None = None, group: Group = None, async_op: bool = False, group_src: int | None = None
) -> Any:
    check_tensor(tensor, "tensor")
    return begin("broadcast", [tensor], [], group, async_op, ranks=[given(src), given(group_src)])


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    check_tensor(tensor, "tensor")
    return begin("reduce", [tensor], [], group, async_op, op, [given(dst), given(group_dst)])


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    check_tensor(tensor, "tensor")
    if dst is None and group_dst is None:
        dst = 0
    written = list(gather_list) if gather_list else []
    return begin("gather", written, [tensor], group, async_op, ranks=[given(dst), given(group_dst)])


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    check_tensor(tensor, "tensor")
    if src is None and group_src is None:
        src = 0
    read = list(scatter_list) if scatter_list else []
    return begin("scatter", [tensor], read, group, async_op, ranks=[given(src), given(group_src)])


def barrier(group: Group = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Any:
    return begin("barrier", [], [torch.zeros(1)], group, async_op)


def monitored_barrier(group: Group = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    return begin("monitored_barrier", [], [torch.zeros(1)], group, False, ranks=[int(wait_all_ranks)])


_OURS = "an operator of ours, in the order of the program"
_ASYNC = "torch's functional operator; with async_op=True a handle that waits for it"

ROWS = (
    SpecialRow(
        "isinstance(work, dist.Work)", "a constant", functools.partial(_torch.class_instead, dist.Work, AnyWork)
    ),
    AnswerRow("(whether a group is alive)", "a constant; groups are guarded on it", is_alive),
    *functions(
        c10d,
        globals(),
        {
            "all_reduce": _ASYNC,
            "all_reduce_coalesced": _OURS,
            "all_gather": f"{_ASYNC}; tensors of several sizes: {_OURS}",
            "all_gather_into_tensor": _ASYNC,
            "all_gather_coalesced": _OURS,
            "reduce_scatter": _OURS,
            "reduce_scatter_tensor": _ASYNC,
            "all_to_all": _OURS,
            "all_to_all_single": _ASYNC,
            "broadcast": _OURS,
            "reduce": _OURS,
            "gather": _OURS,
            "scatter": _OURS,
            "barrier": _OURS,
            "monitored_barrier": _OURS,
        },
    ),
    FunctionRow("dist.all_gather_single", _ASYNC, c10d.all_gather_single, all_gather_into_tensor),
    FunctionRow("dist.reduce_scatter_single", _ASYNC, c10d.reduce_scatter_single, reduce_scatter_tensor),
)
