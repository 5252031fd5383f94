"""Run one test on freshly forked ranks.

Importing torch costs seconds; forking a process that has imported it costs milliseconds. So each test gets
ranks of its own (no state left by an earlier one, nothing to repair after a crash) and the run stays short.
The process that forks must never start a thread: no autograd, no process group, no live display.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import selectors
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from .selection import Selected

# How long the other ranks may still run once one has failed: they often fail for the same reason and say it
# better, and else they would wait for the group's time-out.
GRACE_S = 3.0
END_S = 10.0
STACKS_S = 5.0
GROUP_TIMEOUT_S = 40

# What each rank said last; None if it died.
Messages = dict[int, dict[str, Any] | None]


@dataclass
class Outcome:
    """What became of one test in one column."""

    status: str
    """pass, fail or skip."""
    reason: str = ""
    """One line; empty for a pass."""
    seconds: float = 0.0
    tracebacks: dict[str, str] = field(default_factory=dict)
    """By rank, for those that failed."""


@dataclass(frozen=True)
class Place:
    """Where a forked rank finds itself."""

    rank: int
    suite: ModuleType
    scratch: str
    backend: str


class _Rank:
    """The parent's end of one forked rank."""

    def __init__(self, *, rank: int, run: Callable[[int, int, int], None]) -> None:
        results_r, results_w = os.pipe()
        go_r, go_w = os.pipe()
        self.rank = rank
        self.pid = os.fork()
        if self.pid == 0:
            os.close(results_r)
            os.close(go_w)
            try:
                run(rank, results_w, go_r)
            finally:
                os._exit(0)
        os.close(results_w)
        os.close(go_r)
        self.results = results_r
        self.go = go_w
        self._unread = b""

    def read(self) -> dict[str, Any] | None:
        """One message that has arrived; None when the rank closed its end."""
        while b"\n" not in self._unread:
            chunk = os.read(self.results, 65536)
            if not chunk:
                return None
            self._unread += chunk
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def dump_stack(self) -> None:
        """Abort it, which writes its stacks to its log, and wait until it has hung up."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)
        select.select([self.results], [], [], STACKS_S)

    def end(self) -> None:
        """End the rank and whatever it has started, and collect it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # compile workers: the rank leads a process group of its own
        os.waitpid(self.pid, 0)
        os.close(self.results)
        os.close(self.go)


def run_test(test: Selected, *, suite: ModuleType, log_dir: Path, timeout_s: float, backend: str = "gloo") -> Outcome:
    """Fork the ranks `test` needs, run it, and say how it went. A rank's output goes to `log_dir`."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        for name in ("barrier", "test_dir", "init_dir"):
            (Path(scratch) / name).mkdir()

        def run(rank: int, results: int, go: int) -> None:
            place = Place(rank=rank, suite=suite, scratch=scratch, backend=backend)
            _rank_main(test, place, log_dir=log_dir, results=results, go=go)

        ranks = [_Rank(rank=rank, run=run) for rank in range(test.ranks)]
        try:
            messages = _collect(ranks, timeout_s=timeout_s, stop_on_failure=True)
            if all(message and message["status"] == "pass" for message in messages.values()):
                for rank in ranks:
                    os.write(rank.go, b"g")
                ended = _collect(ranks, timeout_s=END_S, stop_on_failure=False)
                messages |= {r: m for r, m in ended.items() if m is None or m["status"] != "pass"}
            if "timeout" in {message["status"] for message in messages.values() if message}:
                for rank in ranks:
                    rank.dump_stack()
        finally:
            for rank in ranks:
                rank.end()
    return _judge(messages, seconds=time.monotonic() - started)


def _collect(ranks: list[_Rank], *, timeout_s: float, stop_on_failure: bool) -> Messages:
    """One message of each rank; None for a rank that died, a `timeout` for one that stayed silent."""
    deadline = time.monotonic() + timeout_s
    waiting = {rank.rank for rank in ranks}
    messages: Messages = {}
    failed = False
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.results, selectors.EVENT_READ, rank)
        while waiting:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = "stopped" if failed else "timeout"
                messages |= {rank: {"status": silent} for rank in waiting}
                break
            for key, _ in ready:
                rank = key.data
                message = rank.read()
                messages[rank.rank] = message
                waiting.discard(rank.rank)
                selector.unregister(rank.results)
                if stop_on_failure and not failed and (message is None or message["status"] != "pass"):
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    return messages


def _judge(messages: Messages, *, seconds: float) -> Outcome:
    told = {rank: message or {"status": "died"} for rank, message in messages.items()}
    tracebacks = {str(rank): message["traceback"] for rank, message in told.items() if message.get("traceback")}
    in_order = sorted(told.items(), key=lambda item: item[1].get("at", float("inf")))
    reasons = {"fail": "fail", "died": "the process died", "timeout": "timed out", "skip": ""}
    for status, usual in reasons.items():
        for rank, message in in_order:
            if message["status"] == status:
                reason = message.get("reason") or usual
                if status == "skip":
                    return Outcome("skip", reason, seconds)
                return Outcome("fail", f"rank {rank}: {reason}", seconds, tracebacks)
    return Outcome("pass", "", seconds)


def _rank_main(test: Selected, place: Place, *, log_dir: Path, results: int, go: int) -> None:
    """What a forked rank does: run the test, report, wait for the others, leave the group."""
    os.setpgid(0, 0)
    log = os.open(log_dir / f"{test.name}.rank{place.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log)

    def report(message: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(results, json.dumps(message | {"at": time.monotonic()}).encode() + b"\n")

    dist = importlib.import_module("torch.distributed")
    try:
        case = _start(test, place)
        getattr(case, test.name)()
    except unittest.SkipTest as skip:
        report({"status": "skip", "reason": str(skip)})
        return
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in test.skips:
            report({"status": "skip", "reason": test.skips[error.code]})
            return
        trace = traceback.format_exc()
        print(trace, file=sys.stderr)
        report({"status": "fail", "reason": essence(error), "traceback": trace})
        os.read(go, 1)  # stay until the parent has heard the others: our exit would add errors of its own
        return
    report({"status": "pass"})
    if not os.read(go, 1):
        return
    try:
        dist.destroy_process_group()
    except BaseException as error:
        trace = traceback.format_exc()
        report({"status": "fail", "reason": f"leaving the group: {essence(error)}", "traceback": trace})
        return
    report({"status": "pass"})


def _start(test: Selected, place: Place) -> Any:
    """Join the test's process group and make the test case that runs as `place.rank`."""
    suite = place.suite
    os.environ.update(TEMP_DIR=place.scratch, WORLD_SIZE=str(test.ranks), RANK=str(place.rank))
    tempfile.tempdir = place.scratch
    dist = importlib.import_module("torch.distributed")
    timeouts = suite.CUSTOM_PG_TIMEOUT
    dist.init_process_group(
        place.backend,
        init_method=f"file://{place.scratch}/group",
        world_size=test.ranks,
        rank=place.rank,
        timeout=timedelta(seconds=min(timeouts.get(test.name, GROUP_TIMEOUT_S), GROUP_TIMEOUT_S)),
    )
    case_class = type("Case", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})
    case = case_class(test.name)
    case.rank = place.rank
    importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
    dist.barrier()
    return case


def essence(error: BaseException) -> str:
    """The error in one line."""
    text = " ".join(str(error).split("\nException raised from ")[0].split())
    if isinstance(error, SystemExit):
        return f"exited with code {error.code}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
