"""Process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tests.tracing.row import Rows

row = Rows(1)


row.add("group.rank()", lambda at: at.rank, lambda x, group: (x + group.rank(), group.rank()))
row.add("group.rank() of a reversed group", lambda at: at.size - 1 - at.rank, lambda reverse: reverse.rank())
row.add("group.size()", lambda at: at.size, lambda x, group: (x * group.size(), group.size()), inductor=True)
row.add("group.size() of a subgroup", lambda at: 1, lambda solo: solo.size())
row.add("group.name()", lambda at: at.group.name(), lambda group: group.name())
row.add("group.group_name", lambda at: at.other.group_name, lambda other: other.group_name)
row.add("group.group_desc", lambda at: "the other group", lambda other: other.group_desc)
row.add("group.bound_device_id", lambda at: None, lambda group: group.bound_device_id)
row.add("dist.get_rank()", lambda at: at.rank, lambda x: (x + dist.get_rank(), dist.get_rank()), inductor=True)
row.add("dist.get_rank(group)", lambda at: at.size - 1 - at.rank, lambda reverse: dist.get_rank(group=reverse))
row.add("dist.get_rank(subgroup)", lambda at: 0, lambda solo: dist.get_rank(solo))
row.add("dist.get_world_size()", lambda at: at.size, lambda x: (x / dist.get_world_size(), dist.get_world_size()))
row.add("dist.get_world_size(group)", lambda at: 1, lambda solo: dist.get_world_size(group=solo))


@row("dist.get_process_group_ranks(group)", lambda at: list(reversed(range(at.size))))
def get_ranks(reverse):
    return dist.get_process_group_ranks(reverse)


row.add(
    "dist.get_process_group_ranks(None)", lambda at: list(range(at.size)), lambda: dist.get_process_group_ranks(None)
)
row.add("dist.get_backend()", lambda at: dist.get_backend(), lambda: dist.get_backend())


@row("dist.get_backend(group)", lambda at: dist.get_backend())
def get_backend_of(x, other):
    if dist.get_backend(other) == "nccl":
        return x - 1, "nccl"
    return x + 1, dist.get_backend(other)


row.add("dist.get_backend_config()", lambda at: dist.get_backend_config(), lambda: dist.get_backend_config())


@row("dist.get_global_rank(group, r)", lambda at: [at.size - 1, 0])
def get_global_rank(reverse):
    return [dist.get_global_rank(reverse, 0), dist.get_global_rank(reverse, reverse.size() - 1)]


row.add("dist.get_group_rank(group, r)", lambda at: at.size - 1, lambda reverse: dist.get_group_rank(reverse, 0))
row.add("dist.get_pg_count()", lambda at: dist.get_pg_count(), lambda: dist.get_pg_count())
row.add(
    "dist.get_default_backend_for_device('cpu')", lambda at: "gloo", lambda: dist.get_default_backend_for_device("cpu")
)
row.add("dist.get_node_local_rank(fallback_rank=r)", lambda at: 3, lambda: dist.get_node_local_rank(fallback_rank=3))


@row("dist.GroupMember.WORLD", lambda at: at.group)
def group_member_world(x):
    return x + dist.GroupMember.WORLD.size(), dist.GroupMember.WORLD


@row("dist.GroupMember.NON_GROUP_MEMBER", lambda at: at.rank != 0)
def non_group_member(x, first):
    if first == dist.GroupMember.NON_GROUP_MEMBER:
        return x - 1, True
    return x + 1, False


@row("group is dist.GroupMember.NON_GROUP_MEMBER", lambda at: [at.rank != 0, False])
def is_non_group_member(first, group):
    return [first is dist.GroupMember.NON_GROUP_MEMBER, group is dist.GroupMember.NON_GROUP_MEMBER]


row.add(
    "dist.get_rank(a group this rank is not in)",
    lambda at: 0 if at.rank == 0 else -1,
    lambda first: dist.get_rank(first),
)


@row("dist.group.WORLD", lambda at: at.group, inductor=True)
def group_world(x):
    return x + dist.group.WORLD.rank(), dist.group.WORLD


@row("dist.group.WORLD as an argument of a collective's", lambda at: sum(at.all_x()))
def group_world_as_argument(x):
    y = x.clone()
    dist.all_reduce(y, group=dist.group.WORLD)
    return x + 1, y


@row("group == group", lambda at: [True, False, False, True])
def equality(group, other):
    return [group == dist.group.WORLD, group == other, group != group, group != other]


@row("group is group", lambda at: [True, False, True])
def identity(group, other):
    return [group is dist.group.WORLD, group is other, group is not other]


row.add("group is None", lambda at: [False, True], lambda group: [group is None, group is not None])


@row("group or dist.group.WORLD", lambda at: at.size)
def default_of_an_argument():
    def helper(group=None):
        return (group or dist.group.WORLD).size()

    return helper()


@row("{group: ...}[group]", lambda at: [1, 2, True, False])
def dictionary_key(x, group, other, reverse):
    table = {group: 1, other: 2}
    return x + table[group], [table[group], table[other], other in table, reverse in table]


row.add("a dictionary of groups from outside", lambda at: 2, lambda table_of_groups, other: table_of_groups[other])


@row("group in [groups]", lambda at: [True, False])
def membership_in_list(group, other, reverse):
    return [group in [group, other], reverse in (group, other)]


@row("hash(group)", lambda at: [True, False])
def hash_of_group(group, other):
    return [hash(group) == hash(dist.group.WORLD), hash(group) == hash(other)]


@row("isinstance(group, dist.ProcessGroup)", lambda at: [True, False])
def is_instance(x, group):
    return x + 1, [isinstance(group, dist.ProcessGroup), isinstance(x, dist.ProcessGroup)]


row.add("for group in groups", lambda at: [at.size, at.size, 1], lambda groups: [group.size() for group in groups])


@row("group as a keyword argument", lambda at: [0, at.size])
def keyword_argument(solo, group):
    def helper(*, group):
        return group.rank() if group.size() == 1 else group.size()

    return [helper(group=solo), helper(group=group)]


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
row.add("a group returned from the graph", lambda at: [at.group, at.other], lambda group, other: [group, other])


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
def is_backend_available():
    return [dist.is_backend_available("gloo"), dist.is_backend_available("no such backend")]


row.add("dist.is_torchelastic_launched()", lambda at: False, lambda: dist.is_torchelastic_launched())
row.add("c10d._get_default_group()", lambda at: at.group, lambda: c10d._get_default_group())


@row("c10d._resolve_process_group(name)", lambda at: at.other)
def resolve_group(other):
    return c10d._resolve_process_group(other.group_name)


@row("c10d._rank_not_in_group(group)", lambda at: [at.rank != 0, False])
def rank_not_in_group(first, group):
    return [c10d._rank_not_in_group(first), c10d._rank_not_in_group(group)]


@row("dist.ReduceOp.SUM == dist.ReduceOp.SUM", lambda at: [True, False])
def reduce_op_equality(max_op):
    return [max_op == dist.ReduceOp.MAX, max_op == dist.ReduceOp.SUM]
