"""Seeded scripts of faults: one rank of a job fails at some point in some way, and every other one has to say so.

``python -m tests.control.fault_scripts --runs 1000`` is the soak; ``test_fault_scripts.py`` runs a few of each kind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import hang
from paceline.control.jobs import KEPT_JOBS, all_jobs
from paceline.control.progress import read_file
from paceline.errors import PeerError
from paceline.hooks import allreduce as allreduce_hook
from paceline.settings import HangWatch
from paceline.testing import InjectedFaultError, RankError, RankPool, fail_at
from paceline.testing.faults import Action, Phase
from tests.transport.killing import segments

PROMISED_S = 2.0
"""Between a fault and the error on every other rank, for faults that do not have to be waited for."""
WATCH_S = 2.0
"""After how long without progress a rank that is stopped or stuck is looked for, in the step in which one is."""
PHASES: tuple[Phase, ...] = ("loader", "forward", "backward", "comm_hook", "optimizer")
ACTIONS: tuple[Action, ...] = ("raise", "exit", "kill", "stop", "hold_lock")
CAUSES = {"stop": "is stopped", "hold_lock": "interpreter lock"}


@dataclass(frozen=True)
class Script:
    """One run: who fails when, where and how."""

    number: int
    world_size: int
    backend: str
    rank: int
    step: int
    phase: Phase
    action: Action


@dataclass(frozen=True)
class Heard:
    """How a survivor heard of it."""

    error: str
    rank: int | None
    message: str
    seconds: float


def scripts(runs: int, *, seed: int) -> Iterator[Script]:
    """Every phase with every action in turn, in a shuffled order; the rest at random."""
    rng = random.Random(seed)
    pairs = [(phase, action) for phase in PHASES for action in ACTIONS]
    for number in range(runs):
        if number % len(pairs) == 0:
            rng.shuffle(pairs)
        phase, action = pairs[number % len(pairs)]
        world_size = rng.choice((2, 2, 4))
        yield Script(
            number,
            world_size,
            rng.choice(("gloo", "cpu:shm")),
            rng.randrange(world_size),
            rng.randrange(3),
            phase,
            action,
        )


def train(rank: int, world_size: int, script: Script) -> Heard | None:
    """A few steps, one of which goes wrong. Returns what a survivor heard; None on the rank that failed."""
    fault = fail_at(rank=script.rank, step=script.step, phase=script.phase, action=script.action)
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), fault.layer(), nn.Linear(4, 2)), bucket_cap_mb=0.00005)
    if script.phase == "comm_hook":
        ddp.register_comm_hook(None, fault.hook(allreduce_hook))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(fault.optimizer_hook())
    # The clock of the step that fails starts when all ranks are in it.
    began = time.monotonic()
    try:
        for step in range(script.step + 3):
            dist.barrier()
            began = time.monotonic()
            if step == script.step and script.action in CAUSES:
                # This is not set before, because on a busy machine a first step takes longer than that.
                ddp.channel.hang = HangWatch("enforce", WATCH_S)
            fault.strike("loader", step)
            ddp(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == script.step and script.phase == "optimizer":
                break
        if script.phase == "optimizer":
            ddp(torch.ones(3, 4)).sum().backward()
    except InjectedFaultError as error:
        # What the interpreter does; the process stays, which is the harder case: no closed connection tells the others.
        sys.excepthook(type(error), error, error.__traceback__)
        return None
    except PeerError as error:
        heard = Heard(type(error).__name__, error.rank, str(error), time.monotonic() - began)
        if script.action in CAUSES:
            _end_victim(ddp, script)
        return heard
    raise AssertionError("no error")


def _end_victim(ddp: DDP, script: Script) -> None:
    """Once every survivor has its error: a rank that is stopped would never end."""
    survivors = [rank for rank in range(script.world_size) if rank != script.rank]
    store = ddp.channel._board.store
    store.set(f"heard/{ddp.channel.rank}", "")
    if ddp.channel.rank == survivors[0]:
        store.wait([f"heard/{rank}" for rank in survivors], timedelta(seconds=60))
        record = read_file(ddp.channel.progress.path.with_name(f"wrapper1.rank{script.rank}"))
        os.kill(record.pid, signal.SIGKILL)


def _pool() -> RankPool:
    # A rank that was used for a fault is not used again: what every new one would import is there already.
    return RankPool(preload=("torch._dynamo", "tests.transport.killing"))


def run(pool: RankPool, script: Script) -> list[Heard]:
    """What the survivors of ``script`` heard; raises if there is one that did not."""
    try:
        found = pool.run(
            train, script, world_size=script.world_size, backend=script.backend, timeout=120, settle_s=20, clean_s=0.5
        )
    except RankError as error:
        others = [failure for rank, failure in error.failures.items() if rank != script.rank]
        if others:
            raise
        found = list(error.results.values())
    return [heard for heard in found if heard is not None]


def judge(script: Script, heard: list[Heard], *, within_s: float) -> list[str]:
    """What is wrong with how the survivors heard of it."""
    wrong = []
    if len(heard) != script.world_size - 1:
        wrong.append(f"{len(heard)} ranks heard of it")
    limit_s = within_s + (2 * WATCH_S + hang.ANSWER_S if script.action in CAUSES else 0)
    for one in heard:
        expected = "PeerFailedError" if script.action == "raise" else "RankLostError"
        if one.error != expected or one.rank != script.rank:
            wrong.append(f"{one} instead of {expected} of rank {script.rank}")
        if script.action == "raise" and not _names_cause(script, one.message):
            wrong.append(f"{one} does not name the cause")
        if CAUSES.get(script.action, "") not in one.message:
            wrong.append(f"{one} does not say how")
        if one.seconds > limit_s:
            wrong.append(f"{one} took more than {limit_s} s")
    return [f"{script}: {text}" for text in wrong]


def _names_cause(script: Script, message: str) -> bool:
    cause = f"InjectedFaultError: injected: rank {script.rank}, step {script.step}, {script.phase}"
    return cause in message and "fault_scripts.py:" in message


def left_behind(before: set[str]) -> list[str]:
    """What the dead have left that should not be there."""
    wrong = [f"segment {name}" for name in segments() - before]
    if len(all_jobs()) > KEPT_JOBS:
        wrong.append(f"{len(all_jobs())} directories of jobs")
    return wrong


def soak(runs: int, *, seed: int, within_s: float, progress: Callable[[str], Any] = lambda line: None) -> list[str]:
    wrong: list[str] = []
    quick: list[float] = []
    before = segments()
    with tempfile.TemporaryDirectory(prefix="faults-") as directory, _pool() as pool:
        os.environ["PACELINE_JOB_DIR"] = directory
        for script in scripts(runs, seed=seed):
            try:
                heard = run(pool, script)
            except RankError as error:
                wrong.append(f"{script}: {error}")
                continue
            wrong += judge(script, heard, within_s=within_s)
            if script.action not in CAUSES:
                quick += [one.seconds for one in heard]
            progress(f"{script}: {max((one.seconds for one in heard), default=0):.2f} s")
        wrong += left_behind(before)
    if quick:
        print(f"heard after {statistics.median(quick):.2f} s (median), {max(quick):.2f} s (at most)")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.control.fault_scripts", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=PROMISED_S, metavar="S", help="what is allowed, in seconds")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args(argv)
    started = time.monotonic()
    wrong = soak(
        options.runs,
        seed=options.seed,
        within_s=options.within,
        progress=print if options.verbose else lambda line: None,
    )
    for line in wrong:
        print(line)
    print(f"{options.runs} fault scripts in {time.monotonic() - started:.0f} s, {len(wrong)} faults found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
