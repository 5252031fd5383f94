"""The other ways to call a collective: coalesced, objects, functional, on the group itself."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ..conformance import case
from ..inputs import every, reduced, same, values

COUNT = 1023
# torch's own marks on calls that it wants to replace; they work all the same.
DEPRECATED = ((".*will be deprecated.*", FutureWarning), (".*is deprecated.*", FutureWarning))


def _mine(rank: int, seed: int = 0) -> torch.Tensor:
    return values(COUNT, torch.float32, rank=rank, seed=seed)


def _everybody(world_size: int, seed: int = 0) -> list[torch.Tensor]:
    return every(COUNT, torch.float32, world_size, seed=seed)


@case(2, 4, allow_warnings=DEPRECATED)
def coalesced(rank, world_size):
    tensors = [_mine(rank), _mine(rank, 1)[:100], torch.zeros(0)]
    dist.all_reduce_coalesced(tensors)
    same(tensors[0], reduced("SUM", _everybody(world_size)), "all_reduce_coalesced")
    same(tensors[1], reduced("SUM", _everybody(world_size, 1))[:100], "all_reduce_coalesced")
    tensors = [_mine(rank), _mine(rank, 1)]
    future = dist.all_reduce_coalesced(tensors, async_op=True)
    future.wait()
    same(tensors[1], reduced("SUM", _everybody(world_size, 1)), "asynchronous all_reduce_coalesced")
    outs = [[torch.zeros(COUNT), torch.zeros(7)] for _ in range(world_size)]
    dist.all_gather_coalesced(outs, [_mine(rank), _mine(rank, 1)[:7]])
    for source in range(world_size):
        same(outs[source][0], _mine(source), "all_gather_coalesced", source)
        same(outs[source][1], _mine(source, 1)[:7], "all_gather_coalesced", source)


@case(allow_warnings=DEPRECATED)
def older_names(rank, world_size):
    whole = torch.zeros(COUNT * world_size)
    dist.all_gather_into_tensor(whole, _mine(rank))
    same(whole, torch.cat(_everybody(world_size)), "all_gather_into_tensor")
    out = torch.zeros(COUNT)
    dist.reduce_scatter_tensor(out, torch.cat([_mine(rank)] * world_size))
    same(out, reduced("SUM", _everybody(world_size)), "reduce_scatter_tensor")


@case(2, 4)
def coalescing_manager(rank, world_size):
    tensors = [_mine(rank, seed) for seed in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for seed, tensor in enumerate(tensors):
        same(tensor, reduced("SUM", _everybody(world_size, seed)), "all_reduce", seed)
    wholes = [torch.zeros(COUNT * world_size) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for seed, whole in enumerate(wholes):
            dist.all_gather_single(whole, _mine(rank, seed))
    manager.wait()
    for seed, whole in enumerate(wholes):
        same(whole, torch.cat(_everybody(world_size, seed)), "all_gather_single", seed)
    outs = [torch.zeros(COUNT) for _ in range(2)]
    with dist._coalescing_manager():
        for seed, out in enumerate(outs):
            dist.reduce_scatter_single(out, torch.cat([_mine(rank, seed)] * world_size))
    for seed, out in enumerate(outs):
        same(out, reduced("SUM", _everybody(world_size, seed)), "reduce_scatter_single", seed)


@case(2, 4)
def on_the_group(rank, world_size):
    """The group's own methods, as hooks and C++ code call them."""
    group = dist.group.WORLD
    mine = _mine(rank)
    group.allreduce([mine]).wait()
    same(mine, reduced("SUM", _everybody(world_size)), "allreduce")
    mine = _mine(rank)
    group.allreduce(mine, dist.ReduceOp.MAX).wait()
    same(mine, reduced("MAX", _everybody(world_size)), "allreduce with an op")
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    mine = _mine(rank)
    group.allreduce([mine], options).wait()
    same(mine, reduced("MIN", _everybody(world_size)), "allreduce with options")
    mine = _mine(rank)
    group.broadcast(mine, root=1).wait()
    same(mine, _mine(1), "broadcast")
    outs = [[torch.zeros(COUNT) for _ in range(world_size)]]
    group.allgather(outs, [_mine(rank)]).wait()
    same(torch.cat(outs[0]), torch.cat(_everybody(world_size)), "allgather")
    whole = torch.zeros(COUNT * world_size)
    group._allgather_base(whole, _mine(rank)).wait()
    same(whole, torch.cat(_everybody(world_size)), "_allgather_base")
    out = torch.zeros(COUNT)
    group._reduce_scatter_base(out, torch.cat([_mine(rank)] * world_size)).wait()
    same(out, reduced("SUM", _everybody(world_size)), "_reduce_scatter_base")
    outs = [torch.zeros(COUNT * world_size) for _ in range(2)]
    group.allgather_into_tensor_coalesced(outs, [_mine(rank), _mine(rank, 1)]).wait()
    same(outs[1], torch.cat(_everybody(world_size, 1)), "allgather_into_tensor_coalesced")
    outs = [torch.zeros(COUNT) for _ in range(2)]
    wholes = [torch.cat([_mine(rank, seed)] * world_size) for seed in range(2)]
    group.reduce_scatter_tensor_coalesced(outs, wholes).wait()
    same(outs[1], reduced("SUM", _everybody(world_size, 1)), "reduce_scatter_tensor_coalesced")
    group.barrier().wait()


@case(2, 4)
def objects(rank, world_size):
    outs = [None] * world_size
    dist.all_gather_object(outs, {"rank": rank, "text": "x" * (1 + 3000 * rank)})
    assert [out["rank"] for out in outs] == list(range(world_size))
    assert len(outs[-1]["text"]) == 1 + 3000 * (world_size - 1)
    given = [("a", 1), [2.0], None] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(given, src=1)
    assert given == [("a", 1), [2.0], None]
    got = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(world_size)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    outs = [None] * world_size if rank == 0 else None
    dist.gather_object(rank * 10, outs, dst=0)
    if outs is not None:
        assert outs == [10 * r for r in range(world_size)]


@case(2, 4, allow_warnings=DEPRECATED)
def functional_forms(rank, world_size):
    group = dist.group.WORLD
    mine = _mine(rank)
    got = functional.wait_tensor(functional.all_reduce(mine, "sum", group))
    same(got, reduced("SUM", _everybody(world_size)), "all_reduce")
    same(mine, _mine(rank), "the input of a functional all_reduce")
    same(functional.all_reduce(mine, "avg", group) + 0, reduced("AVG", _everybody(world_size)), "all_reduce, avg")
    same(functional.all_reduce(mine, "max", group) + 0, reduced("MAX", _everybody(world_size)), "all_reduce, max")
    whole = functional.all_gather_tensor(mine, 0, group) + 0
    same(whole, torch.cat(_everybody(world_size)), "all_gather_tensor")
    rows = values(6, torch.float32, rank=rank).view(2, 3)
    side = functional.all_gather_tensor(rows, 1, group) + 0
    same(side, torch.cat([t.view(2, 3) for t in every(6, torch.float32, world_size)], dim=1), "all_gather_tensor, 1")
    part = functional.reduce_scatter_tensor(torch.cat([mine] * world_size), "sum", 0, group) + 0
    same(part, reduced("SUM", _everybody(world_size)), "reduce_scatter_tensor")
    moved = functional.all_to_all_single(torch.cat([mine] * world_size), None, None, group) + 0
    same(moved, torch.cat(_everybody(world_size)), "all_to_all_single")
    same(functional.broadcast(mine, 1, group) + 0, _mine(1), "broadcast")
    several = functional.all_reduce_coalesced([_mine(rank, seed) for seed in range(3)], "sum", group)
    for seed, got in enumerate(several):
        same(got + 0, reduced("SUM", _everybody(world_size, seed)), "all_reduce_coalesced", seed)
    several = functional.all_gather_into_tensor_coalesced([_mine(rank, seed) for seed in range(2)], group)
    for seed, got in enumerate(several):
        same(got + 0, torch.cat(_everybody(world_size, seed)), "all_gather_into_tensor_coalesced", seed)
    wholes = [torch.cat([_mine(rank, seed)] * world_size) for seed in range(2)]
    several = functional.reduce_scatter_tensor_coalesced(wholes, "sum", [0, 0], group)
    for seed, got in enumerate(several):
        same(got + 0, reduced("SUM", _everybody(world_size, seed)), "reduce_scatter_tensor_coalesced", seed)


@case(allow_warnings=DEPRECATED)
def functional_with_gradients(rank, world_size):
    """Collectives that autograd differentiates (``torch.distributed.nn``)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.nn.functional as differentiable

    mine = values(7, torch.float64, rank=rank).requires_grad_()
    total = differentiable.all_reduce(mine, group=dist.group.WORLD)
    (total * (rank + 1)).sum().backward()
    same(mine.grad, torch.full((7,), 3.0, dtype=torch.float64), "gradient of all_reduce")
    mine = values(7, torch.float64, rank=rank).requires_grad_()
    torch.stack(differentiable.all_gather(mine, group=dist.group.WORLD)).sum().backward()
    same(mine.grad, torch.full((7,), 2.0, dtype=torch.float64), "gradient of all_gather")
