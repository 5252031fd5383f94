"""Sends and receives that ``torch.compile`` can trace: blocking, asynchronous, and in batches."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.tracing.collectives import Group, begin, check_tensor, given, hidden, is_outside, named
from paceline.tracing.operator_namespace import operators
from paceline.tracing.registry import FunctionRow, OverrideRow, functions
from paceline.tracing.work import TracedWork

default_group = _torch.traced_default_group


def isend(
    tensor: Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Any:
    check_tensor(tensor, "tensor")
    return begin("isend", [], [tensor], group, True, ranks=[given(dst), given(group_dst), tag])


def irecv(
    tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Any:
    check_tensor(tensor, "tensor")
    return begin("irecv", [tensor], [], group, True, ranks=[given(src), given(group_src), tag])


def send(
    tensor: Tensor, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Any:
    check_tensor(tensor, "tensor")
    if is_outside(group):
        return operators.invalid_group()
    return begin("isend", [], [tensor], group, False, ranks=[given(dst), given(group_dst), tag])


def recv(
    tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0, group_src: int | None = None
) -> Any:
    check_tensor(tensor, "tensor")
    if is_outside(group):
        operators.not_a_member("recv")
        return -1
    if src is None and group_src is None:
        source = torch.zeros(1, dtype=torch.int64)
        begin("recv_any", [tensor, source], [], group, False, ranks=[tag])
        return operators.number(source)
    begin("irecv", [tensor], [], group, False, ranks=[given(src), given(group_src), tag])
    if src is not None:
        return src
    return dist.get_global_rank(default_group() if group is None else group, cast(int, group_src))


def batch_isend_irecv(p2p_op_list: list[Any]) -> Any:
    group = p2p_op_list[0].group
    if is_outside(group):
        operators.not_a_member("batch_isend_irecv")
        return []
    kinds, peers, tags, written, read = "", [], [], [], []
    for one in p2p_op_list:
        if one.op is dist.isend:
            kinds += "s"
            read.append(one.tensor)
        else:
            kinds += "r"
            written.append(one.tensor)
        peers.append(one.group_peer)
        tags.append(one.tag)
    results = operators.batch_isend_irecv(hidden(written), hidden(read), named(group), kinds, peers + tags, False)
    return [
        TracedWork([one.tensor] if one.op is dist.irecv else [], [result])
        for one, result in zip(p2p_op_list, results, strict=True)
    ]


class Operation:
    """A ``dist.P2POp`` that was made inside the graph. torch itself traces those only with a switch that is off."""

    def __init__(self, op: Any, tensor: Tensor, group: ProcessGroup, tag: int, group_peer: int) -> None:
        self.op = op
        self.tensor = tensor
        self.group = group
        self.tag = tag
        self.group_peer = group_peer
        self.peer = dist.get_global_rank(group, group_peer)


def operation(
    op: Any,
    tensor: Tensor,
    peer: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_peer: int | None = None,
) -> Operation:
    if op is not dist.isend and op is not dist.irecv:
        raise RuntimeError(
            "Invalid ``op``. Expected ``op`` to be of type ``torch.distributed.isend`` or ``torch.distributed.irecv``."
        )
    if group is None:
        group = default_group()
    if group_peer is None:
        group_peer = dist.get_group_rank(group, cast(int, peer))
    return Operation(op, tensor, group, tag, group_peer)


class Coalescing:
    """The context manager of ``_coalescing_manager`` in a graph, whose collectives are begun where they stand.

    The compiler sees all of them at once, which is the purpose of coalescing.
    """

    def __enter__(self) -> Coalescing:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        return None

    def append(self, work: Any) -> None:
        if work is not None:
            work.wait()

    def wait(self) -> None:
        return None


def coalescing_manager(group: Group = None, device: Any = None, async_ops: bool = False) -> Coalescing:
    return Coalescing()


_OURS = "an operator of ours, in the order of the program"
_HANDLE = f"{_OURS}, and a handle"

ROWS = (
    *functions(
        c10d,
        globals(),
        {"send": _OURS, "recv": _OURS, "isend": _HANDLE, "irecv": _HANDLE, "batch_isend_irecv": f"{_HANDLE} each"},
    ),
    OverrideRow("dist.P2POp(...)", "no part of the graph", dist.P2POp, operation),
    FunctionRow(
        "dist._coalescing_manager()",
        "its collectives, each by itself",
        _torch.coalescing_manager,
        coalescing_manager,
    ),
)
