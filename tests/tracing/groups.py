"""Point 1: process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tests.tracing.row import Rows

row = Rows(1)


row.add("group.rank()", lambda at: at.rank, lambda x, group: (x + group.rank(), group.rank()))


@row("group.rank() of a reversed group", lambda at: at.size - 1 - at.rank)
def reverse_rank(x, reverse):
    return x + reverse.rank(), reverse.rank()


row.add("group.size()", lambda at: at.size, lambda x, group: (x * group.size(), group.size()), inductor=True)
row.add("group.size() of a subgroup", lambda at: 1, lambda x, solo: (x * solo.size(), solo.size()))
row.add("group.name()", lambda at: at.group.name(), lambda x, group: (x + 1, group.name()))
row.add("group.group_name", lambda at: at.other.group_name, lambda x, other: (x + 1, other.group_name))
row.add("group.group_desc", lambda at: "the other group", lambda x, other: (x + 1, other.group_desc))
row.add("group.bound_device_id", lambda at: None, lambda x, group: (x + 1, group.bound_device_id))
row.add("dist.get_rank()", lambda at: at.rank, lambda x: (x + dist.get_rank(), dist.get_rank()), inductor=True)


@row("dist.get_rank(group)", lambda at: at.size - 1 - at.rank)
def get_rank_of(x, reverse):
    return x + dist.get_rank(reverse), dist.get_rank(group=reverse)


row.add("dist.get_rank(subgroup)", lambda at: 0, lambda x, solo: (x + 1, dist.get_rank(solo)))
row.add("dist.get_world_size()", lambda at: at.size, lambda x: (x / dist.get_world_size(), dist.get_world_size()))


@row("dist.get_world_size(group)", lambda at: 1)
def get_world_size_of(x, solo):
    return x / dist.get_world_size(solo), dist.get_world_size(group=solo)


@row("dist.get_process_group_ranks(group)", lambda at: list(reversed(range(at.size))))
def get_ranks(x, reverse):
    return x + 1, dist.get_process_group_ranks(reverse)


@row("dist.get_process_group_ranks(None)", lambda at: list(range(at.size)))
def get_ranks_of_none(x):
    return x + 1, dist.get_process_group_ranks(None)


row.add("dist.get_backend()", lambda at: dist.get_backend(), lambda x: (x + 1, dist.get_backend()))


@row("dist.get_backend(group)", lambda at: dist.get_backend())
def get_backend_of(x, other):
    if dist.get_backend(other) == "nccl":
        return x - 1, "nccl"
    return x + 1, dist.get_backend(other)


row.add("dist.get_backend_config()", lambda at: dist.get_backend_config(), lambda x: (x + 1, dist.get_backend_config()))


@row("dist.get_global_rank(group, r)", lambda at: [at.size - 1, 0])
def get_global_rank(x, reverse):
    return x + 1, [dist.get_global_rank(reverse, 0), dist.get_global_rank(reverse, reverse.size() - 1)]


@row("dist.get_group_rank(group, r)", lambda at: at.size - 1)
def get_group_rank(x, reverse):
    return x + 1, dist.get_group_rank(reverse, 0)


row.add("dist.get_pg_count()", lambda at: dist.get_pg_count(), lambda x: (x + 1, dist.get_pg_count()))


@row("dist.get_default_backend_for_device('cpu')", lambda at: "gloo")
def get_default_backend(x):
    return x + 1, dist.get_default_backend_for_device("cpu")


@row("dist.get_node_local_rank(fallback_rank=r)", lambda at: 3)
def get_node_local_rank(x):
    return x + 1, dist.get_node_local_rank(fallback_rank=3)


@row("dist.GroupMember.WORLD", lambda at: at.group)
def group_member_world(x):
    return x + dist.GroupMember.WORLD.size(), dist.GroupMember.WORLD


@row("dist.GroupMember.NON_GROUP_MEMBER", lambda at: at.rank != 0)
def non_group_member(x, first):
    if first == dist.GroupMember.NON_GROUP_MEMBER:
        return x - 1, True
    return x + 1, False


@row("group is dist.GroupMember.NON_GROUP_MEMBER", lambda at: [at.rank != 0, False])
def is_non_group_member(x, first, group):
    return x + 1, [first is dist.GroupMember.NON_GROUP_MEMBER, group is dist.GroupMember.NON_GROUP_MEMBER]


@row("dist.get_rank(a group this rank is not in)", lambda at: 0 if at.rank == 0 else -1)
def get_rank_outside(x, first):
    return x + 1, dist.get_rank(first)


@row("dist.group.WORLD", lambda at: at.group, inductor=True)
def group_world(x):
    return x + dist.group.WORLD.rank(), dist.group.WORLD


@row("dist.group.WORLD as an argument of a collective's", lambda at: sum(at.all_x()))
def group_world_as_argument(x):
    y = x.clone()
    dist.all_reduce(y, group=dist.group.WORLD)
    return x + 1, y


@row("group == group", lambda at: [True, False, False, True])
def equality(x, group, other):
    return x + 1, [group == dist.group.WORLD, group == other, group != group, group != other]


@row("group is group", lambda at: [True, False, True])
def identity(x, group, other):
    return x + 1, [group is dist.group.WORLD, group is other, group is not other]


row.add("group is None", lambda at: [False, True], lambda x, group: (x + 1, [group is None, group is not None]))


@row("group or dist.group.WORLD", lambda at: at.size)
def default_of_an_argument(x, group):
    def helper(x, group=None):
        return x + 1, (group or dist.group.WORLD).size()

    return helper(x)


@row("{group: ...}[group]", lambda at: [1, 2, True, False])
def dictionary_key(x, group, other, reverse):
    table = {group: 1, other: 2}
    return x + table[group], [table[group], table[other], other in table, reverse in table]


@row("a dictionary of groups from outside", lambda at: 2)
def dictionary_from_outside(x, table_of_groups, other):
    return x + table_of_groups[other], table_of_groups[other]


@row("group in [groups]", lambda at: [True, False])
def membership_in_list(x, group, other, reverse):
    return x + 1, [group in [group, other], reverse in (group, other)]


@row("hash(group)", lambda at: [True, False])
def hash_of_group(x, group, other):
    return x + 1, [hash(group) == hash(dist.group.WORLD), hash(group) == hash(other)]


@row("isinstance(group, dist.ProcessGroup)", lambda at: [True, False])
def is_instance(x, group):
    return x + 1, [isinstance(group, dist.ProcessGroup), isinstance(x, dist.ProcessGroup)]


@row("for group in groups", lambda at: [at.size, at.size, 1])
def loop_over_groups(x, groups):
    return x + 1, [group.size() for group in groups]


@row("group as a keyword argument", lambda at: [0, at.size])
def keyword_argument(x, solo, group):
    def helper(x, *, group):
        return group.rank() if group.size() == 1 else group.size()

    return x + 1, [helper(x, group=solo), helper(x, group=group)]


class Holder(nn.Module):
    """A module that keeps its group, as parallel layers do."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = x * self.scale * self.group.size()
        dist.all_reduce(y, group=self.group)
        return y, self.group.rank(), self.group


row.add("module.group", None, lambda group: (Holder(group), None), builds=True, grad=False)
row.add("module.group of a subgroup", None, lambda solo: (Holder(solo), None), builds=True, grad=False)


@row("a group returned from the graph", lambda at: [at.group, at.other])
def group_returned(x, group, other):
    return x + 1, [group, other]


@row("dist.is_available()", lambda at: True)
def is_available(x):
    return (x + 1 if dist.is_available() else x - 1), dist.is_available()


@row("dist.is_initialized()", lambda at: True)
def is_initialized(x):
    return (x + 1 if dist.is_available() and dist.is_initialized() else x - 1), dist.is_initialized()


@row("dist.is_gloo_available() and the other backends'", lambda at: [True, dist.is_nccl_available()])
def backend_availability(x):
    others = [dist.is_mpi_available(), dist.is_ucc_available(), dist.is_xccl_available()]
    return x + sum(others), [dist.is_gloo_available(), dist.is_nccl_available()]


@row("dist.is_backend_available('gloo')", lambda at: [True, False])
def is_backend_available(x):
    return x + 1, [dist.is_backend_available("gloo"), dist.is_backend_available("no such backend")]


row.add("dist.is_torchelastic_launched()", lambda at: False, lambda x: (x + 1, dist.is_torchelastic_launched()))


@row("c10d._get_default_group()", lambda at: at.group)
def get_default_group(x):
    return x + c10d._get_default_group().rank(), c10d._get_default_group()


@row("c10d._resolve_process_group(name)", lambda at: at.other)
def resolve_group(x, other):
    return x + 1, c10d._resolve_process_group(other.group_name)


@row("c10d._rank_not_in_group(group)", lambda at: [at.rank != 0, False])
def rank_not_in_group(x, first, group):
    return x + 1, [c10d._rank_not_in_group(first), c10d._rank_not_in_group(group)]


@row("dist.ReduceOp.SUM == dist.ReduceOp.SUM", lambda at: [True, False])
def reduce_op_equality(x, max_op):
    return x + 1, [max_op == dist.ReduceOp.MAX, max_op == dist.ReduceOp.SUM]
