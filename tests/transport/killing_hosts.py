"""Ranks that die on cue in a group that spans hosts.

    python -m tests.transport.killing_hosts --runs 200    the soak (needs root, for network namespaces)

Each run makes a group of two hosts with two ranks each, kills one of them inside a collective (in shared memory, or
between the leaders, or around a message) and looks at what the three others are left with.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.transport.shm.kernel import fail_at

from ._hosts import KILLED, Hosts, why_no_hosts
from .killing import CALLS, SMALL, Loss, Obituary, conclude, heard_of, judge, parse, start_group

WORLD_SIZE = 4
LEADERS = (0, 2)


def _to_the_next() -> None:
    after, before = (dist.get_rank() + 1) % WORLD_SIZE, (dist.get_rank() - 1) % WORLD_SIZE
    sent, got = torch.ones(SMALL), torch.zeros(SMALL)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]):
        work.wait()


def _to_one() -> None:
    """The rank that receives does not say from whom."""
    if dist.get_rank() == 1:
        for _ in range(WORLD_SIZE - 1):
            dist.recv(torch.zeros(SMALL))
    else:
        dist.send(torch.ones(SMALL), 1)


def _new_group() -> None:
    dist.new_group(timeout=timedelta(minutes=5))


MESSAGES: dict[str, Callable[[], None]] = {"messages around": _to_the_next, "messages to one": _to_one}
COLLECTIVES: dict[str, Callable[[], None]] = {
    **{name: call for name, call in CALLS.items() if name != "zero-copy all_reduce"},
    "sparse all_reduce": lambda: dist.all_reduce(torch.eye(8).to_sparse()),
}
MAKING: dict[str, Callable[[], None]] = {"new group": _new_group}
INSIDE = ("before_publish", "published", "passed")
"""Phases of the kernel that every stage inside a host goes through."""


@dataclass(frozen=True)
class Plan:
    """Which rank dies, and where."""

    call: str
    phase: str
    victim: int
    count: int = 0
    """How many times the phase is passed alive."""


def plans(runs: int, *, seed: int = 0) -> Iterator[Plan]:
    """All there are, in a shuffled order, and again."""
    rng = random.Random(seed)
    ranks = range(WORLD_SIZE)
    every = [Plan(call, phase, rng.choice(ranks), n) for call in COLLECTIVES for phase in INSIDE for n in (0, 1)]
    every += [Plan(call, phase, rng.choice(LEADERS)) for call in COLLECTIVES for phase in ("agree", "agreed")]
    exchanges = [
        call for call in COLLECTIVES if call.endswith(("all_to_all", "gather", "scatter", "sparse all_reduce"))
    ]
    every += [Plan(call, phase, rng.choice(LEADERS), 1) for call in exchanges for phase in ("agree", "agreed")]
    # The rank that receives has three messages to receive; the others have one to send.
    every += [Plan(call, "message", rank) for call in MESSAGES for rank in ranks]
    every += [Plan("messages around", "message", rank, 1) for rank in ranks] + [
        Plan("messages to one", "message", 1, 2)
    ]
    every += [Plan(call, "idle", rng.choice(ranks)) for call in (*COLLECTIVES, *MESSAGES)]
    every += [Plan("new group", phase, rank) for rank in ranks for phase in ("connecting", "announced", "connected")]
    every += [Plan("new group", "connecting leaders", rank) for rank in LEADERS]
    rng.shuffle(every)
    for number in range(runs):
        yield every[number % len(every)]


def die(rank: int, world_size: int, path: str, planned: dict[str, Any]) -> dict[str, Any] | None:
    """On a rank: make the group and the call, and hear of the victim; dies if it is that."""
    plan = Plan(**planned)
    call = (COLLECTIVES | MESSAGES | MAKING)[plan.call]
    start_group(path, rank=rank, world_size=world_size)
    assert "hosts" in dist.group.WORLD.carried
    call()
    obituary = Obituary(plan.victim)
    # All have its number by now.
    dist.barrier()
    if plan.call in MAKING:
        _count_lines()
    if rank == plan.victim:
        _prepare(plan, _kill_with_lines if plan.call in MAKING else _kill)
    loss = heard_of(call, obituary)
    if loss is None:
        # It died in the meeting that followed, when it had done its part of that.
        loss = heard_of(lambda: None, obituary)
    dist.destroy_process_group()
    return None if loss is None else asdict(loss)


def _prepare(plan: Plan, kill: Callable[[], None]) -> None:
    from paceline import _torch
    from paceline.transport.hosts.leaders import Leaders
    from paceline.transport.hosts.messages import Messages

    if plan.phase == "idle":
        kill()
    elif plan.phase in ("agree", "agreed"):
        _around(Leaders, "_agree", kill, after=plan.phase == "agreed", alive=iter(range(plan.count)))
    elif plan.phase in ("connecting", "connected"):
        _around(_torch, "new_gloo", kill, after=plan.phase == "connected", alive=iter(range(1)))
    elif plan.phase == "announced":
        alive, new_gloo = iter(range(1)), _torch.new_gloo
        _torch.new_gloo = lambda store, **options: new_gloo(
            _FatalStore(store, kill) if next(alive, None) is None else store, **options
        )
    elif plan.phase == "connecting leaders":
        _around(_torch, "new_backend", kill, after=False, alive=iter(()))
    elif plan.phase == "message":
        alive = iter(range(plan.count))
        for name in ("send", "recv"):
            _around(Messages, name, kill, after=False, alive=alive)
    else:
        fail_at(plan.phase, count=plan.count)


def _around(owner: Any, name: str, kill: Callable[[], None], *, after: bool, alive: Iterator[int]) -> None:
    original = getattr(owner, name)

    def kill_in_turn(*args: Any, **kwargs: Any) -> Any:
        is_turn = next(alive, None) is None
        if is_turn and not after:
            kill()
        found = original(*args, **kwargs)
        if is_turn:
            kill()
        return found

    setattr(owner, name, kill_in_turn)


class _FatalStore(dist.Store):
    """A rank that waits in it for the others has put up its own address, and dies."""

    def __init__(self, store: dist.Store, kill: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._kill = kill
        self._is_published = False

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)
        self._is_published = True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if self._is_published:
            self._kill()
        self._store.wait(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_with_lines() -> None:
    """Not before the others can hear of it: docs/transport.md promises nothing for the milliseconds before."""
    _default_store().wait(["all have lines"])
    _kill()


def _count_lines() -> None:
    """Note in the store when all ranks have their lines to the others in the group that is about to be made."""
    from paceline.transport.hosts import several_hosts as hosts

    class Counted(hosts.PeerReports):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if _default_store().add("lines", 1) == WORLD_SIZE:
                _default_store().set("all have lines", "yes")

    hosts.PeerReports = Counted


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def run(hosts: Hosts, plan: Plan, path: str) -> list[Loss]:
    """How the others heard of it, by rank. ``hosts`` are forking ones."""
    heard = hosts.run("tests.transport.killing_hosts", "die", path, asdict(plan))
    assert heard[plan.victim] == KILLED, f"the victim lives, and heard {heard[plan.victim]}"
    assert None not in heard, f"somebody heard nothing: {heard}"
    return [Loss(**found) for rank, found in enumerate(heard) if rank != plan.victim]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv, "tests.transport.killing_hosts", __doc__)
    reason = why_no_hosts()
    if reason is not None:
        print(f"no hosts to kill ranks on: {reason}")
        return 0
    started = time.monotonic()
    wrong: list[str] = []
    seconds: list[float] = []
    with Hosts(is_forking=True) as hosts, tempfile.TemporaryDirectory(prefix="hosts-") as directory:
        for number, plan in enumerate(plans(options.runs, seed=options.seed)):
            try:
                heard = run(hosts, plan, os.path.join(directory, f"store{number}"))
            except AssertionError as error:
                wrong.append(f"{plan}: {error}")
                continue
            seconds += [loss.seconds for loss in heard]
            wrong += [fault for loss in heard for fault in judge(plan, loss)]
        stale = [name for host in range(2) for name in hosts.segments(host)]
        if stale:
            wrong.append(f"stale segments: {stale}")
    if seconds:
        print(f"heard after {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (at most)")
    return conclude(wrong, f"{options.runs} ranks killed across hosts in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
