"""Starts and ends of ranks, in every way in which a program ends: none may crash on its way out.

    python -m tests.run.ends --runs 2000          the soak

A *case* says which group the ranks make, what they do with it, who ends first, and how. Importing torch takes seconds,
so ranks are forked by a *host*: a process that has imported everything and has started no thread. A forked rank returns
from the host's loop into the main program and ends as every program does, through the end of the interpreter. One run
in twenty starts fresh processes instead. Ranks on two hosts have a network and a ``/dev/shm`` of their own each.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import paceline
from tests.transport._hosts import Hosts, Place, why_no_hosts

BOUND_S = 120.0
"""How long a run may take. Importing torch on a busy machine takes its time."""
TIMEOUT_S = 30.0
"""Of a collective: long enough to be no reason for an end."""
STATUS = 7
"""Of a program that chooses one."""
CRASHES = ("terminate called", "FATAL", "Fatal Python error", "Segmentation fault")
PEER_ERRORS = ("RankLostError", "PeerFailedError")
"""What a rank that goes on ends with, in a group of ours."""
_ROOT = Path(__file__).resolve().parents[2]
_FRESH_EVERY = 20

kept: list[Any] = []
"""What a program still holds when it ends."""


@dataclass(frozen=True)
class Case:
    """One run of some ranks."""

    group: str
    work: str
    first: str
    """Who ends first: ``all`` end at once, or one rank does while the others go on until they notice."""
    end: str
    ranks_per_host: int = 2
    delay_s: float = 0.0
    is_fresh: bool = False


# -- what a rank does -------------------------------------------------------------------------------------------


def _collectives() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    dist.barrier()


def _works_kept() -> None:
    """Works that nobody waits for; the program holds them, and their tensors, to its end."""
    kept.extend(dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5))


def _works_dropped() -> None:
    """The same, with the works and tensors left to whoever carries them."""
    for _ in range(5):
        dist.all_reduce(torch.ones(100_000), async_op=True)


def _futures() -> None:
    """Futures whose callbacks run on a thread of the group's, while the program ends."""
    for _ in range(5):
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        kept.append(work.get_future().then(lambda done: torch.ones(10).sum()))


def _messages() -> None:
    """Receives of messages that never come, from one rank and from anybody."""
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    kept.extend([dist.irecv(torch.zeros(10), peer, tag=1), dist.irecv(torch.zeros(10), tag=2)])


def _groups() -> None:
    """More groups of other kinds, one of which is dropped."""
    for backend in ("gloo", "cpu:shm"):
        group = dist.new_group(backend=backend)
        dist.all_reduce(torch.ones(1000), group=group)
        kept.append(group)
    dist.all_reduce(torch.ones(1000), group=dist.new_group(backend="gloo"), async_op=True)


def _steps() -> None:
    kept.append(paceline.DDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), bucket_cap_mb=0.0001))
    for _ in range(2):
        kept[-1](torch.ones(3, 8)).sum().backward()


WORKS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "collectives": _collectives,
    "works kept": _works_kept,
    "works dropped": _works_dropped,
    "futures": _futures,
    "messages": _messages,
    "groups": _groups,
    "steps": _steps,
    "inside a step": _steps,
}


def _raise() -> NoReturn:
    raise RuntimeError("the end of this program")


def _terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _terminated_politely() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STATUS))
    _terminated()


ENDS: dict[str, tuple[Callable[[], None], int]] = {
    "falls off": (lambda: None, 0),
    "shutdown": (paceline.shutdown, 0),
    "destroy": (dist.destroy_process_group, 0),
    "exit": (lambda: sys.exit(STATUS), STATUS),
    "exception": (_raise, 1),
    "os._exit": (lambda: os._exit(STATUS), STATUS),
    "SIGTERM": (_terminated, -signal.SIGTERM),
    "SIGTERM handled": (_terminated_politely, STATUS),
}
"""How a program ends, and the status that it ends with."""
GROUPS = {"gloo": "gloo", "shm": "cpu:shm", "two hosts": "cpu:shm"}
FIRST = ("all", "rank 0", "last rank")


def ends_first(case: Case, rank: int, size: int) -> bool:
    """Whether ``rank`` is one of those that end as the case says."""
    return case.first == "all" or rank == (0 if case.first == "rank 0" else size - 1)


def program(case: Case) -> None:
    """What a rank runs; it ends when this returns or raises, if not before."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    paceline.init(backend=GROUPS[case.group], device="cpu", timeout=TIMEOUT_S, hang_watch="observe", hang_after_s=1.0)
    rank, size = dist.get_rank(), dist.get_world_size()
    WORKS[case.work]()
    if not ends_first(case, rank, size):
        while True:
            # It raises when the other has ended, and that ends this program.
            kept[-1](torch.ones(3, 8)).sum().backward() if "step" in case.work else dist.all_reduce(torch.ones(100))
    end, _ = ENDS[case.end]
    # Other threads do things at intervals. The end should fall on any moment of these, and not always on the same.
    time.sleep(case.delay_s)
    if case.work == "inside a step":
        next(iter(kept[-1].parameters())).register_hook(lambda gradient: end())
        kept[-1](torch.ones(3, 8)).sum().backward()
    else:
        end()


# -- hosts, which fork ranks ------------------------------------------------------------------------------------


def serve() -> Case | None:
    """Fork the ranks that stdin asks for. Returns their case in a rank, and None in the host at the end of stdin."""
    assert len(os.listdir("/proc/self/task")) == 1, "a rank forked from a process with threads is not like a fresh one"
    # Ending a process is mostly collecting garbage: what is here already is left out.
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        case, environs, errors = json.loads(line)
        ranks = []
        for environ, path in zip(environs, errors, strict=True):
            child = os.fork()
            if child == 0:
                _redirect(path)
                os.environ.update(environ)
                if case["is_fresh"]:
                    os.execv(sys.executable, [sys.executable, "-m", "tests.run.ends", "rank", json.dumps(case)])
                return Case(**case)
            ranks.append(child)
        deadline = time.monotonic() + BOUND_S
        answers.write(json.dumps([_status(rank, deadline) for rank in ranks]) + "\n")
    return None


def _redirect(path: str) -> None:
    written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((written, 1), (written, 2), (nothing, 0)):
        os.dup2(fd, target)


def _status(pid: int, deadline: float) -> int | None:
    """How a process has ended; None for one that has not by then, and is killed after it has written its stacks."""
    handle = os.pidfd_open(pid)
    in_time = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]
    if not in_time:
        os.kill(pid, signal.SIGUSR1)
        select.select([handle], [], [], 1.0)
        os.kill(pid, signal.SIGKILL)
    os.close(handle)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if in_time else None


class Host:
    """Starts ranks at a place: on this machine as it is, or in a namespace of their own."""

    def __init__(self, place: Place) -> None:
        self.address = place.address
        # Entering a mount namespace leaves the working directory.
        paths = os.pathsep.join([str(_ROOT), *(os.path.abspath(path) for path in sys.path if path)])
        environ = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | place.environ
        command = [*place.enter, sys.executable, "-m", "tests.run.ends", "serve"]
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, text=True, env=environ, stdin=pipe, stdout=pipe)

    def start(self, case: Case, environs: list[dict[str, str]], errors: list[Path]) -> None:
        """Start a rank for each of ``environs``; what it writes goes to its file of ``errors``."""
        asked = [asdict(case), environs, [str(path) for path in errors]]
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()

    def statuses(self) -> list[int | None]:
        """How the ranks that were started last have ended."""
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End the server."""
        self._server.communicate()


# -- the loop ---------------------------------------------------------------------------------------------------


def cases(runs: int, *, seed: int, groups: list[str]) -> Iterator[Case]:
    """All of them in turn, in a shuffled order, as often as ``runs`` allows."""
    rng = random.Random(seed)
    every = list(itertools.product(groups, WORKS, FIRST, ENDS))
    for number in range(runs):
        if number % len(every) == 0:
            rng.shuffle(every)
        yield Case(
            *every[number % len(every)],
            ranks_per_host=rng.choice((1, 2)) if every[number % len(every)][0] == "two hosts" else 2,
            delay_s=rng.choice((0.0, rng.uniform(0.0, 0.01), rng.uniform(0.0, 0.6))),
            is_fresh=number % _FRESH_EVERY == _FRESH_EVERY - 1,
        )


def run(case: Case, hosts: list[Host], folder: Path) -> list[str]:
    """Run a case; what is wrong with how its ranks have ended."""
    size = len(hosts) * case.ranks_per_host
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
    errors = [folder / f"rank{rank}" for rank in range(size)]
    for path in errors:
        path.unlink(missing_ok=True)
    for number, host in enumerate(hosts):
        ranks = range(number * case.ranks_per_host, (number + 1) * case.ranks_per_host)
        host.start(case, [common | {"RANK": str(rank)} for rank in ranks], [errors[rank] for rank in ranks])
    statuses = [status for host in hosts for status in host.statuses()]
    wrong = []
    for rank, (status, path) in enumerate(zip(statuses, errors, strict=True)):
        fault = judge(case, rank, size, status, path.read_text(errors="replace"))
        if fault:
            wrong.append(f"{case}: rank {rank} of {size} {fault}")
    return wrong


def judge(case: Case, rank: int, size: int, status: int | None, said: str) -> str | None:
    """What is wrong with the end of a rank, or None."""
    if status is None:
        return f"has not ended within {BOUND_S:.0f} s:\n{said}"
    crash = next((word for word in CRASHES if word in said), None)
    if crash:
        return f"ended with status {status} and said {crash!r}:\n{said}"
    # Whoever goes on does so until an exception ends it.
    expected = {ENDS[case.end][1]} if ends_first(case, rank, size) else {1}
    if ends_first(case, rank, size) and (case.first == "all" or case.work == "inside a step"):
        # Whoever is later may find that the others are gone before it comes to its own end.
        expected |= {0, 1}
    if status not in expected:
        return f"ended with status {status} instead of {expected}:\n{said}"
    # One rank a host is a plain group of gloo, whose errors are its own.
    is_ours = case.group == "shm" or (case.group == "two hosts" and case.ranks_per_host > 1)
    if is_ours and not ends_first(case, rank, size) and not any(error in said for error in PEER_ERRORS):
        return f"was not told of its peer:\n{said}"
    return None


class Loop:
    """Runs cases, and counts."""

    def __init__(self, hosts: dict[str, list[Host]]) -> None:
        """``hosts`` has, by the kind of group, where its ranks are."""
        self.runs = self.ends = 0
        self.groups = list(hosts)
        self._hosts = hosts

    def run(self, cases: Iterable[Case], progress: Callable[[str], Any] = lambda line: None) -> list[str]:
        """What was wrong."""
        wrong = []
        with tempfile.TemporaryDirectory(prefix="ends-") as folder:
            for number, case in enumerate(cases):
                began = time.monotonic()
                hosts = self._hosts[case.group]
                found = run(case, hosts, Path(folder))
                wrong += found
                self.runs += 1
                self.ends += len(hosts) * case.ranks_per_host
                progress(
                    f"{number}: {case}: {time.monotonic() - began:.2f} s" + "".join(f"\nFAULT {each}" for each in found)
                )
        return wrong


@contextlib.contextmanager
def loop() -> Iterator[Loop]:
    """With groups of two hosts, if namespaces can be made here."""
    with contextlib.ExitStack() as stack:
        places = [Place([], "127.0.0.1", {})]
        if why_no_hosts() is None:
            spaces = stack.enter_context(Hosts(ranks_per_host=0))
            places += [spaces.place(host) for host in range(2)]
        alone, *others = [stack.enter_context(contextlib.closing(Host(place))) for place in places]
        yield Loop({"gloo": [alone], "shm": [alone], **({"two hosts": others} if others else {})})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run.ends", description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases in whose text this is")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    # Namespaces are left behind otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with loop() as made:
        chosen = (
            case for case in cases(options.runs, seed=options.seed, groups=made.groups) if options.only in str(case)
        )
        wrong = made.run(chosen, print if options.verbose else lambda line: None)
    for line in wrong:
        print(line)
    print(
        f"{made.runs} runs, {made.ends} ends of ranks in {time.monotonic() - started:.0f} s, {len(wrong)} faults found"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        asked = serve()
        if asked is not None:
            program(asked)
    elif sys.argv[1:2] == ["rank"]:
        program(Case(**json.loads(sys.argv[2])))
    else:
        sys.exit(main())
