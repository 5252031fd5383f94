"""Process groups: what the compiler may read of one, and what a graph that has read it depends on."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.tracing.collectives import Group, is_alive, is_outside, named
from paceline.tracing.operator_namespace import operators
from paceline.tracing.registry import AroundRow, MembersRow, OverrideRow, SpecialRow, stand_in

ATTRIBUTES = frozenset({"group_name", "group_desc", "bound_device_id"})
METHODS = frozenset({"rank", "size", "name"})


def facts(group: ProcessGroup) -> list[Any]:
    """What must stay the same for every graph that holds the group."""
    return [_torch.group_is_alive(group)]


default_group = _torch.traced_default_group


def get_rank(group: Group = None) -> int:
    if is_outside(group):
        return -1
    if group is None:
        group = default_group()
    elif is_dead(group):
        return -1
    return group.rank()


def get_world_size(group: Group = None) -> int:
    if is_outside(group):
        return -1
    if group is None:
        group = default_group()
    return group.size()


def is_dead(group: Any) -> bool:
    """Whether the group was destroyed. If so, the graph raises when it runs; torch's code would raise while traced."""
    if not isinstance(group, ProcessGroup) or is_alive(group):
        return False
    operators.find_group(named(group))
    return True


def get_process_group_ranks(group: Group) -> list[int]:
    return [] if is_dead(group) else torchs_process_group_ranks(group)


def get_backend(group: Group = None) -> str:
    if is_outside(group):
        operators.invalid_group()
        return ""
    return "" if is_dead(group) else torchs_backend(group)


def get_global_rank(group: Group, group_rank: int) -> int:
    return -1 if is_dead(group) else torchs_global_rank(group, group_rank)


def get_group_rank(group: Group, global_rank: int) -> int:
    return -1 if is_dead(group) else torchs_group_rank(group, global_rank)


torchs_process_group_ranks = stand_in()
torchs_backend = stand_in()
torchs_global_rank = stand_in()
torchs_group_rank = stand_in()


def is_initialized() -> bool:
    return dist.GroupMember.WORLD is not None


def resolve(group_name: str) -> Any:
    for group, name in _torch.names_of_groups().items():
        if name == group_name:
            return group
    raise RuntimeError(f"Could not resolve the process group registered under the name {group_name}")


def _guard() -> None:
    _torch.set_opaque_guard(ProcessGroup, facts)
    _torch.guard_what_is_read(ProcessGroup, attributes=ATTRIBUTES, methods=METHODS, identity="group_name")


_CONSTANT = "a constant; the graph depends on it"

ROWS = (
    MembersRow(
        "group.name(), group.bound_device_id",
        "constants; the graph depends on them",
        ProcessGroup,
        constant=ATTRIBUTES | METHODS | _torch.private_group_members,
    ),
    SpecialRow("a ProcessGroup", "a name; the graph depends on what was read of it, and on its being alive", _guard),
    SpecialRow(
        "dist.ReduceOp.SUM, ...",
        "a name; the graph depends on it",
        functools.partial(_torch.guard_value_of, dist.ReduceOp.RedOpType, "value"),
    ),
    SpecialRow("what a group, mesh or placement raises", "the program's own exception", _torch.say_what_objects_say),
    OverrideRow("dist.get_rank()", _CONSTANT, c10d.get_rank, get_rank),
    OverrideRow("c10d._resolve_process_group()", "the group", _torch.resolve_group, resolve),
    OverrideRow("dist.get_world_size()", _CONSTANT, c10d.get_world_size, get_world_size),
    *(
        AroundRow(f"dist.{original.__name__}()", _CONSTANT, original, traced, torchs)
        for original, traced, torchs in (
            (c10d.get_process_group_ranks, get_process_group_ranks, torchs_process_group_ranks),
            (c10d.get_backend, get_backend, torchs_backend),
            (c10d.get_global_rank, get_global_rank, torchs_global_rank),
            (c10d.get_group_rank, get_group_rank, torchs_group_rank),
        )
    ),
    OverrideRow("dist.is_initialized()", _CONSTANT, c10d.is_initialized, is_initialized),
)
