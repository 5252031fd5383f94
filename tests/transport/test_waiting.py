"""Ranks that wait leave the cores to those that work.

One rank computes, on purpose, while the others are inside a collective; what they burn meanwhile is measured as the CPU
time of their processes, all threads included.
"""

from __future__ import annotations

import ctypes
import time

import pytest
import torch
import torch.distributed as dist

from paceline.transport.shm import library

from .conformance import SHM
from .requirements import needs_shm

# The share of the time waited that may be spent on a core. A rank that spins has 1; short spins and waking up to look
# for the dead cost little.
MOST = 0.25
WORK_S = 0.6


def _compute() -> None:
    """Keep a core busy, as a long forward does."""
    square = torch.ones(64, 64)
    started = time.process_time()
    while time.process_time() - started < WORK_S:
        square = (square @ square).clamp(0, 1)


def _burnt(rank, world_size, how):
    other = (rank + 1) % world_size
    # Threads that are started with the first call of a kind are there now.
    warm = dist.isend(torch.ones(1), other)
    dist.recv(torch.zeros(1), (rank - 1) % world_size)
    warm.wait()
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.barrier()
    cpu, wall = time.process_time(), time.monotonic()
    tensor = torch.ones(1023)
    if rank == 0:
        _compute()
    if how == "all_reduce":
        dist.all_reduce(tensor)
    elif how == "asynchronous all_reduce":
        dist.all_reduce(tensor, async_op=True).wait()
    elif how == "large all_reduce":
        dist.all_reduce(torch.ones(2_000_003))
    elif how == "future":
        dist.all_reduce(tensor, async_op=True).get_future().wait()
    elif how == "recv":
        works = [dist.isend(tensor, to) for to in range(1, world_size)] if rank == 0 else [dist.irecv(tensor, 0)]
        for work in works:
            work.wait()
    else:
        # The ranks wait in no collective at all, so that only the group's own threads run.
        store = dist.distributed_c10d._get_default_store()
        store.set("computed", "yes") if rank == 0 else store.wait(["computed"])
    return time.process_time() - cpu, time.monotonic() - wall


@pytest.mark.parametrize(
    "how", ["all_reduce", "large all_reduce", "asynchronous all_reduce", "future", "recv", "nothing"]
)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_waiting_is_not_working(ranks, how, world_size):
    needs_shm()
    for burnt_s, waited_s in ranks(_burnt, how, world_size=world_size, backend=SHM)[1:]:
        assert waited_s > WORK_S / 2
        assert burnt_s < MOST * waited_s


def test_a_spin_follows_what_was_worth_it():
    needs_shm()
    next_spin = library.library().pl_next_spin
    next_spin.restype, next_spin.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
    most = 3200
    for spin, slept, expected in [
        (800, 0, 1600),  # long enough
        (800, 500, 1600),  # only just too short
        (800, 5000, 400),  # for nothing
        (most, 0, most),
        (most, 500, most // 2),  # longer than the longest is no use
        (0, 500, most // 32),  # a job may spin that follows one that might not
        (200, 5000, most // 32),
    ]:
        assert next_spin(spin, most, slept) == expected, (spin, slept)
    assert next_spin(800, 0, 5000) == 0
