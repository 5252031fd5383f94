"""``cpu:shm`` as a process group: its life, its works, and that c10d's callers end in it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
from paceline.errors import BadCollectiveError, DisagreementError, PeerFailedError, RankLostError, StateError
from paceline.transport import Options, arena
from paceline.transport.process_group import ShmProcessGroup
from tests.transport.requirements import needs_shm

SHM = "cpu:shm"


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
    for _ in range(100):
        descriptors, mappings, threads = _what_is_open()
        counts = {"mappings": mappings - before[1], "threads": threads - before[2]}
        more = [*(descriptors - before[0]), *(kind for kind, count in counts.items() if count > 0)]
        if not more:
            break
        time.sleep(0.05)
    return more


@pytest.mark.parametrize("how", ["destroyed", "dropped"])
def test_a_group_leaves_no_descriptor_no_mapping_no_thread(ranks, how):
    ranks(_use_and_destroy, how)


def _many(rank, world_size):
    groups = [dist.new_group(backend=SHM) for _ in range(8)]
    halves = [dist.new_group([r], backend=SHM) for r in range(world_size)]
    for turn, group in enumerate(groups):
        tensor = torch.full((5,), float(turn))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [turn * world_size] * 5
    alone = torch.ones(2)
    dist.all_reduce(alone, group=halves[rank])
    assert alone.tolist() == [1.0, 1.0]


def test_several_groups_at_once(shm):
    shm(_many, world_size=3)


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


def _fork(rank, world_size):
    tensor = torch.ones(4)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dist.all_reduce(torch.ones(4))
        except StateError as error:
            status = 0 if "fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world_size] * 4


def test_a_fork_is_not_a_rank_and_does_no_harm(shm):
    shm(_fork)


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
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    assert [tensor[0].item() for tensor in tensors] == [i * world_size for i in range(20)]
    assert works[0].result()[0] is tensors[0]
    with pytest.raises(StateError, match="source rank"):
        works[0].source_rank()


def test_works_end_in_order(shm):
    shm(_works)


def _futures(rank, world_size):
    tensor = torch.ones(3, 4)
    seen = []
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda done: seen.append(done.value()[0].sum().item()) or done.value()[0] / 2)
    assert future.wait().tolist() == [[world_size / 2] * 4] * 3
    assert seen == [12 * world_size]
    # wait() and the future tell the same at the same moment.
    for _ in range(50):
        work = dist.all_reduce(tensor, async_op=True)
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


def test_the_time_out_of_the_group_names_who_did_not_come(shm):
    assert shm(_too_late) == [1, None]


def _strided(rank, world_size):
    base = torch.zeros(6, 8)
    view = base.t()[::2]
    view.fill_(rank + 1)
    work = dist.all_reduce(view, async_op=True)
    # Nobody waits through the work: the result gets to its place all the same.
    work.get_future().wait()
    total = sum(range(1, world_size + 1))
    assert base.t()[::2].unique().tolist() == [total]
    assert base.t()[1::2].unique().tolist() == [0]
    outputs = [torch.zeros(4, 3).t() for _ in range(world_size)]
    dist.all_gather(outputs, torch.full((4, 3), float(rank)).t())
    assert [output.unique().tolist() for output in outputs] == [[float(r)] for r in range(world_size)]
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    dist.all_reduce(negated)
    assert negated.tolist() == [-2.0 * world_size]


def test_tensors_that_are_not_plain_memory(shm):
    shm(_strided)


def _profiled(rank, world_size):
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3))
        dist.all_reduce(torch.ones(7), async_op=True).wait()
        dist.broadcast(torch.ones(5), 0)
        dist.all_gather_single(torch.ones(4 * world_size), torch.ones(4))
        dist.barrier()
    events = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("shm:")}
    assert events["shm:broadcast"] == [[5]]
    assert events["shm:all_gather"] == [[4]]
    assert "shm:barrier" in events
    reduced = [event.input_shapes for event in profile.events() if event.name == "shm:all_reduce"]
    assert sorted(reduced) == [[[2, 3]], [[7]]]


def test_collectives_show_in_the_profiler_under_gloos_names(shm):
    shm(_profiled)


# -- who calls it -------------------------------------------------------------------------------------------------


def _functional(rank, world_size):
    group = dist.group.WORLD
    mine = torch.arange(4.0) + rank
    total = functional.all_reduce(mine, "sum", group)
    assert total.tolist() == [world_size * i + sum(range(world_size)) for i in range(4)]
    gathered = functional.all_gather_single(mine, 0, group)
    assert gathered.view(world_size, 4)[:, 0].tolist() == list(range(world_size))
    piece = functional.reduce_scatter_single(torch.ones(2 * world_size), "avg", 0, group)
    assert piece.tolist() == [1.0, 1.0]
    assert functional.broadcast(mine, 1, group).tolist() == [1.0, 2.0, 3.0, 4.0]
    # The result of one collective, not waited for, as the input of the next.
    unfinished = functional.all_reduce(mine, "sum", group)
    dist.all_reduce(unfinished)
    assert unfinished[0].item() == world_size * sum(range(world_size))


def test_functional_collectives(shm):
    shm(_functional)


def _train_torch_ddp(rank, world_size, hook):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    ddp = TorchDDP(model, gradient_as_bucket_view=True, bucket_cap_mb=0.002)
    if hook:
        ddp.register_comm_hook(
            None,
            lambda state, bucket: (
                dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
                .get_future()
                .then(lambda done: done.value()[0])
            ),
        )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(5):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "comm hook"])
def test_torchs_ddp_trains_to_the_same_bits_as_over_gloo(ranks, hook):
    over_shm = ranks(_train_torch_ddp, hook, backend=SHM)
    over_gloo = ranks(_train_torch_ddp, hook, backend="gloo")
    for rank in range(2):
        for ours, theirs in zip(over_shm[rank], over_gloo[rank], strict=True):
            assert torch.equal(ours, theirs)


def _from_threads(rank, world_size):
    """Several threads, each with a group of its own, as a collective's order across threads is nobody's."""
    groups = [dist.new_group(backend=SHM) for _ in range(3)]
    wrong = []

    def work(number: int) -> None:
        for turn in range(30):
            tensor = torch.full((100 * (number + 1),), float(turn))
            dist.all_reduce(tensor, group=groups[number])
            if tensor.unique().tolist() != [turn * world_size]:
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads(shm):
    shm(_from_threads)


def _arena(rank, world_size):
    memory = paceline.transport.allocate(1 << 20)
    assert memory is not None
    assert memory.numel() == 1 << 20
    values = memory.view(torch.float32)
    assert values.count_nonzero() == 0
    values.copy_(torch.arange(len(values)) % 1000 + rank)
    dist.all_reduce(values[4096:])
    expected = world_size * (torch.arange(len(values)) % 1000) + sum(range(world_size))
    assert torch.equal(values[4096:], expected[4096:].float())
    assert torch.equal(values[:4096], (torch.arange(4096) % 1000 + rank).float())
    # One rank's tensor is elsewhere: slower, and right.
    mixed = values if rank == 0 else torch.zeros_like(values)
    mixed.fill_(1.0)
    dist.all_reduce(mixed)
    assert mixed.unique().tolist() == [world_size]
    dist.group.WORLD.all_reduce_scaled(values.fill_(rank), scale=0.5).wait()
    assert values.unique().tolist() == [0.5 * sum(range(world_size))]
    # Gone on one rank, still of use on the others.
    kept = None if rank == 0 else values
    del memory, values, mixed
    gc.collect()
    later = torch.ones(1 << 18) if kept is None else kept.fill_(1.0)
    dist.all_reduce(later)
    assert later.unique().tolist() == [world_size]


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_that_all_ranks_have_mapped(shm, world_size):
    shm(_arena, world_size=world_size)


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


def test_who_waits_to_share_buckets_hears_of_a_failure(shm):
    assert shm(_raises_while_buckets_become_shared, group_timeout_s=120)[0] == 1


def _first_of_two_fails(rank, world_size):
    group = dist.group.WORLD
    if rank == 1:
        with pytest.raises(DisagreementError):
            dist.all_reduce(torch.ones(11))
        dist.all_reduce(torch.ones(20))
        return True
    # Two jobs, one work: the first fails, since ranks differ, and the second ends well, later.
    work = group.allreduce_coalesced([torch.ones(10), torch.ones(20)], dist.AllreduceCoalescedOptions())
    with pytest.raises(RuntimeError, match="all_reduce"):
        work.get_future().wait()
    # Whoever looks after works is still there for the next one.
    return True


def _goes_on(rank, world_size):
    _first_of_two_fails(rank, world_size)
    tensor = torch.ones(5)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    return tensor.tolist()


def test_a_work_of_several_jobs_whose_first_fails_is_announced(shm):
    assert shm(_goes_on, group_timeout_s=30) == [[2.0] * 5] * 2


def test_options_name_the_backend_between_hosts():
    assert Options().between == "gloo"
    assert Options(between="mpi").between == "mpi"


# A rank that ends without destroy_process_group, with work of the kernel's threads under way.
_EXITS = """
import os, sys, torch, torch.distributed as dist, paceline
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("cpu:shm", store=dist.FileStore(path, 2), rank=rank, world_size=2)
if rank == 0:
    kept = [dist.irecv(torch.zeros(1 << 20), 1), dist.all_reduce(torch.zeros(1 << 20), async_op=True)]
    kept[1].get_future()
print("end", flush=True)
"""


def test_exit_with_work_under_way_is_no_crash(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _EXITS, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        said, errors = process.communicate(timeout=120)
        assert (process.returncode, said) == (0, "end\n"), errors
