"""What it gains that each rank runs on cores of its own: ``paceline run --bind auto`` against ``--bind none``.

    python -m benchmarks.binding                  # prints a ratio for each model; below 1, binding is faster
    python -m benchmarks.binding --rounds 4       # a smoke run

Two ranks train as under ``paceline run``, with as many threads as there are cores for each. Rounds with and without
binding take turns in the same processes: before a round, each rank moves all of its threads to its own cores, or lets
them run on any. So whatever else the machine does falls on both. What a round takes is the time of the slower rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time

import numpy as np
import torch
import torch.distributed as dist

import paceline
from paceline.run import cores

from .models import CASES

MODELS = ("gpt", "mlp")
RESAMPLES = 2000


def _run_on(cpus: set[int]) -> None:
    """Move all threads of this process, those of OpenMP included."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cpus)


def measure(rounds: int, round_s: float) -> None:
    """What each rank does."""
    world = paceline.init(device="cpu")
    found = cores.usable_cores()
    everywhere = {cpu for core in found for cpu in core}
    own = {cpu for core in cores.share(found, world.world_size)[world.local_rank] for cpu in core}
    for name in MODELS:
        case = CASES[name]
        torch.manual_seed(0)
        ddp = paceline.DDP(case.build())
        optimizer = case.optimizer(ddp.parameters())
        batch = case.batch(torch.Generator().manual_seed(world.rank))

        def step(ddp: paceline.DDP = ddp, optimizer=optimizer, case=case, batch=batch) -> None:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            case.loss(ddp, batch).backward()
            optimizer.step()

        steps = _steps(step, round_s)
        ratios = []
        for index in range(rounds):
            order = (own, everywhere) if index % 2 else (everywhere, own)
            taken = {id(cpus): _time(step, steps, cpus) for cpus in order}
            ratios.append(taken[id(own)] / taken[id(everywhere)])
        if world.rank == 0:
            drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
            low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
            told = f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
            print(f"{name}: step bound / not bound {told}, {rounds} rounds of {steps} steps", flush=True)


def _steps(step, round_s: float) -> int:  # type: ignore[no-untyped-def]
    for _ in range(3):
        start = time.perf_counter()
        step()
    steps = torch.tensor(max(1, int(round_s / (time.perf_counter() - start))))
    dist.broadcast(steps, 0)
    return int(steps)


def _time(step, steps: int, cpus: set[int]) -> float:  # type: ignore[no-untyped-def]
    _run_on(cpus)
    step()  # caches are cold after a move
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="pairs of rounds for each model (default: 60)")
    parser.add_argument("--round-s", type=float, default=0.5, help="how long a round takes (default: 0.5)")
    parser.add_argument("--ranks", type=int, default=2)
    flags = parser.parse_args()
    found = cores.usable_cores()
    if not cores.share(found, flags.ranks):
        parser.error(f"there are {len(found)} cores for {flags.ranks} ranks")
    paceline.spawn(measure, flags.ranks, flags.rounds, flags.round_s)


if __name__ == "__main__":
    main()
