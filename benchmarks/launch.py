"""Starts the rank processes of a run, hands on what rank 0 reports, and leaves no process behind."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from paceline.settings import SECRET


class RankFailedError(RuntimeError):
    """A rank process ended with an error; its own message is on stderr."""


class Settings(Protocol):
    """What a rank process needs to know before it reads the rest of its settings."""

    @property
    def world_size(self) -> int: ...

    @property
    def threads(self) -> int: ...

    def to_json(self) -> str: ...


def run(settings: Settings, on_event: Callable[[dict[str, Any]], None], *, program: str = "benchmarks.ranks") -> None:
    """Start the ranks, hand on what rank 0 reports, and leave no process behind.

    `program` is the module that each rank runs; it begins with `ranks.joined`.
    """
    # Handing rank 0 a socket that already listens avoids racing others for a free port.
    listener = socket.create_server(("127.0.0.1", 0))
    reader, writer = os.pipe()
    ranks: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(settings.threads),
        "KINETO_LOG_LEVEL": "9",  # the profiler logs each start and stop otherwise
        "HF_HUB_OFFLINE": "1",
        # Without a secret, ranks do not load what another has compiled.
        SECRET: secrets.token_hex(32),
    }
    try:
        for rank in range(settings.world_size):
            # Descriptors are inherited by rank 0 alone, which hosts the store and reports.
            inherited = (listener.fileno(), writer) if rank == 0 else ()
            ranks.append(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", program, str(rank)),
                        *(str(listener.getsockname()[1]), str(listener.fileno()), str(writer)),
                        settings.to_json(),
                    ],
                    pass_fds=inherited,
                    env=environment,
                    cwd=Path(__file__).resolve().parent.parent,
                )
            )
        listener.close()
        os.close(writer)
        for line in _lines(reader, ranks):
            on_event(json.loads(line))
        for rank, process in enumerate(ranks):
            if process.wait(timeout=60):
                raise RankFailedError(f"rank {rank} ended with status {process.returncode}")
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
        os.close(reader)


def _lines(reader: int, ranks: list[subprocess.Popen[bytes]]) -> Iterator[str]:
    pending = b""
    while True:
        ready, _, _ = select.select([reader], [], [], 1.0)
        if ready:
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                return
            *complete, pending = (pending + chunk).split(b"\n")
            yield from (line.decode() for line in complete)
        for rank, process in enumerate(ranks):
            # The others would wait for a dead rank until the group's time-out.
            if process.poll():
                raise RankFailedError(f"rank {rank} ended with status {process.returncode}")
