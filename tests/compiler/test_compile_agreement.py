"""Ranks that see different things compile the same frames equally often, on real ranks.

The cases are those of torch's tests of its own compiler collectives, which need a GPU. Each of them is a hang, or
ranks that compile differently often, without the agreement.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.comptime import comptime
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._functorch.aot_autograd import make_boxed_func

import paceline
from paceline import DDP, _torch, errors
from paceline.compiler import agreement
from paceline.compiler.consensus.compile_exchange import exchange_of
from tests.compiler._compare import batch, eager, fresh, messages, new_salt, same_grads, stack
from tests.on_ranks import on_ranks


def _n_compiled() -> int:
    return len(get_compilation_metrics())


# -- shapes --------------------------------------------------------------------------------------------


def _add(x, n):
    return x + torch.ones(n).sum()


def _sums(x, y):
    # Shapes are looked at before anything is computed.
    zx, zy = x.shape, y.shape  # noqa: F841
    return x.sum() + y.sum()


def _sums_behind_a_break(x, y):
    z = y  # noqa: F841
    print("a graph break, and nothing before it")
    return _sums(x, y)


def _pick(n, values):
    return torch.as_tensor(values[n]).sum()


def _of_two_types(x):
    return torch.tensor(x) if isinstance(x, int) else x.sum()


def _pairs(*shapes):
    return [(torch.ones(shape), torch.ones(shape)) for shape in shapes]


# What is compiled; the arguments of each call on ranks 0 and 1; how often each rank compiles.
CASES = {
    "numbers": (_add, [[(torch.ones(5), n) for n in calls] for calls in ([3, 3, 7], [4, 9, 9])], 1),
    "speculation": (_sums, [_pairs(4, 4), _pairs(3, 4)], 1),
    # The frame up to the break, and what follows it.
    "empty graph": (_sums_behind_a_break, [_pairs(5, 5, 6), _pairs(3, 4, 5)], 2),
    "dimensions": (_sums, [_pairs((4, 2)), _pairs((3,))], 1),
    "missing tensor": (_pick, [[(rank, [torch.ones(10), torch.ones(10)])] for rank in range(2)], 1),
    "missing number": (_pick, [[(rank, [10, 11])] for rank in range(2)], 1),
    # The second round is a deadlock with torch's own flag.
    "types": (_of_two_types, [[(torch.ones(10),), (torch.ones(12),)], [(12,), (10,)]], 1),
}


def _shapes(rank, size, names, agree):
    counts = []
    for name in names:
        function, calls, _ = CASES[name]
        fresh()
        compiled = eager(function)
        with agreement(agree):
            for arguments in calls[rank]:
                assert torch.equal(compiled(*arguments), function(*arguments))
        counts.append(_n_compiled())
    return counts


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ranks_that_see_different_shapes_compile_equally_often(ranks, backend):
    expected = [count for _, _, count in CASES.values()]
    assert ranks(_shapes, list(CASES), True, backend=backend) == [expected, expected]


@pytest.mark.full
def test_without_it_they_do_not(ranks):
    # What the test above is worth: these finish without the agreement too, but not with the same graphs.
    counts = ranks(_shapes, ["numbers", "speculation"], False)
    assert counts == [[2, 1], [2, 2]]


@on_ranks()
def test_batches_of_different_sizes(rank, size):
    """The module inside of a wrapper is compiled by itself, and both ranks compile it once."""
    model = nn.Linear(10, 2)
    ddp = DDP(model)
    model.compile(backend="aot_eager")
    fresh()
    with agreement(True):
        for n in ([5, 8, 6], [6, 6, 3])[rank]:
            ddp(torch.randn(n, 10)).sum().backward()
    assert _n_compiled() == 1


# -- guards --------------------------------------------------------------------------------------------


@on_ranks()
def test_if_one_rank_must_recompile_all_do(rank, size):
    f, seen = eager(lambda x: x.sum()), []
    fresh()
    with agreement(True) as agreed:
        for n in (10, 10, 10 + 2 * rank, 30 + rank):
            assert f(torch.ones(n)) == n
            seen.append(_n_compiled())
    assert [compilation.dynamic for compilation in agreed.compilations] == [(), ("L['x']",)[: 1 - rank]]
    # What was changed of torch is as it was.
    assert _torch.set_guard_hook(None) is None
    assert OutputGraph.run_compiler_collective.__module__ == "torch._dynamo.output_graph"
    assert "install_callbacks" not in vars(torch._dynamo.callback_handler)
    assert seen == [1, 1, 2, 2]


@on_ranks()
def test_ranks_meet_whatever_each_had_compiled_before(rank, size):
    f = eager(lambda x: x.sum())
    fresh()
    if rank == 0:
        f(torch.ones(3))
    # Rank 0 has code to guard, and rank 1 has none.
    with agreement(True):
        with agreement(False):
            f(torch.ones(3 + rank))
        f(torch.ones(5))
        torch._dynamo.reset()
        f(torch.ones(5))
    # Rank 0: alone, dynamic together with rank 1, after the reset. Rank 1: the same, since what it had compiled by
    # itself inside agreement(False) did not fit.
    assert _n_compiled() == 3


# -- skew ----------------------------------------------------------------------------------------------


def _lose_patience() -> None:
    """Have this rank wait no time at all while the other compiles slowly, and say when it has waited all the same.

    Neither has its hang watch any patience. Both begin when the other rank has said that it compiles, and end before
    it goes on, so that nothing depends on how fast ranks are.
    """
    exchange = exchange_of(dist.group.WORLD)
    read, asked, patience_s, watch = exchange.read, itertools.count(), exchange.timeout_s, exchange.channel.hang
    hasty = dataclasses.replace(watch, after_s=1e-6)

    def counted(key):
        if read("slow"):
            # A look at the other rank is four reads or five, so that this rank looks several times.
            n_asked = next(asked)
            exchange.timeout_s, exchange.channel.hang = (0.0, hasty) if n_asked < 20 else (patience_s, watch)
            if n_asked == 20:
                exchange.put("patient", "yes")
        return read(key)

    exchange.read = counted


def _compile_slowly() -> None:
    """Return when the other rank has waited for this one longer than it has time for."""
    exchange = exchange_of(dist.group.WORLD)
    exchange.put("slow", "yes")
    while not exchange.read("patient"):
        pass


@pytest.mark.parametrize("slow", ["tracing", pytest.param("compiling", marks=pytest.mark.full)])
@on_ranks()
def test_a_rank_that_compiles_longer_than_the_timeout_kills_nobody(rank, size, slow):
    fresh()

    def f(x):
        if rank == 0 and slow == "tracing":
            comptime(lambda context: _compile_slowly())
        return (2 * x).sum()

    def backend(gm, example_inputs):
        if rank == 0 and slow == "compiling":
            _compile_slowly()
        return gm.forward

    # A hang watch that makes errors of waits does not end it either.
    with mock.patch.dict(os.environ, {"PACELINE_HANG_WATCH": "enforce"}), agreement(True):
        if rank == 1:
            _lose_patience()
        torch.compile(f, backend=backend)(torch.ones(4))
        dist.all_reduce(torch.ones(4))


def _train(backend, salt):
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (x * salt).sin(), backend=backend)(x).sum().backward()
    return counters["aot_autograd"]["autograd_cache_hit"]


def _fill_cache(rank, size, salt):
    fresh()
    with _torch.backward_compiled_with_forward():
        _train("inductor", salt)


def _skew_with_cache(rank, size, salt):
    """Rank 1 finds the graph in its cache, forward and backward, and rank 0 compiles it slowly."""
    chosen = _torch.find_backend("inductor")

    def slow(gm, example_inputs):
        if rank == 0:
            _compile_slowly()
        return chosen(gm, example_inputs)

    fresh()
    counters.clear()
    with torch._functorch.config.patch(enable_autograd_cache=rank == 1), agreement(True):
        if rank == 1:
            _lose_patience()
        hits = _train(slow, salt)
    dist.all_reduce(torch.ones(1))
    return hits


@pytest.mark.full
def test_nor_does_it_if_the_others_have_it_in_their_cache(ranks):
    salt = new_salt()
    ranks(_fill_cache, salt, world_size=1)
    assert ranks(_skew_with_cache, salt) == [0, 1]


# -- graphs --------------------------------------------------------------------------------------------


@on_ranks()
def test_graphs_that_differ_are_reported_with_the_first_node(rank, size):
    # Numbers like the rank's own become dynamic; others stand in the graphs as constants.
    scale = 1.5 + rank

    @eager
    def numbered(x):
        return x * scale + x[rank]

    @eager
    def different(x):
        y = x.sin()
        return y.cos() if rank == 0 else y.tan()

    fresh()
    with messages(logging.WARNING) as told, agreement(True) as agreed:
        numbered(torch.ones(4))
        different(torch.ones(4))
    same, difference = (compilation.difference for compilation in agreed.compilations)
    assert same == ""
    assert told == ([difference] if rank == 0 else [])
    assert "different (test_compile_agreement.py" in difference
    line = inspect.unwrap(different).__code__.co_firstlineno + 3
    assert f"rank 0 has call_method cos((%1), {{}}) at test_compile_agreement.py:{line}\n" in difference
    assert "rank 1 has call_method tan" in difference
    fresh()
    with (
        pytest.raises(errors.DisagreementError, match=r"(?s)rank 0 has.*cos.*rank 1 has.*tan"),
        agreement(True, on_difference="raise"),
    ):
        different(torch.ones(4))


# The second one is an operator of ours in the graph, and not of torch's.
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
@on_ranks()
def test_collectives_that_differ_are_an_error_before_they_run(rank, size, name):
    collective = functools.partial(dist.broadcast, src=0) if name == "broadcast" else dist.all_reduce

    @eager
    def f(x):
        x = x * 2
        if rank == 0:
            collective(x)
        return x + 1

    fresh()
    with (
        pytest.raises(errors.DisagreementError, match=r"(?s)the first.*Their collectives differ"),
        agreement(True),
    ):
        f(torch.ones(4))


@on_ranks(world_size=4)
def test_each_rank_may_have_collectives_in_a_subgroup_of_its_own(rank, size):
    """As with tensor parallelism beside data parallelism: the groups differ, and nobody waits for anybody for ever."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    @eager
    def f(x, group):
        dist.all_reduce(x, group=group)
        return x + 1

    fresh()
    with agreement(True, on_difference="raise"):
        out = f(torch.full((4,), rank + 1.0), halves[rank // 2])
    assert torch.equal(out, torch.full((4,), 4.0 if rank < 2 else 8.0))


@on_ranks(world_size=4)
def test_a_rank_in_a_subgroup_that_another_rank_of_it_does_not_call_is_an_error(rank, size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([1, 2])]

    @eager
    def f(x, group):
        dist.all_reduce(x, group=group)
        return x + 1

    fresh()
    with (
        pytest.raises(errors.DisagreementError, match=r"(?s)rank 0 .*of ranks \[0, 1\].*rank 1 .*of ranks \[1, 2\]"),
        agreement(True),
    ):
        f(torch.ones(4), groups[[0, 2, 1, 1][rank]])


@on_ranks()
def test_ranks_may_send_where_others_receive(rank, size):
    @eager
    def f(x):
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        return x + 1

    fresh()
    with agreement(True):
        assert torch.equal(f(torch.full((4,), rank + 1.0)), torch.full((4,), 2.0))


# -- as an option --------------------------------------------------------------------------------------


@pytest.mark.full
@on_ranks()
def test_it_is_an_option_of_paceline_compile(rank, size):
    fresh()
    plain, ddp = DDP(stack()), DDP(stack())
    compiled = paceline.compile(ddp, inner="aot_eager", agreement=True)
    for step, rows in enumerate([(4, 7), (4, 4), (9, 3)]):
        inputs = batch(rank, step, rows[rank], 8)
        for model in (plain, compiled):
            model.zero_grad()
            model(inputs).square().sum().backward()
        same_grads(plain, ddp)
        assert _n_compiled() == 1
    function = paceline.compile(lambda x: x + rank, inner="eager", agreement=True)
    assert torch.equal(function(torch.ones(2 + rank)), torch.ones(2 + rank) + rank)


@on_ranks(world_size=1)
def test_without_other_ranks_nothing_is_agreed_on(rank, size):
    with agreement(True) as agreed:
        assert agreed is None
        assert eager(lambda x: x + 1)(torch.ones(1)) == 2
    with pytest.raises(errors.BadArgumentError, match="on_difference"):
        agreement(True, on_difference="perhaps")


@on_ranks(world_size=4)
def test_a_group_agrees_by_itself(rank, size):
    f = eager(lambda x: x.sum())
    fresh()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with agreement(True, group=halves[rank // 2]):
        # Rank 3 alone sees another size: ranks 0 and 1 do not hear of it.
        for n in (5, 5 + (rank == 3)):
            f(torch.ones(n))
    assert _n_compiled() == 1 + rank // 2
    dist.barrier()


@on_ranks()
def test_backward_is_compiled_with_forward_and_gradients_are_those_of_eager_mode(rank, size):
    compiled_parts = []

    def note(part):
        return lambda gm, example_inputs: compiled_parts.append(part) or make_boxed_func(gm.forward)

    fresh()
    eager, ddp = DDP(stack()), DDP(stack())
    compiled = torch.compile(ddp, backend=aot_autograd(fw_compiler=note("forward"), bw_compiler=note("backward")))
    with agreement(True):
        out = compiled(batch(rank))
        # The backward is not compiled when it first runs, because others might then wait for it in a collective.
        assert compiled_parts == ["forward", "backward"]
    out.square().sum().backward()
    eager(batch(rank)).square().sum().backward()
    same_grads(eager, ddp)
