"""Compiled code recompiles when the answer changes, and only then."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.on_ranks import on_ranks
from tests.tracing.row import Place, join_fake_group
from tests.tracing.runner import ALLOWED_WARNINGS, LIMIT_S, PATIENCE_S


def _counted(function):
    """``function`` compiled, and a counter of its compilations."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    return torch.compile(function, fullgraph=True, backend=counter), counter


def _check(function, rounds, *, compilations):
    """Call with each round's arguments, twice over; every answer is eager's, and it compiled that often."""
    compiled, counter = _counted(function)
    for arguments in [*rounds, *rounds]:
        x = torch.arange(4.0) + 1
        want, got = function(x.clone(), *arguments), compiled(x.clone(), *arguments)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert counter.frame_count == compilations, f"compiled {counter.frame_count} times, not {compilations}"
    torch._dynamo.reset()


def _sum_over(x, group):
    dist.all_reduce(x, group=group)
    return x * group.size() + group.rank()


def _sum_over_async(x, group):
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    return x * 2


class Holder(nn.Module):
    def __init__(self, thing):
        super().__init__()
        self.thing = thing

    def forward(self, x):
        return x * self.thing.size()


def _reduced(x, op):
    dist.all_reduce(x, op=op)
    return x + 1


def _a_group_is_replaced(at):
    module = Holder(at.group)
    compiled, counter = _counted(module)
    x = torch.ones(2)
    assert compiled(x).tolist() == [at.size, at.size]
    module.thing = at.solo
    assert compiled(x).tolist() == [1, 1]
    assert counter.frame_count == 2


def _shapes(at):
    compiled, counter = _counted(_sum_over)
    for length in (4, 6, 8, 10):
        want, got = torch.arange(float(length)) + at.rank, torch.arange(float(length)) + at.rank
        assert torch.equal(compiled(got, at.group), _sum_over(want, at.group))
        assert torch.equal(got, want)
    # Once for the first length, once for any.
    assert counter.frame_count == 2


def _a_group_is_made(at):
    compiled, counter = _counted(lambda x: x + dist.get_pg_count())
    before = dist.get_pg_count()
    assert compiled(torch.zeros(1)).item() == before
    dist.new_group([0])
    assert compiled(torch.zeros(1)).item() == dist.get_pg_count()
    assert counter.frame_count == (1 if dist.get_pg_count() == before else 2)


def _rank_of(x, group):
    return x + dist.get_rank(group)


def _size_of(x, thing):
    return x * thing.size()


def _is_the_world(x, group):
    return x + (group is dist.group.WORLD)


def _world_size_of(x, group):
    return x + dist.get_world_size(group)


def _call(x, module):
    return module(x)


GROUPS = {
    "collective over two groups": lambda at: _check(_sum_over, [(at.group,), (at.solo,)], compilations=2),
    "async collective over two groups": lambda at: _check(_sum_over_async, [(at.group,), (at.solo,)], compilations=2),
    "size of two groups": lambda at: _check(_size_of, [(at.group,), (at.solo,)], compilations=2),
    "rank in two groups": lambda at: _check(_rank_of, [(at.group,), (at.reverse,)], compilations=2),
    "the same group again": lambda at: _check(_size_of, [(at.group,), (dist.group.WORLD,)], compilations=1),
    "identity": lambda at: _check(_is_the_world, [(at.group,), (at.other,)], compilations=2),
    "member or not": lambda at: _check(_rank_of, [(at.first,), (at.solo,)], compilations=1 + (at.rank > 0)),
    "group or None": lambda at: _check(_world_size_of, [(None,), (at.solo,)], compilations=2),
    "modules that hold groups": lambda at: _check(_call, [(Holder(at.group),), (Holder(at.solo),)], compilations=2),
    "a module's group is replaced": _a_group_is_replaced,
    "op": lambda at: _check(_reduced, [(dist.ReduceOp.SUM,), (dist.ReduceOp.MAX,)], compilations=2),
    "shapes": _shapes,
    "a group is made": _a_group_is_made,
}


def _all_groups(rank, size):
    at = Place(rank, size)
    return {name: _failure(case, at) for name, case in GROUPS.items()}


def _failure(function, *args):
    """What a case ended with, or None. Cases share ranks, groups and a run: those cost more than the cases."""
    try:
        function(*args)
    except Exception:
        return traceback.format_exc()
    finally:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def of_groups(rank_pool):
    return rank_pool.run(_all_groups, allow_warnings=ALLOWED_WARNINGS, group_timeout_s=PATIENCE_S, timeout=LIMIT_S)


@pytest.mark.parametrize("case", GROUPS)
def test_groups(of_groups, case):
    assert [answers[case] for answers in of_groups] == [None] * len(of_groups)


def _local_of_current(x):
    return x * DTensor.from_local(x, placements=[Shard(0)]).shape[0]


def _mesh_around_the_call(at):
    compiled, counter = _counted(_local_of_current)
    for mesh in (at.mesh, at.grid["dp"], at.mesh):
        with mesh:
            assert torch.equal(compiled(torch.ones(2)), _local_of_current(torch.ones(2)))
    assert counter.frame_count == 2


def _other_shape(at):
    other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    _check(_rank_in_tp, [(at.grid,), (other,)], compilations=2)


def _rank_in_tp(x, mesh):
    return x + mesh.get_local_rank("tp")


def _size_of_slice(x, mesh, name):
    return x * mesh[name].size()


def _kind_of(x, placement):
    return x + placement.is_shard(0) + 2 * placement.is_partial("max")


OBJECTS = {
    "equal meshes": lambda at: _check(_rank_in_tp, [(at.grid,), (at.grid_again,)], compilations=1),
    "meshes of other shapes": _other_shape,
    "slices": lambda at: _check(_size_of, [(at.grid["dp"],), (at.grid["tp"],)], compilations=2),
    "a slice made anew": lambda at: _check(_size_of, [(at.grid["dp"],), (at.grid["dp"],)], compilations=1),
    "name of a dimension": lambda at: _check(_size_of_slice, [(at.grid, "dp"), (at.grid, "tp")], compilations=2),
    "equal placements": lambda at: _check(_kind_of, [(Shard(0),), (Shard(0),)], compilations=1),
    "other placements": lambda at: _check(
        _kind_of, [(Shard(0),), (Shard(1),), (Replicate(),), (Partial("max"),)], compilations=4
    ),
    "the mesh of a with around the call": _mesh_around_the_call,
    "modules that hold meshes": lambda at: _check(
        _call, [(Holder(at.grid["dp"]),), (Holder(at.grid["tp"]),)], compilations=2
    ),
}


def _all_objects(rank, size):
    join_fake_group(5, 8)
    at = Place(5, 8)
    return {name: _failure(case, at) for name, case in OBJECTS.items()}


@pytest.fixture(scope="module")
def of_objects(rank_pool):
    limits = {"allow_warnings": ALLOWED_WARNINGS, "timeout": LIMIT_S}
    return rank_pool.run(_all_objects, world_size=1, backend=None, **limits)


@pytest.mark.parametrize("case", OBJECTS)
def test_meshes_and_placements(of_objects, case):
    assert of_objects[0][case] is None


def _who(x):
    if not dist.is_initialized():
        return x - 1
    return x + dist.get_rank() + 100 * dist.get_world_size() + 1000 * dist.group.WORLD.size()


@on_ranks(world_size=1, backend=None, allow_warnings=ALLOWED_WARNINGS)
def test_another_default_group(rank, size):
    """A graph outlives the default group it was compiled for."""
    compiled, counter = _counted(_who)
    assert compiled(torch.zeros(1)).item() == -1
    for number, (world_size, rank) in enumerate([(4, 1), (8, 3), (8, 5)], 2):
        join_fake_group(rank, world_size)
        for _ in range(2):
            assert compiled(torch.zeros(1)).item() == rank + 1100 * world_size
        assert counter.frame_count == number
        dist.destroy_process_group()
    assert compiled(torch.zeros(1)).item() == -1


class Layer(nn.Module):
    def forward(self, x):
        return x * 2


def _through(x, module):
    return module(x) * 3


def _gradient(function, module):
    x = torch.ones(2, requires_grad=True)
    function(x, module).sum().backward()
    return x.grad.tolist()


@on_ranks(world_size=1, backend=None, allow_warnings=ALLOWED_WARNINGS)
def test_hooks(rank, size):
    """Modules of one class with other hooks, and hooks that come and go."""
    plain, tenfold, observed, seen = Layer(), Layer(), Layer(), []
    tenfold.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 10,))
    observed.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(len(seen)))
    compiled, counter = _counted(_through)
    for _ in range(2):
        for module in (plain, tenfold, observed):
            assert _gradient(compiled, module) == _gradient(_through, module)
    assert len(seen) == 4
    assert counter.frame_count == 3

    handle = plain.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 5,))
    assert _gradient(compiled, plain) == [30.0, 30.0]
    handle.remove()
    assert _gradient(compiled, plain) == [6.0, 6.0]
