"""Ranks that die, stop or leave: every other rank hears of it, by name and in time, and nothing is left behind.

Faults are scripted: the kernel is told at which of its phases to kill its process (``kernel.fail_at``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.testing import RankError
from paceline.transport.shm.kernel import fail_at

from . import killing
from .conformance import SHM
from .killing import CALLS, LARGE, NOTICED_WHEN_BUSY_S, PHASES, SMALL, Loss, Obituary, heard_of

STOP_TIMEOUT_S = 1.5

pytestmark = pytest.mark.usefixtures("no_segment_left")


def _losses(ranks, body, *args, victim: int, world_size: int = 2) -> dict[int, Loss]:
    """Run ``body`` on ranks of which ``victim`` dies; how the others heard of it."""
    with pytest.raises(RankError) as caught:
        # The first test of a worker also starts the ranks, which takes a minute on a busy machine.
        ranks(body, *args, world_size=world_size, backend=SHM, timeout=150)
    failures = caught.value.failures
    assert set(failures) == {victim}, f"not only rank {victim} failed:\n{caught.value}"
    assert failures[victim].error_type == "", f"rank {victim} did not die: {failures[victim]}"
    assert set(caught.value.results) == set(range(world_size)) - {victim}
    return caught.value.results


def _check(loss: Loss | None, *, victim: int = 1) -> None:
    _check_text_and_time(loss, victim=victim)
    assert (loss.error, loss.lost) == ("RankLostError", victim), loss


def _check_text_and_time(loss: Loss | None, *, victim: int = 1) -> None:
    assert loss is not None, "no error"
    # In a backward, the wrapper may notice it before the transport does: then the sentence begins with the rank.
    assert f"rank {victim}" in loss.message.lower(), loss
    assert loss.seconds < NOTICED_WHEN_BUSY_S, loss


def _dies_in(rank, world_size, victim, call, phase, count):
    CALLS[call]()
    obituary = Obituary(victim)
    dist.barrier()
    if rank == victim:
        fail_at(phase, count=count)
    loss = heard_of(CALLS[call], obituary)
    if rank == victim:
        raise AssertionError(f"{call} does not reach {phase} ({count} times)")
    return loss


@pytest.mark.parametrize(
    ("call", "phase", "count", "victim", "world_size"),
    [
        *(("small all_reduce", phase, 0, 1, 2) for phase in PHASES["small all_reduce"]),
        *(("large all_reduce", phase, 0, 0, 2) for phase in PHASES["large all_reduce"]),
        # The other collectives have one phase each here; `make soak` goes through all of them.
        *((call, PHASES[call][-1], 0, 1, 2) for call in list(PHASES)[2:]),
        ("small all_reduce", "staged", 0, 0, 4),
        ("large all_reduce", "reduced", 0, 2, 4),
        ("large all_gather", "published", 0, 3, 4),
        # These are killed in the third chunk.
        *(("large all_reduce", phase, 2, 0, 2) for phase in ("staged", "passed", "copied")),
    ],
)
def test_killed_in_a_collective(ranks, call, phase, count, victim, world_size):
    assert phase in PHASES[call]
    losses = _losses(ranks, _dies_in, victim, call, phase, count, victim=victim, world_size=world_size)
    for loss in losses.values():
        _check(loss, victim=victim)


# -- point to point -------------------------------------------------------------------------------------------


def _dies_talking(rank, world_size, victim, phase):
    dist.barrier()
    other = 1 - rank
    if rank == victim:
        fail_at(phase)

    def talk() -> None:
        if (phase == "sending") == (rank == victim):
            dist.send(torch.ones(LARGE), other)
        else:
            dist.recv(torch.zeros(LARGE), other)

    loss = heard_of(talk)
    if rank == victim:
        raise AssertionError(f"point to point does not reach {phase}")
    return loss


@pytest.mark.parametrize("phase", ["sending", "receiving"])
def test_killed_while_talking(ranks, phase):
    _check(_losses(ranks, _dies_talking, 1, phase, victim=1)[0])


def _dies_before_sending(rank, world_size, how):
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outs = torch.zeros(SMALL)
    if how == "from it":
        return heard_of(lambda: dist.recv(outs, 1))
    if how == "asynchronously":
        return heard_of(lambda: dist.irecv(outs, 1).wait())
    return heard_of(lambda: dist.recv(outs))


@pytest.mark.parametrize("how", ["from it", "asynchronously", "from anyone"])
def test_waiting_for_a_message_of_the_dead(ranks, how):
    _check(_losses(ranks, _dies_before_sending, how, victim=1)[0])


# -- what is left of the group --------------------------------------------------------------------------------


def _after_the_death(rank, world_size):
    dist.barrier()
    if rank == 1:
        fail_at("staged")
    first = heard_of(CALLS["small all_reduce"])
    again = heard_of(CALLS["small all_reduce"])
    work = heard_of(lambda: dist.all_reduce(torch.ones(3), async_op=True).wait())
    future = heard_of(lambda: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait())
    started = time.monotonic()
    dist.destroy_process_group()
    return first, again, work, future, time.monotonic() - started


def test_the_group_stays_broken_and_can_be_left(ranks):
    """Every later call fails at once, futures carry the error, and destroying the group does not wait for the dead."""
    losses = _losses(ranks, _after_the_death, victim=1)
    first, again, work, future, seconds = losses[0]
    for loss in (first, again, work):
        _check(loss)
    # c10d's futures turn exceptions of Python into RuntimeErrors with the text.
    assert future is not None
    assert "rank 1" in future.message
    assert seconds < NOTICED_WHEN_BUSY_S


def _dies_with_works_pending(rank, world_size):
    dist.barrier()
    if rank == 1:
        fail_at("published", count=8)
    works = [dist.all_reduce(torch.ones(100_003), async_op=True) for _ in range(10)]
    if rank == 1:
        works[-1].wait()
        raise AssertionError("still alive")
    losses = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            losses.append((type(error).__name__, getattr(error, "rank", None), work.is_completed()))
    return losses


def test_every_pending_work_fails(ranks):
    losses = _losses(ranks, _dies_with_works_pending, victim=1)[0]
    assert losses
    assert set(losses) == {("RankLostError", 1, True)}


def _dies_in_a_subgroup(rank, world_size):
    groups = {members: dist.new_group(members) for members in ((1, 3), (0, 2))}
    dist.barrier()
    members = (1, 3) if rank in (1, 3) else (0, 2)
    if rank == 3:
        fail_at("staged")
    tensor = torch.ones(SMALL)
    loss = heard_of(lambda: dist.all_reduce(tensor, group=groups[members]), group=groups[members])
    return loss or tensor.sum().item()


def test_killed_in_a_subgroup(ranks):
    """Its group hears of it, by the rank's global name; a group that it is not in works on."""
    losses = _losses(ranks, _dies_in_a_subgroup, victim=3, world_size=4)
    assert (losses[0], losses[2]) == (2.0 * SMALL, 2.0 * SMALL)
    _check(losses[1], victim=3)


# -- in training ----------------------------------------------------------------------------------------------


def _dies_in_backward(rank, world_size, which):
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))
    if which == "ours":
        import paceline

        model = paceline.DistributedDataParallel(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()
    dist.barrier()
    if rank == 1:
        fail_at("before_publish", count=1)

    def step() -> None:
        for _ in range(3):
            model(torch.randn(8, 64)).sum().backward()

    loss = heard_of(step)
    if rank == 1:
        raise AssertionError("still alive after backward")
    return loss


@pytest.mark.parametrize("which", ["ours", "torch's"])
def test_killed_in_backward(ranks, which):
    loss = _losses(ranks, _dies_in_backward, which, victim=1)[0]
    # torch's reducer turns the error into one of its own, with the same words.
    check = _check if which == "ours" else _check_text_and_time
    check(loss)


# -- stopped, and gone without a word -------------------------------------------------------------------------


def _stops(rank, world_size, call):
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
    dist.barrier()
    # This is not set from the start, because ranks may be late to the making of the group.
    dist.group.WORLD.set_timeout(timedelta(seconds=STOP_TIMEOUT_S))
    if rank == 1:
        fail_at("before_publish", action="stop")
    loss = heard_of(CALLS[call])
    if rank == 1:
        raise AssertionError("it was to be stopped")
    # Otherwise it would stay stopped until the pool gives it up.
    os.kill(int(store.get("pid")), signal.SIGKILL)
    return loss


@pytest.mark.parametrize("call", ["small all_reduce", "asynchronous all_reduce"])
def test_stopped_rank_is_named_when_time_is_up(ranks, call):
    """A stopped rank may yet go on: it is lost when the group's own time-out has passed, not before."""
    loss = _losses(ranks, _stops, call, victim=1)[0]
    _check(loss)
    assert loss.seconds >= STOP_TIMEOUT_S * 0.9


def _leaves(rank, world_size):
    dist.barrier()
    if rank == 0:
        return heard_of(CALLS["small all_reduce"])
    # Gone from the group, but the process lives until the other has seen it.
    dist.destroy_process_group()
    return None


def test_left_the_group(ranks):
    """A rank that destroys the group while another still uses it is named, though its process lives."""
    loss = ranks(_leaves, backend=SHM)[0]
    _check(loss)
    assert "rank 1 closed the group" in loss.message


# -- nothing is left behind -----------------------------------------------------------------------------------


def test_killed_runs_leave_nothing():
    """Ten here, two hundred in `make soak`."""
    assert killing.soak(10, within_s=NOTICED_WHEN_BUSY_S) == []


# What a script still holds when it ends.
kept: list[dist.Work] = []


def _ends_as_a_script_does(rank, world_size):
    CALLS["small all_reduce"]()
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    if rank == 0:
        work.wait()
    work.get_future()
    dist.isend(torch.ones(3), 1 - rank)
    kept.append(dist.irecv(torch.zeros(LARGE), 1 - rank, tag=1))
    # What the interpreter does at the end of a script, groups, works and the kernel's threads still there.
    ctypes.pythonapi.Py_Exit(0)


def test_scripts_that_just_end(ranks):
    with pytest.raises(RankError) as caught:
        ranks(_ends_as_a_script_does, backend=SHM)
    said = {rank: failure.message for rank, failure in caught.value.failures.items()}
    assert said == dict.fromkeys(range(2), "its process ended (exit code 0)"), caught.value
