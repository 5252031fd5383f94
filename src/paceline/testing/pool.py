"""``RankPool``: rank processes that live as long as a test session and run one function after another."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

import torch.distributed as dist

from paceline.testing._rank import CLEAN, CLEAN_UP, Answer, RankJob, rank_main

PRELOADED = f"{__package__}._preloaded"
"""The module that the server process from which ranks are forked imports."""
_LOCALHOST = "127.0.0.1"
# How long stuck ranks may take to write their stacks and die.
_STACKS_S = 5.0
# How long a rank that closed its connection may take to end, so that its exit code is known.
_DEATH_S = 2.0
_LOG_TAIL_CHARS = 8000


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed: it raised, it was stuck, or it died."""

    rank: int
    # The class name of the exception, or "" if there was none because the rank was stuck or died.
    error_type: str
    message: str
    # The traceback. For a stuck rank it is the stacks of its threads.
    traceback: str


class RankError(RuntimeError):
    """Some rank of a run failed. The text has every rank's traceback, the first that failed on top.

    ``rank`` is the first that died or, if none died, the first that failed. ``failures`` has all by rank, and
    ``results`` has what the ranks that did not fail returned.
    """

    def __init__(self, failures: Mapping[int, RankFailure], results: Mapping[int, Any]) -> None:
        first = next(iter(failures.values()))
        parts = [f"rank {first.rank} failed: {first.error_type or 'no exception'}: {first.message}"]
        for failure in failures.values():
            parts.append(f"---- rank {failure.rank} ----\n{failure.traceback.rstrip()}")
        super().__init__("\n".join(parts))
        self.rank = first.rank
        self.failures = dict(failures)
        self.results = dict(results)


class RankPool:
    """Runs functions on live rank processes, each run in a process group of its own.

    Example::

        def double(rank, world_size, x):
            t = torch.tensor([x * rank])
            torch.distributed.all_reduce(t)
            return t.item()

        with RankPool() as pool:
            assert pool.run(double, 3) == [3, 3]

    Ranks are forked from a server process that has imported torch, so replacing one costs milliseconds. They are
    replaced after any failure, and reused otherwise. A rank runs on one thread, with the same seed on every rank and in
    every run, and with warnings as errors. ``run`` is not thread-safe.
    """

    def __init__(self, *, max_world_size: int = 4, preload: tuple[str, ...] = ()) -> None:
        """``preload`` names modules that every rank has from its start, if this is the first pool of the process."""
        self._max_world_size = max_world_size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload, PRELOADED])
        self._ranks: dict[int, _Rank] = {}
        self._runs = itertools.count()
        self._store: Any = None
        # Any user of this host can connect to the store.
        self._secret = secrets.token_hex(32)
        self._log_dir = tempfile.TemporaryDirectory(prefix="rank-pool-")

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 60,
        backend: str | None = "gloo",
        group_timeout_s: float = 300,
        settle_s: float = 10,
        clean_s: float = 10,
        seed: int = 0,
        allow_warnings: tuple[tuple[str, type[Warning]], ...] = (),
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on each rank and return the results by rank.

        ``fn`` is a module-level function; it and ``args`` are pickled. ``timeout`` is for the whole run, and begins
        when the ranks have started. Once a rank has failed, the others have ``settle_s`` to end too. A rank that
        does not let go of its group within ``clean_s`` after a good run is replaced. ``backend=None`` starts no process
        group. The call raises ``RankError`` if any rank fails, and never hangs.
        """
        __tracebackhide__ = True  # pytest: show the ranks' tracebacks, not this function
        if not 1 <= world_size <= self._max_world_size:
            raise ValueError(f"world_size is {world_size}; this pool runs 1 to {self._max_world_size} ranks")
        ranks = self._start(world_size)
        # Starting the first ranks imports torch, which takes its time on a busy machine.
        deadline = time.monotonic() + timeout
        prefix = f"run{next(self._runs)}"
        used_up = set(range(world_size))
        try:
            for rank, process in ranks.items():
                job = RankJob(fn, args, rank, world_size, prefix, backend, group_timeout_s, seed, allow_warnings)
                # The job is pickled by itself so that the rank can set sys.path before it imports `fn`.
                process.send((sys.path, pickle.dumps(job)))
            answers, failures = self._collect(ranks, deadline, settle_s)
            results = {rank: pickle.loads(answer.value) for rank, answer in answers.items() if answer.value}
            for rank, process in ranks.items():
                # The error has the log of a stuck or dead rank already.
                if rank not in failures or failures[rank].error_type:
                    process.show_log()
            if failures:
                raise RankError(failures, results)
            used_up = self._clean_up(ranks, deadline=time.monotonic() + clean_s)
            return [results[rank] for rank in range(world_size)]
        finally:
            for rank in used_up:
                self._ranks.pop(rank).kill()

    def close(self) -> None:
        """End all ranks. The pool can be used again and starts new ones."""
        while self._ranks:
            self._ranks.popitem()[1].kill()
        self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._log_dir.cleanup()

    def _start(self, world_size: int) -> dict[int, _Rank]:
        if self._store is None:
            # It lives here and not on a rank, because it has to outlive ranks that are killed.
            self._store = dist.TCPStore(_LOCALHOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            held = self._ranks.get(rank)
            if held is not None and not held.process.is_alive():
                held.kill()
                held = None
            if held is None:
                log_path = os.path.join(self._log_dir.name, f"rank{rank}.log")
                self._ranks[rank] = _Rank(self._context, self._store.port, self._secret, log_path)
        return {rank: self._ranks[rank] for rank in range(world_size)}

    def _collect(
        self, ranks: dict[int, _Rank], deadline: float, settle_s: float
    ) -> tuple[dict[int, Answer], dict[int, RankFailure]]:
        """Wait for every rank's answer. Failures are in the order in which they came, but deaths before all others.

        A rank that dies is a cause: others raise because they lose their connections to it, and may be heard first.
        """
        answers: dict[int, Answer] = {}
        died: dict[int, RankFailure] = {}
        failures: dict[int, RankFailure] = {}
        waiting = dict(ranks)
        while waiting:
            by_source: dict[Any, int] = {}
            for rank, process in waiting.items():
                by_source[process.conn] = rank
                by_source[process.process.sentinel] = rank
            ready = wait(list(by_source), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(self._stuck(waiting))
                break
            for rank in sorted({by_source[source] for source in ready}):
                answer = waiting.pop(rank).receive()
                if answer is None:
                    died[rank] = self._died(rank, ranks[rank])
                elif answer.ok:
                    answers[rank] = answer
                else:
                    failures[rank] = RankFailure(rank, answer.error_type, answer.message, answer.traceback)
            if died or failures:
                deadline = min(deadline, time.monotonic() + settle_s)
                settle_s = float("inf")
        return answers, died | failures

    def _stuck(self, waiting: dict[int, _Rank]) -> dict[int, RankFailure]:
        for process in waiting.values():
            process.abort()
        deadline = time.monotonic() + _STACKS_S
        for process in waiting.values():
            process.process.join(max(0.0, deadline - time.monotonic()))
        return {
            rank: RankFailure(rank, "", "stuck: it gave no answer in time", process.log_tail())
            for rank, process in waiting.items()
        }

    def _died(self, rank: int, process: _Rank) -> RankFailure:
        process.process.join(_DEATH_S)
        code = process.process.exitcode
        return RankFailure(rank, "", f"its process ended (exit code {code})", process.log_tail())

    def _clean_up(self, ranks: dict[int, _Rank], *, deadline: float) -> set[int]:
        """Have the ranks drop their groups. Return those that could not, and must be replaced."""
        for process in ranks.values():
            process.send(CLEAN_UP)
        dirty = set()
        for rank, process in ranks.items():
            if not process.conn.poll(max(0.0, deadline - time.monotonic())) or process.receive() != CLEAN:
                dirty.add(rank)
        return dirty


class _Rank:
    """A rank process as the parent holds it."""

    def __init__(
        self, context: multiprocessing.context.ForkServerContext, store_port: int, secret: str, log_path: str
    ) -> None:
        self.conn: Connection
        self.conn, theirs = context.Pipe()
        self._log_path = log_path
        self._log_seen = os.path.getsize(log_path) if os.path.exists(log_path) else 0
        self.process: ForkServerProcess = context.Process(
            target=rank_main, args=(theirs, _LOCALHOST, store_port, secret, log_path), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        # This is plain pickle on purpose: multiprocessing's would pass tensors as handles, which die with the rank.
        # A rank that has died is found out, and reported, when its answer is awaited.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.conn.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """Its next message, or None if it died."""
        try:
            return pickle.loads(self.conn.recv_bytes()) if self.conn.poll(0) else None
        except (EOFError, OSError):
            return None

    def abort(self) -> None:
        """Have it write the stacks of its threads and die."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGABRT)

    def log_tail(self) -> str:
        """What it printed in this run."""
        if not os.path.exists(self._log_path):
            return ""
        with open(self._log_path, encoding="utf-8", errors="replace") as log:
            log.seek(self._log_seen)
            return log.read()[-_LOG_TAIL_CHARS:]

    def show_log(self) -> None:
        """Print what it printed in this run, so that pytest files it under the right test."""
        if os.path.exists(self._log_path) and os.path.getsize(self._log_path) > self._log_seen:
            print(self.log_tail(), end="")
            self._log_seen = os.path.getsize(self._log_path)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.conn.close()
