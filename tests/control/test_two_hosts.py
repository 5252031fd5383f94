"""Failure is news between hosts as well, where nobody sees the other's processes."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.errors import PeerError
from tests.control._common import BUSY_S
from tests.transport._hosts import Hosts
from tests.transport.requirements import needs_hosts

# 2 seconds are promised; the machine may be busy.
HEARD_WITHIN_S = 2.0 + BUSY_S
BACKENDS = ("gloo", "cpu:shm")
_wrapped: dict[str, DDP] = {}


def _wrap(rank: int, size: int, name: str, backend: str) -> None:
    ddp = _wrapped[name] = DDP(nn.Linear(4, 2), process_group=dist.new_group(backend=backend))
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()


def _raise(rank: int, size: int, name: str) -> list[Any] | None:
    """The program of rank 3 ends with an exception; its process stays: no closed connection tells the others."""
    if rank == 3:
        try:
            raise ValueError("no such file")
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return None
    return _hear(rank, size, name)


def _hear(rank: int, size: int, name: str) -> list[Any]:
    start = time.monotonic()
    try:
        _wrapped[name](torch.ones(2, 4)).sum().backward()
    except PeerError as error:
        return [type(error).__name__, error.rank, str(error), time.monotonic() - start]
    raise AssertionError("no error")


def test_ranks_of_other_hosts_hear_of_one_that_raises_and_of_one_that_is_killed() -> None:
    needs_hosts()
    with Hosts(2, ranks_per_host=2) as hosts:
        for backend in BACKENDS:
            hosts.run(__name__, "_wrap", f"raises {backend}", backend)
            for kind, rank, told, took_s in hosts.run(__name__, "_raise", f"raises {backend}")[:3]:
                assert (kind, rank) == ("PeerFailedError", 3), told
                assert "ValueError: no such file" in told
                assert "test_two_hosts.py:" in told
                assert took_s < HEARD_WITHIN_S
        for backend in BACKENDS:
            hosts.run(__name__, "_wrap", f"killed {backend}", backend)
        hosts.kill(3)
        for backend in BACKENDS:
            # Rank 2, of the other host, is busy and does not wait for anybody: it is not the one that is gone.
            for kind, rank, told, took_s in hosts.run(__name__, "_hear", f"killed {backend}", ranks=[0, 1]):
                assert (kind, rank) == ("RankLostError", 3), told
                assert took_s < HEARD_WITHIN_S
