"""Ranks for the kernel's tests: real processes with a control segment between them, and nothing else of torch's.

Processes come from a fork server that has imported torch once, so that a test may use up (kill) as many as it likes.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.transport.shm.kernel import Endpoint, control_nbytes

TIMEOUT_S = 60.0
_SHM = Path("/dev/shm")

Program = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """How a rank's program ended."""

    rank: int
    value: Any = None
    # Of an exception: its class's name, its message, the rank it blames, how long the program ran.
    error: str | None = None
    message: str = ""
    blamed: int | None = None
    seconds: float = 0.0
    # Of a process that ended without a word.
    exit_code: int | None = None


class Segment:
    """A file in shared memory, mapped."""

    def __init__(self, path: Path, nbytes: int, *, create: bool) -> None:
        self.nbytes = nbytes
        self.fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0) | os.O_CLOEXEC, 0o600)
        if create:
            os.posix_fallocate(self.fd, 0, nbytes)
        self.map = mmap.mmap(self.fd, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


@contextmanager
def segment_path() -> Iterator[Path]:
    path = _SHM / f"kernel-test-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@dataclass
class Rank:
    """What a program is given."""

    endpoint: Endpoint
    rank: int
    size: int
    control: Segment

    def settle(self) -> None:
        """Wait until every rank has come here."""
        self.endpoint.barrier(timeout_s=TIMEOUT_S, inline=True).wait()


def _run(program: Program, rank: int, size: int, path: Path, answers: Connection, kwargs: dict[str, Any]) -> None:
    begin = time.monotonic()
    try:
        nbytes = control_nbytes(size)
        control = Segment(path, nbytes, create=False)
        endpoint = Endpoint(
            address=control.address, nbytes=nbytes, fd=control.fd, rank=rank, size=size, create=rank == 0,
            names=[10 + r for r in range(size)],
        )  # fmt: skip
        answers.send("joined")
        assert answers.recv() == "go"
        begin = time.monotonic()
        value = program(Rank(endpoint, rank, size, control), **kwargs)
        endpoint.close()
        answers.send(Outcome(rank, value=value))
    except BaseException as error:
        if type(error).__module__ != "paceline.errors":
            traceback.print_exc()
        answers.send(
            Outcome(
                rank,
                error=type(error).__name__,
                message=str(error),
                blamed=getattr(error, "rank", None),
                seconds=time.monotonic() - begin,
            )
        )
    finally:
        answers.close()


class RankRunner:
    """Runs programs on fresh ranks."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.transport.programs"])

    def __call__(self, size: int, program: Program, **kwargs: Any) -> list[Outcome]:
        """Each rank's outcome; a rank that is killed has an exit code and nothing else."""
        with segment_path() as path:
            Segment(path, control_nbytes(size), create=True).map  # noqa: B018
            started = []
            for rank in range(size):
                ours, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=_run, args=(program, rank, size, path, theirs, kwargs), daemon=True
                )
                process.start()
                theirs.close()
                started.append((process, ours))
                # The rank that makes the header has to be through before others look at it.
                first = ours.recv()
                if first != "joined":
                    process.join()
                    return [first]
            for _, ours in started:
                ours.send("go")
            return [self._outcome(rank, process, ours) for rank, (process, ours) in enumerate(started)]

    def _outcome(self, rank: int, process: Any, ours: Connection) -> Outcome:
        with suppress(EOFError, ConnectionResetError):
            # A rank that is stopped says nothing; it is the last to be asked and can only be killed.
            while not ours.poll(0.05):
                if _is_stopped(process.pid):
                    process.kill()
            outcome: Outcome = ours.recv()
            process.join()
            return outcome
        process.join()
        return Outcome(rank, exit_code=process.exitcode)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def values(outcomes: list[Outcome]) -> list[Any]:
    """What programs returned, all of which went well."""
    for outcome in outcomes:
        assert outcome.error is None, f"rank {outcome.rank}: {outcome.error}: {outcome.message}"
        assert outcome.exit_code is None, f"rank {outcome.rank} ended with {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]


class _Notices(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def notices() -> Iterator[list[str]]:
    """What the package warns of."""
    handler = _Notices()
    logging.getLogger("paceline").addHandler(handler)
    try:
        yield handler.said
    finally:
        logging.getLogger("paceline").removeHandler(handler)
