"""``cpu:shm`` as a process group: its life, its works, and that c10d's callers end in it."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import paceline
from paceline.errors import BadCollectiveError, DisagreementError, PeerFailedError, RankLostError, StateError
from paceline.transport.c10d.process_group import ShmProcessGroup
from paceline.transport.shm import arena
from tests.transport.conformance import SHM
from tests.transport.requirements import needs_shm


@pytest.fixture(autouse=True)
def _kernel() -> None:
    needs_shm()


@pytest.fixture
def shm(ranks):
    def run(body, *args, **options):
        return ranks(body, *args, backend=SHM, **options)

    return run


# -- its life -----------------------------------------------------------------------------------------------------


def _what_is_open():
    with open("/proc/self/maps") as maps:
        mappings = sum("/dev/shm/" in line and "sem." not in line for line in maps)
    return set(os.listdir("/proc/self/fd")), mappings, len(os.listdir("/proc/self/task"))


def _use_and_destroy(rank, world_size, how):
    gc.collect()
    before = _what_is_open()
    group = dist.new_group(backend=SHM)
    assert type(group) is ShmProcessGroup
    assert _what_is_open() != before
    tensor = torch.ones(1000).view(20, 50).t()
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.get_future().wait()
    if rank == 0:
        dist.send(torch.ones(3), 1, group=group)
    elif rank == 1:
        dist.recv(torch.ones(3), 0, group=group)
    memory = paceline.transport.allocate(1 << 16, group=group)
    dist.all_reduce(memory.view(torch.float32), group=group)
    del work, memory
    dist.barrier(group=group)
    end = weakref.ref(group)
    if how == "destroyed":
        dist.destroy_process_group(group)
        with pytest.raises(StateError, match="closed the group"):
            group.allreduce([torch.ones(1)])
        group.shutdown()
    else:
        # What destroy_process_group forgets, and nothing else of it.
        world = dist.distributed_c10d._world
        for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
            known.pop(group, None)
        for groups in world.tags_to_pg.values():
            with contextlib.suppress(ValueError):
                groups.remove(group)
    del group
    gc.collect()
    assert end() is None
    assert _more_than(before) == []


def _more_than(before):
    """What is open now and was not; after a while, since a thread that has ended is listed until the kernel is done."""
    deadline = time.monotonic() + 30
    while True:
        descriptors, mappings, threads = _what_is_open()
        counts = {"mappings": mappings - before[1], "threads": threads - before[2]}
        more = [*(descriptors - before[0]), *(kind for kind, count in counts.items() if count > 0)]
        if not more or time.monotonic() > deadline:
            return more
        os.sched_yield()


@pytest.mark.parametrize("how", ["destroyed", "dropped"])
def test_a_group_leaves_no_descriptor_no_mapping_no_thread(ranks, how):
    ranks(_use_and_destroy, how)


def _identity(rank, world_size):
    group = dist.group.WORLD
    assert (group.rank(), group.size(), group.name()) == (rank, world_size, "shm")
    assert dist.get_backend() == SHM
    assert group.group_name == dist.distributed_c10d._world.pg_names[group]
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=300)
    with pytest.raises(StateError, match="cuda"):
        group._get_backend(torch.device("cuda"))


def test_what_c10d_asks_about_a_group(shm):
    shm(_identity)


def _without_memory(rank, world_size):
    """What FSDP does to parameters that it has no use for."""
    gone = torch.ones(4)
    gone.untyped_storage().resize_(0)
    for async_op in (False, True):
        with pytest.raises(BadCollectiveError, match="4 elements and no memory"):
            dist.all_reduce(gone, async_op=async_op)
    # Nothing was sent, and an empty tensor is no mistake.
    dist.all_reduce(torch.ones(0))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world_size] * 4


def test_a_tensor_without_memory_is_refused(shm):
    shm(_without_memory)


# -- works and futures --------------------------------------------------------------------------------------------


def _works(rank, world_size):
    tensors = [torch.full((1 << 12,), float(i)) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert works[-1].wait()
    assert all(work.is_success() for work in works)
    assert works[0].result()[0] is tensors[0]
    with pytest.raises(StateError, match="source rank"):
        works[0].source_rank()


def test_works_end_in_order(shm):
    shm(_works)


def _futures(rank, world_size):
    # wait() and the future tell the same at the same moment.
    for _ in range(50):
        work = dist.all_reduce(torch.ones(3, 4), async_op=True)
        future = work.get_future()
        work.wait()
        assert future.done()
        assert work.get_future() is future
    assert any(thread.name == "paceline-herald" for thread in threading.enumerate())


def test_futures(shm):
    shm(_futures)


def _no_herald(rank, world_size):
    for _ in range(5):
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    assert not any(thread.name == "paceline-herald" for thread in threading.enumerate())


def test_nobody_pays_for_futures_that_nobody_asks_for(shm):
    shm(_no_herald)


def _wait_again(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RankLostError, match="timed out"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        assert work.exception() is None
        store.set("go", "1")
        assert work.wait()
    else:
        store.get("go")
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


def test_a_wait_that_ran_out_of_time_can_be_repeated(shm):
    shm(_wait_again)


def _too_late(rank, world_size):
    dist.barrier()
    if rank == 1:
        dist.distributed_c10d._get_default_store().get("raised")
        return None
    group = dist.group.WORLD
    group.set_timeout(timedelta(milliseconds=200))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    future = work.get_future()
    with pytest.raises(RankLostError, match="rank 1") as raised:
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1"):
        future.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is raised.value
    dist.distributed_c10d._get_default_store().set("raised", "1")
    return raised.value.rank


def test_the_time_out_of_the_group_names_the_rank_that_did_not_come(shm):
    assert shm(_too_late) == [1, None]


def _strided(rank, world_size):
    base = torch.zeros(6, 8)
    view = base.t()[::2]
    view.fill_(rank + 1)
    # Nobody waits through the work: the result gets to its place all the same.
    dist.all_reduce(view, async_op=True).get_future().wait()
    assert base.t()[::2].unique().tolist() == [sum(range(1, world_size + 1))]
    assert base.t()[1::2].unique().tolist() == [0]
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    dist.all_reduce(negated)
    assert negated.tolist() == [-2.0 * world_size]


def test_tensors_that_are_not_plain_memory(shm):
    shm(_strided)


# -- who calls it -------------------------------------------------------------------------------------------------


def _unfinished(rank, world_size):
    """The result of one functional collective, not waited for, as the input of the next."""
    unfinished = functional.all_reduce(torch.arange(4.0) + rank, "sum", dist.group.WORLD)
    dist.all_reduce(unfinished)
    assert unfinished[0].item() == world_size * sum(range(world_size))


def test_a_result_that_nobody_waited_for(shm):
    shm(_unfinished)


def _gone_on_one_rank(rank, world_size):
    memory = paceline.transport.allocate(1 << 20)
    kept = None if rank == 0 else memory.view(torch.float32)
    del memory
    gc.collect()
    later = torch.ones(1 << 18) if kept is None else kept.fill_(1.0)
    dist.all_reduce(later)
    assert later.unique().tolist() == [world_size]


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_that_one_rank_has_dropped_is_of_use_to_the_others(shm, world_size):
    shm(_gone_on_one_rank, world_size=world_size)


def _no_arena(rank, world_size):
    assert paceline.transport.allocate(4096) is None
    assert paceline.transport.describe(dist.group.WORLD) == ""


def test_groups_of_other_backends_have_no_shared_memory(ranks):
    ranks(_no_arena)


def _no_room_on_one_rank(rank, world_size):
    said = []
    say = mock.patch.object(arena._logger, "warning", lambda *message: said.append(message))
    with mock.patch.object(arena, "_has_said", False), say:
        for _ in range(2):
            # Ranks ask for different amounts only to have one of them fail; nobody gets any.
            assert paceline.transport.allocate(1 << 55 if rank == 1 else 4096) is None
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    return len(said)


def test_no_room_for_an_arena_on_one_rank_is_none_on_all_and_said_once(shm):
    assert shm(_no_room_on_one_rank) == [1, 0]


def _raises_while_buckets_become_shared(rank, world_size):
    # Without a rebuild of the plan the buckets are shared in the first step, before anything else is waited for.
    ddp = paceline.DDP(torch.nn.Linear(3, 3), find_unused_parameters=True)
    if rank == 1:
        with pytest.raises(TypeError):
            ddp("no tensor")
        return None
    with pytest.raises(PeerFailedError, match="sharing of memory") as caught:
        ddp(torch.ones(2, 3)).sum().backward()
    return caught.value.rank


def test_a_rank_that_waits_to_share_buckets_hears_of_a_failure(shm):
    assert shm(_raises_while_buckets_become_shared, group_timeout_s=120)[0] == 1


def _first_of_two_fails(rank, world_size):
    if rank == 1:
        with pytest.raises(DisagreementError):
            dist.all_reduce(torch.ones(11))
        dist.all_reduce(torch.ones(20))
    else:
        # Two jobs, one work: the first fails, since ranks differ, and the second ends well, later.
        both = [torch.ones(10), torch.ones(20)]
        work = dist.group.WORLD.allreduce_coalesced(both, dist.AllreduceCoalescedOptions())
        with pytest.raises(RuntimeError, match="all_reduce"):
            work.get_future().wait()
    # The thread that looks after works is still there for the next one.
    tensor = torch.ones(5)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    return tensor.tolist()


def test_a_work_of_several_jobs_whose_first_fails_is_announced(shm):
    assert shm(_first_of_two_fails, group_timeout_s=30) == [[2.0] * 5] * 2
