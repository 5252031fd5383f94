"""What cannot be traced, and what is wrong in eager too."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def new_group(x):
    return x * dist.new_group([0, 1]).size()


def all_gather_object(x):
    out = [None, None]
    dist.all_gather_object(out, "an object")
    return x + len(out)


def with_mesh(x):
    with with_mesh.mesh:
        return x + 1


OUTSIDE = ("before", "outside", "argument")
TENSORS = ("tensor", "outside")
# (function, words one of which the hint has: what to write instead).
REFUSED = {
    "dist.new_group": (new_group, OUTSIDE),
    "dist.new_subgroups": (lambda x: x * dist.new_subgroups(1)[0].size(), OUTSIDE),
    "dist.new_subgroups_by_enumeration": (
        lambda x: x * dist.new_subgroups_by_enumeration([[0], [1]])[0].size(),
        OUTSIDE,
    ),
    "dist.split_group": (lambda x: x * dist.split_group(split_ranks=[[0, 1]]).size(), OUTSIDE),
    "dist._make_nccl_premul_sum": (
        lambda x: dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5)),
        ("multiply", "scale"),
    ),
    "init_device_mesh": (lambda x: x * init_device_mesh("cpu", (2,)).size(), OUTSIDE),
    "DeviceMesh": (lambda x: x * DeviceMesh("cpu", [0, 1]).size(), OUTSIDE),
    "with mesh": (with_mesh, ("pass",)),
    "dist.init_process_group": (lambda x: dist.init_process_group("gloo"), ("before", "outside")),
    "dist.destroy_process_group": (lambda x: dist.destroy_process_group(), ("after", "outside", "before")),
    "dist.all_gather_object": (all_gather_object, TENSORS),
    "dist.broadcast_object_list": (lambda x: dist.broadcast_object_list(["an object"], 0), TENSORS),
    "dist.gather_object": (lambda x: dist.gather_object("an object", None, 0), TENSORS),
    "dist.scatter_object_list": (lambda x: dist.scatter_object_list([None], ["a", "b"], 0), TENSORS),
    "dist.send_object_list": (lambda x: dist.send_object_list(["an object"], 1), TENSORS),
    "dist.recv_object_list": (lambda x: dist.recv_object_list([None], 0), TENSORS),
    "work.get_future": (lambda x: dist.all_reduce(x, async_op=True).get_future(), ("wait", "outside")),
    "work._source_rank": (lambda x: x + dist.irecv(x, 0)._source_rank(), ("recv", "wait", "outside")),
}

# Calls that are refused with an error in eager mode.
BAD = {
    "not a tensor": lambda x, at: dist.all_reduce([x]),
    "not a group": lambda x, at: dist.all_reduce(x, group="world"),
    "no root": lambda x, at: dist.broadcast(x),
    "two roots": lambda x, at: dist.broadcast(x, src=0, group_src=0),
    "too short": lambda x, at: dist.all_gather_single(x.new_empty(3), x),
    "too few": lambda x, at: dist.all_gather([torch.empty_like(x)], x),
    "wrong dtype": lambda x, at: dist.all_gather([torch.empty_like(x, dtype=torch.float64) for _ in range(2)], x),
    "does not divide": lambda x, at: dist.reduce_scatter_single(x.new_empty(3), x),
    "wrong splits": lambda x, at: dist.all_to_all_single(torch.empty_like(x), x, [1, 1], [1, 1]),
    "no such root": lambda x, at: dist.broadcast(x, src=7),
    "root not in the group": lambda x, at: dist.broadcast(x, src=1 - at.rank, group=at.solo),
    "to itself": lambda x, at: dist.send(x, dst=at.rank),
    "no list at the root": lambda x, at: dist.gather(x, None, dst=at.rank),
    "rank not in the group": lambda x, at: x + dist.get_group_rank(at.solo, 1 - at.rank),
    "no such dimension": lambda x, at: x + at.grid["pp"].size(),
    "group of no dimension": lambda x, at: x + at.grid.get_group("pp").size(),
    "ambiguous dimension": lambda x, at: x + at.grid.get_local_rank(),
    "empty batch": lambda x, at: dist.batch_isend_irecv([]),
    "not an operation": lambda x, at: dist.batch_isend_irecv([dist.P2POp(dist.all_reduce, x, 0)]),
}
