"""Subgroups, several groups at once, several threads."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from ..conformance import assert_shared_memory, case
from ..inputs import every, in_threads, reduced, same, values

COUNT = 1023


def _check_sum(group: dist.ProcessGroup, members: list[int], rank: int, *, count: int = COUNT, seed: int = 0) -> None:
    mine = values(count, torch.float32, rank=rank, seed=seed)
    dist.all_reduce(mine, group=group)
    same(mine, reduced("SUM", [values(count, torch.float32, rank=m, seed=seed) for m in members]), members, count)


@case(4)
def subgroups(rank, world_size):
    """Pairs, a triple, one rank alone, all of them in another order."""
    for members in ([0, 1], [2, 3], [0, 2, 3], [1], [3, 2, 1, 0]):
        group = dist.new_group(members)
        if rank in members:
            if dist.get_backend(group) != "gloo" and len(members) > 1:
                assert_shared_memory(group)
            for count in (1, COUNT, 70_001):
                _check_sum(group, members, rank, count=count)
            ordered = dist.get_process_group_ranks(group)
            outs = [torch.zeros(5) for _ in ordered]
            dist.all_gather(outs, values(5, torch.float32, rank=rank), group=group)
            same(torch.cat(outs), torch.cat([values(5, torch.float32, rank=m) for m in ordered]), "all_gather", members)
            root = members[-1]
            mine = values(7, torch.float32, rank=rank)
            dist.broadcast(mine, root, group=group)
            same(mine, values(7, torch.float32, rank=root), "broadcast", members)
            mine = values(7, torch.float32, rank=rank)
            dist.broadcast(mine, group=group, group_src=0)
            same(mine, values(7, torch.float32, rank=ordered[0]), "broadcast by group rank", members)
    dist.barrier()


@case(4)
def disjoint_groups_at_once(rank, world_size):
    """Two pairs, each at its own pace: one makes many collectives while the other makes one."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    members = [2 * mine, 2 * mine + 1]
    for turn in range(20 if mine else 1):
        _check_sum(pairs[mine], members, rank, seed=turn)
    _check_sum(dist.group.WORLD, list(range(4)), rank)


@case(2, 4)
def overlapping_groups_at_once(rank, world_size):
    """Works of several groups in flight together; nothing of one is taken for another's."""
    everybody = list(range(world_size))
    groups = [dist.group.WORLD, dist.new_group(everybody), dist.new_group(everybody)]
    tensors = [[values(5_003, torch.float32, rank=rank, seed=10 * g + turn) for turn in range(5)] for g in range(3)]
    works = []
    for turn in range(5):
        for g in range(3):
            works.append(dist.all_reduce(tensors[g][turn], group=groups[g], async_op=True))
    for work in reversed(works):
        work.wait()
    for g in range(3):
        for turn in range(5):
            want = reduced("SUM", every(5_003, torch.float32, world_size, seed=10 * g + turn))
            same(tensors[g][turn], want, "group", g, "turn", turn)


@case(4)
def rows_and_columns(rank, world_size):
    """A mesh: each rank is in a row and in a column, with collectives of both in flight."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    row, column = mesh.get_group("row"), mesh.get_group("column")
    down, across = values(COUNT, torch.float32, rank=rank), values(COUNT, torch.float32, rank=rank)
    works = [
        dist.all_reduce(down, group=row, async_op=True),
        dist.all_reduce(across, group=column, async_op=True),
    ]
    for work in works:
        work.wait()
    for got, group in ((down, row), (across, column)):
        members = dist.get_process_group_ranks(group)
        same(got, reduced("SUM", [values(COUNT, torch.float32, rank=m) for m in members]), members)


@case()
def threads_on_their_own_groups(rank, world_size):
    groups = [dist.new_group([0, 1]) for _ in range(4)]

    def work(index: int) -> None:
        for turn in range(25):
            _check_sum(groups[index], [0, 1], rank, count=1 + 311 * turn, seed=index)

    in_threads(work, 4)


@case()
def threads_on_one_group(rank, world_size):
    """Threads take turns, in an order that all ranks follow; any thread may issue, any may wait."""
    total = 30
    tensors = [values(COUNT, torch.float32, rank=rank, seed=turn) for turn in range(total)]
    works: list[dist.Work | None] = [None] * total
    turns = [threading.Semaphore(0) for _ in range(3)]
    turns[0].release()

    def issue(index: int) -> None:
        for turn in range(index, total, 3):
            turns[index].acquire()
            works[turn] = dist.all_reduce(tensors[turn], async_op=True)
            turns[(index + 1) % 3].release()

    in_threads(issue, 3)
    for turn in range(total):
        works[turn].wait()
        same(tensors[turn], reduced("SUM", every(COUNT, torch.float32, world_size, seed=turn)), "turn", turn)


@case()
def same_collective_from_several_threads(rank, world_size):
    """Equal collectives at the same time from unordered threads: whichever pairs up, each gets a whole sum."""

    def work(index: int) -> None:
        for _ in range(20):
            mine = torch.full((COUNT,), float(rank + 1))
            dist.all_reduce(mine)
            same(mine, torch.full((COUNT,), 3.0), "whole")

    in_threads(work, 3)


@case()
def made_and_destroyed(rank, world_size):
    """Groups come and go; the ones that stay keep working."""
    kept = dist.new_group([0, 1])
    for turn in range(5):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        _check_sum(group, [0, 1], rank, seed=turn)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        work.wait()
        dist.destroy_process_group(group)
        del group, work
        gc.collect()
        _check_sum(kept, [0, 1], rank, seed=turn)
        _check_sum(dist.group.WORLD, [0, 1], rank, seed=turn)


@case(1)
def alone(rank, world_size):
    """A world of one rank: every collective is the identity."""
    mine = values(COUNT, torch.float32, rank=0)
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    dist.broadcast(mine, 0)
    outs = [torch.zeros(COUNT)]
    dist.all_gather(outs, mine)
    out = torch.zeros(COUNT)
    dist.reduce_scatter_single(out, outs[0])
    dist.barrier()
    same(out, values(COUNT, torch.float32, rank=0), "a world of one")


@case()
def queries(rank, world_size):
    group = dist.group.WORLD
    assert dist.get_rank() == rank
    assert dist.get_world_size() == world_size
    assert group.rank() == rank
    assert group.size() == world_size
    assert group.group_name
    assert dist.get_process_group_ranks(group) == list(range(world_size))
    assert dist.get_backend() in ("gloo", "cpu:shm")
    assert group.name() in ("gloo", "shm")
    assert dist.get_backend_config() is not None
    assert dist.is_initialized()
