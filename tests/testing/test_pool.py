"""The pool itself: results, errors, time-outs, dead ranks, and that nothing leaks between runs."""

from __future__ import annotations

import importlib.util
import os
import warnings

import pytest
import torch
import torch.distributed as dist

from paceline.testing import InjectedFaultError, RankError, RankPool, fail_at
from paceline.testing.pool import PRELOADED


def _sum_of_ranks(rank, world_size, scale):
    t = torch.tensor([float(rank * scale)])
    dist.all_reduce(t)
    return rank, world_size, t.item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_runs_in_a_group_and_returns_by_rank(ranks, world_size):
    total = float(sum(range(world_size)) * 3)
    assert ranks(_sum_of_ranks, 3, world_size=world_size) == [(rank, world_size, total) for rank in range(world_size)]


def _pid(rank, world_size):
    return os.getpid()


def _fail_on(rank, world_size, failing):
    if rank in failing:
        raise KeyError(f"boom {rank}")
    return rank


def test_error_names_the_rank_and_carries_every_traceback(ranks):
    with pytest.raises(RankError, match="KeyError: 'boom 0'") as caught:
        ranks(_fail_on, (0, 1))
    error = caught.value
    assert sorted(error.failures) == [0, 1]
    for rank in (0, 1):
        assert f"---- rank {rank} ----" in str(error)
        assert "_fail_on" in error.failures[rank].traceback
        assert error.failures[rank].error_type == "KeyError"


def test_results_of_healthy_ranks_are_kept(ranks):
    with pytest.raises(RankError) as caught:
        ranks(_fail_on, (1,))
    assert caught.value.rank == 1
    assert caught.value.results == {0: 0}


def test_ranks_are_reused_until_one_fails():
    with RankPool() as pool:
        pids = pool.run(_pid)
        assert pool.run(_pid) == pids
        with pytest.raises(RankError):
            pool.run(_fail_on, (1,))
        assert not set(pool.run(_pid)) & set(pids)


def _wait_for_nobody(rank, world_size):
    if rank == 0:
        dist.all_reduce(torch.zeros(1))


def _stuck(rank, world_size):
    dist.recv(torch.zeros(1), src=1 - rank)


@pytest.mark.full
def test_time_out_shows_where_ranks_are_stuck_and_the_pool_goes_on():
    with RankPool() as pool:
        pool.run(_pid)  # The time-out is for ranks that are up: on a busy machine starting them takes long.
        with pytest.raises(RankError, match="stuck") as caught:
            pool.run(_stuck, timeout=10)  # They have to meet first, which takes long there, too.
        assert all("_stuck" in failure.traceback for failure in caught.value.failures.values())
        assert pool.run(_sum_of_ranks, 1) == [(0, 2, 1.0), (1, 2, 1.0)]


@pytest.mark.full
def test_a_rank_that_waits_for_one_that_ended_is_killed():
    with RankPool() as pool:
        pool.run(_pid)
        with pytest.raises(RankError) as caught:
            pool.run(_wait_for_nobody, timeout=10)
        assert caught.value.rank == 0
        assert caught.value.results == {1: None}


def _exit(rank, world_size):
    print("last words")
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def test_dead_rank_is_reported_with_its_exit_code():
    with RankPool() as pool, pytest.raises(RankError, match=r"rank 1 failed.*exit code 3") as caught:
        pool.run(_exit)
    assert "last words" in caught.value.failures[1].traceback


def _make_a_mess(rank, world_size):
    dist.barrier()  # A rank that left its group at once would break the connections of one that is still coming.
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    return torch.rand(1, dtype=torch.float32).item()


def _state(rank, world_size):
    assert dist.get_world_size() == world_size
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert "LEFT_BEHIND" not in os.environ
    return torch.rand(1).item()


def test_nothing_leaks_into_the_next_run_and_seeds_repeat(ranks):
    first = ranks(_make_a_mess)
    assert ranks(_state) == first
    assert first[0] == first[1]


def _times(x, number):
    return x * number


def _compilations(rank, world_size, number):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compile(_times, backend=backend, dynamic=False)(torch.ones(1), number)
    return len(graphs)


def test_no_run_is_the_one_for_which_the_compiler_gives_up(ranks):
    # Dynamo compiles a function eight times at the most.
    assert [ranks(_compilations, number, backend=None, world_size=1) for number in range(10)] == [[1]] * 10


def _warn(rank, world_size):
    warnings.warn("careless", UserWarning, stacklevel=1)
    return "went on"


def test_warnings_are_errors_in_ranks_unless_allowed(ranks):
    with pytest.raises(RankError, match="UserWarning: careless"):
        ranks(_warn)
    assert ranks(_warn, allow_warnings=(("care", UserWarning),)) == ["went on", "went on"]


def _no_group(rank, world_size):
    return dist.is_initialized()


def test_a_run_without_a_group(ranks):
    assert ranks(_no_group, backend=None) == [False, False]


def test_world_size_out_of_range_is_refused(rank_pool):
    with pytest.raises(ValueError, match="1 to 4"):
        rank_pool.run(_pid, world_size=5)


def _faults(rank, world_size, phase):
    fault = fail_at(rank=1, step=1, phase=phase)
    layer = fault.layer()
    x = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.0)
    optimizer.register_step_pre_hook(fault.optimizer_hook())
    seen = []
    for step in range(3):
        try:
            layer(x).sum().backward()
            optimizer.step()
        except InjectedFaultError as error:
            seen.append((step, str(error)))
    return seen


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_fault_strikes_its_rank_step_and_phase_only(ranks, phase):
    assert ranks(_faults, phase) == [[], [(1, f"injected: rank 1, step 1, {phase}")]]


def test_what_the_server_of_ranks_imports_is_there():
    # If the module were missing, the server would not say so, and each rank would import everything again.
    assert importlib.util.find_spec(PRELOADED) is not None
