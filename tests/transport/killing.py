"""Ranks that die on cue, and one that lives through it.

    python -m tests.transport.killing --runs 200          the soak

The soak keeps one rank alive for all runs. Each run forks other ranks from a warm process, makes a group, kills one
of them inside a collective, and looks at what the survivor is left with: the error, and its descriptors, threads and
mappings after it has left the group. In the end there must be no more of them than after the first runs, and no
segment in the shared-memory file system.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import fcntl
import gc
import itertools
import multiprocessing
import os
import random
import re
import select
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from paceline.transport.shm.kernel import fail_at
from paceline.transport.shm.segment import Segment

from .conformance import SHM, assert_shared_memory

SMALL, LARGE = 1023, 3_000_001
# What the issue promises between a death and the error on every other rank.
NOTICED_WITHIN_S = 2.0
# What tests ask for, on a machine that is busy with other tests. It is still far less than the time-outs of groups,
# after which a rank would find out in any case.
NOTICED_WHEN_BUSY_S = 60.0
# Runs after which whatever torch makes once a process has been made.
WARM_RUNS = 7
# How long ranks wait at a rendezvous that one of them will not come to.
MEETING_TIMEOUT_S = 1.0
STUCK_S = 90.0


def _gather() -> None:
    outs = [torch.zeros(SMALL) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(torch.ones(SMALL), outs)


def _scatter() -> None:
    pieces = [torch.ones(SMALL) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.scatter(torch.zeros(SMALL), pieces)


def _all_gather(count: int) -> None:
    dist.all_gather_single(torch.zeros(count * dist.get_world_size()), torch.ones(count))


def _all_to_all(count: int) -> None:
    whole = count * dist.get_world_size()
    dist.all_to_all_single(torch.zeros(whole), torch.ones(whole))


def _reduce_scatter(count: int) -> None:
    dist.reduce_scatter_single(torch.zeros(count), torch.ones(count * dist.get_world_size()))


def _zero_copy() -> None:
    """On memory that all ranks have mapped, made by the first call of a process: that is a collective too."""
    group = dist.group.WORLD
    if group not in _memory:
        from paceline import transport

        made = transport.allocate(4 * LARGE)
        assert made is not None
        _memory[group] = made.view(torch.float32)
    dist.all_reduce(_memory[group])


_memory: weakref.WeakKeyDictionary[dist.ProcessGroup, torch.Tensor] = weakref.WeakKeyDictionary()

# Collectives to die in.
CALLS: dict[str, Callable[[], None]] = {
    "small all_reduce": lambda: dist.all_reduce(torch.ones(SMALL)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(LARGE)),
    "asynchronous all_reduce": lambda: dist.all_reduce(torch.ones(LARGE), async_op=True).wait(),
    "zero-copy all_reduce": _zero_copy,
    "barrier": lambda: dist.barrier(),
    "broadcast": lambda: dist.broadcast(torch.ones(SMALL), 0),
    "large broadcast": lambda: dist.broadcast(torch.ones(LARGE), 0),
    "reduce": lambda: dist.reduce(torch.ones(SMALL), 0),
    "reduce_scatter": lambda: _reduce_scatter(SMALL),
    "large reduce_scatter": lambda: _reduce_scatter(LARGE // 3),
    "all_gather": lambda: _all_gather(SMALL),
    "large all_gather": lambda: _all_gather(LARGE // 3),
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": lambda: _all_to_all(SMALL),
    "large all_to_all": lambda: _all_to_all(LARGE // 3),
}


_EVERYWHERE = ("posted", "staged", "before_publish", "published", "passed")
# Which phases of the kernel a collective goes through, on every rank.
PHASES: dict[str, tuple[str, ...]] = {
    "small all_reduce": (*_EVERYWHERE, "reduced"),
    "large all_reduce": (*_EVERYWHERE, "reduced", "copied"),
    "asynchronous all_reduce": (*_EVERYWHERE, "reduced", "copied"),
    "zero-copy all_reduce": ("posted", "before_publish", "published", "passed", "reduced"),
    "barrier": ("before_publish", "published", "passed"),
    "broadcast": ("before_publish",),
    "large broadcast": ("posted", "before_publish", "published", "passed"),
    "reduce": ("before_publish",),
    "reduce_scatter": ("before_publish", "published"),
    "large reduce_scatter": (*_EVERYWHERE, "reduced"),
    "all_gather": ("before_publish", "passed"),
    "large all_gather": (*_EVERYWHERE, "copied"),
    "gather": ("before_publish",),
    "scatter": ("before_publish",),
    "all_to_all": ("before_publish", "staged"),
    "large all_to_all": (*_EVERYWHERE, "copied"),
}


def start_group(path: str, *, rank: int, world_size: int, timeout_s: float = 300.0, backend: str = SHM) -> None:
    """Make the default group of ranks that have nothing but a file in common."""
    import paceline  # noqa: F401  registers the backend

    dist.init_process_group(
        backend,
        store=dist.FileStore(path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def segments() -> set[str]:
    """Segments whose makers are dead, still named. (Those of the living belong to somebody else's run.)"""
    found = set()
    for name in os.listdir("/dev/shm"):
        if not re.fullmatch(r"paceline-[0-9a-f]{32}", name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                found.add(name)
            finally:
                os.close(fd)
    return found


@dataclass(frozen=True)
class Loss:
    """How a rank heard of another's end."""

    error: str
    lost: int | None
    message: str
    seconds: float


class Obituary:
    """When a rank died, as the system has it: what a survivor's seconds are counted from."""

    def __init__(self, victim: int) -> None:
        """A collective: the ranks tell each other their process numbers."""
        pids = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        self.at: float | None = None
        self._watch: threading.Thread | None = None
        if dist.get_rank() != victim:
            self._watch = threading.Thread(target=self._wait, args=(os.pidfd_open(pids[victim]),), daemon=True)
            self._watch.start()

    def _wait(self, descriptor: int) -> None:
        # Readable when the process has ended.
        select.select([descriptor], [], [])
        self.at = time.monotonic()
        os.close(descriptor)


def heard_of(
    call: Callable[[], Any], obituary: Obituary | None = None, *, group: dist.ProcessGroup | None = None
) -> Loss | None:
    """Make ``call`` and then meet the others; what came of it if that failed.

    The seconds are counted from the death, if ``obituary`` has it, else from the call.
    """
    started = time.monotonic()
    try:
        call()
        # A rank that dies after its last word in a collective has done its part of it: the next one finds out.
        dist.barrier(group=group)
    except Exception as error:
        heard = time.monotonic()
        since = started if obituary is None or obituary.at is None else max(started, obituary.at)
        return Loss(type(error).__name__, getattr(error, "rank", None), str(error), heard - since)
    return None


# -- the soak -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One run of the soak."""

    number: int
    world_size: int
    victim: int
    call: str
    phase: str
    count: int


@dataclass(frozen=True)
class Left:
    """What the survivor has after a run."""

    loss: Loss | None
    descriptors: int
    threads: int
    mappings: int


def plans(runs: int, *, seed: int = 0) -> Iterator[Plan]:
    """Every phase of every collective in turn, in a shuffled order; rank 0 survives."""
    rng = random.Random(seed)
    pairs = [(call, phase) for call, phases in PHASES.items() for phase in phases]
    # Before there is a group, and at no point in particular.
    pairs += [("barrier", "rendezvous"), ("barrier", "anywhere")] * 3
    rng.shuffle(pairs)
    for number, (call, phase) in zip(range(runs), itertools.cycle(pairs), strict=False):
        world_size = rng.choice((2, 2, 3))
        # In a large collective it does not always die in the first chunk.
        count = rng.randrange(3) if call.startswith("large") and phase in ("published", "passed") else 0
        yield Plan(number, world_size, world_size - 1, call, phase, count)


def _survive(conn: Connection, directory: str) -> None:
    torch.set_num_threads(1)
    while True:
        plan: Plan | None = conn.recv()
        if plan is None:
            return
        if plan.phase == "rendezvous":
            loss = _meet_in_vain(plan, 0, directory)
            # c10d counts the group that was not made, and would look for the next one under another name.
            dist.distributed_c10d._world.group_count = 0
        else:
            start_group(_path(directory, plan), rank=0, world_size=plan.world_size)
            assert_shared_memory(dist.group.WORLD)
            CALLS[plan.call]()
            dist.barrier()
            loss = heard_of(CALLS[plan.call])
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        conn.send(Left(loss, *_holdings()))


def _meet_in_vain(plan: Plan, rank: int, directory: str) -> Loss | None:
    """The victim dies before there is a group: the store gives up, or the rendezvous does."""
    path = _path(directory, plan)
    return heard_of(lambda: start_group(path, rank=rank, world_size=plan.world_size, timeout_s=MEETING_TIMEOUT_S))


def _holdings() -> tuple[int, int, int]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = sum("paceline-" in line or "/dev/shm/" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


def _die(plan: Plan, rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    # A rank that is stuck says where, and ends.
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    if plan.phase == "rendezvous" and rank == plan.victim:
        _die_while_meeting()
    if plan.phase == "rendezvous":
        wrong = list(_judge_meeting(plan, _meet_in_vain(plan, rank, directory), within_s=NOTICED_WHEN_BUSY_S))
        print(*wrong, sep="\n", end="", file=sys.stderr, flush=True)
        os._exit(4 if wrong else 0)
    start_group(_path(directory, plan), rank=rank, world_size=plan.world_size)
    CALLS[plan.call]()
    dist.barrier()
    if rank == plan.victim:
        if plan.phase == "anywhere":
            # Killed from outside, wherever it may be: what an out-of-memory killer does.
            os.kill(os.getpid(), signal.SIGKILL)
        fail_at(plan.phase, count=plan.count)
    heard_of(CALLS[plan.call])
    # A bystander leaves without a word as well: the survivor has its error by then, or will have.
    os._exit(3 if rank == plan.victim else 0)


def _die_while_meeting() -> None:
    """Die while a segment of this rank has a name: the next rank that makes one has to clear it away."""
    original = Segment.create

    def create_and_die(nbytes: int) -> Segment:
        original(nbytes)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    Segment.create = create_and_die  # type: ignore[method-assign]


def _path(directory: str, plan: Plan) -> str:
    return os.path.join(directory, f"store{plan.number}")


def soak(
    runs: int,
    *,
    seed: int = 0,
    within_s: float = NOTICED_WITHIN_S,
    progress: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Kill ``runs`` times; returns what was wrong."""
    wrong: list[str] = []
    before = segments()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.testing._preloaded"])
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        survivor = context.Process(target=_survive, args=(theirs, directory), daemon=True)
        survivor.start()
        theirs.close()
        warm: Left | None = None
        left: Left | None = None
        try:
            for plan in plans(runs + WARM_RUNS, seed=seed):
                others = [
                    context.Process(target=_die, args=(plan, rank, directory), daemon=True)
                    for rank in range(1, plan.world_size)
                ]
                ours.send(plan)
                for other in others:
                    other.start()
                try:
                    left = ours.recv() if ours.poll(STUCK_S) else None
                except EOFError:
                    left = None
                if left is None:
                    return [*wrong, f"{plan}: the survivor died, or gave no answer in {STUCK_S:.0f} s"]
                wrong += _ends(plan, others)
                judging = _judge_meeting if plan.phase == "rendezvous" else judge
                wrong += judging(plan, left.loss, within_s=within_s)
                if plan.number == WARM_RUNS - 1:
                    warm = left
                progress(f"{plan.number}: {plan.phase}, {plan.call}: {left}")
            ours.send(None)
            survivor.join(20)
        finally:
            survivor.kill()
            survivor.join()
        if warm is not None and left is not None:
            for what in ("descriptors", "threads", "mappings"):
                if getattr(left, what) > getattr(warm, what):
                    wrong.append(f"{what} grew from {getattr(warm, what)} to {getattr(left, what)} over {runs} runs")
    _clear_away()
    stale = segments() - before
    if stale:
        wrong.append(f"stale segments: {sorted(stale)}")
    return wrong


def _ends(plan: Plan, others: list[Any]) -> Iterator[str]:
    """Wait until the ranks from 1 on have ended, and say what is wrong with how they did."""
    for rank, other in enumerate(others, start=1):
        other.join(20)
        if other.exitcode is None:
            other.kill()
            yield f"{plan}: rank {rank} did not end"
        elif rank == plan.victim and other.exitcode != -signal.SIGKILL:
            yield f"{plan}: the victim ended with {other.exitcode}, not by its fault"
        elif rank != plan.victim and other.exitcode != 0:
            yield f"{plan}: rank {rank}, a bystander, ended with {other.exitcode}"
        other.join()
        other.close()


def _clear_away() -> None:
    """Whoever makes the next segment removes those of the dead: be that one."""
    with Segment.create(1):
        pass


def judge(plan: Any, loss: Loss | None, *, within_s: float = NOTICED_WITHIN_S) -> Iterator[str]:
    """What is wrong with how a rank heard of the victim of ``plan``."""
    if loss is None:
        yield f"{plan}: a survivor saw no error"
    elif loss.error != "RankLostError" or loss.lost != plan.victim:
        yield f"{plan}: {loss}"
    elif loss.seconds > within_s:
        yield f"{plan}: noticed after {loss.seconds:.1f} s"


def _judge_meeting(plan: Plan, loss: Loss | None, *, within_s: float) -> Iterator[str]:
    """What is wrong with how a rank heard that the victim did not come to the making of the group."""
    # On a busy machine another rank may be late as well, and is named beside it.
    named = rf"^rank (\d+, )*{plan.victim}(, \d+)* did not come"
    if loss is None or loss.error != "RankLostError" or not re.search(named, loss.message):
        yield f"{plan}: {loss or 'a survivor saw no error'}"
    elif loss.seconds > MEETING_TIMEOUT_S + within_s:
        yield f"{plan}: gave up after {loss.seconds:.1f} s"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv, "tests.transport.killing", __doc__)
    started = time.monotonic()
    wrong = soak(options.runs, seed=options.seed, progress=print if options.verbose else lambda line: None)
    return conclude(wrong, f"{options.runs} killed runs in {time.monotonic() - started:.0f} s")


def parse(argv: list[str] | None, program: str, description: str | None) -> argparse.Namespace:
    """The options of a soak."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="how many ranks to kill; default 200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args(argv)


def conclude(wrong: list[str], done: str) -> int:
    """Print what a soak has found, and return its exit status."""
    for line in wrong:
        print(line)
    print(f"{done}, {len(wrong)} faults found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
