"""The rank that holds the store is stopped or killed: nobody waits for ever, and the others name it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DDP
from paceline.control import Channel, store_thread
from paceline.errors import RankLostError, StoreSilentError
from paceline.testing import RankError
from tests.control._common import BUSY_S

Ranks = Callable[..., list[Any]]
# More than the time-outs inside, which say more about what is stuck.
pytestmark = pytest.mark.timeout(400)

GROUP_TIMEOUT_S = 4.0
ROWS: list[list[Any]] = [["a", [2, 3]]]


def _join(rank: int, size: int, directory: str, *, timeout_s: float = 600) -> tuple[int, Any]:
    """A group whose store is in rank 0, as it is without a launcher.

    Returns the number of that rank's process, and a store that does without it: a file.
    """
    beside: Any = dist.FileStore(f"{directory}/beside", -1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.mkfifo(f"{directory}/pipe")
        beside.set("host", f"{store.port} {os.getpid()}")
    port, pid = map(int, beside.get("host").split())
    if rank != 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    return pid, beside


def _wait_for_end(directory: str, size: int) -> None:
    """On rank 0, which may be stopped or killed meanwhile: wait until all others have seen what came of it."""
    # This waits for a pipe and not for the store's file, which it would keep locked.
    pipe = os.open(f"{directory}/pipe", os.O_RDWR)
    for _ in range(size - 1):
        os.read(pipe, 1)
    os.close(pipe)


def _meet(beside: Any, rank: int, size: int, word: str) -> None:
    """All ranks but 0 have come here."""
    beside.set(f"{word}{rank}", "")
    beside.wait([f"{word}{other}" for other in range(1, size)], timedelta(seconds=120))


def _strike(beside: Any, rank: int, size: int, host: int, signum: signal.Signals) -> None:
    """Rank 0 gets a signal, when all others are ready."""
    _meet(beside, rank, size, "ready")
    if rank == 1:
        os.kill(host, signum)
    _meet(beside, rank, size, "struck")


def _step(ddp: nn.Module) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def _compile() -> None:
    with paceline.compiler.agreement(True):
        torch.compile(torch.sin, backend="eager")(torch.ones(3))


def _wait_for_host(line: Channel, ddp: nn.Module | None, where: str) -> None:
    if ddp is not None:
        _step(ddp)
    elif where == "compiling":
        _compile()
    else:
        line.compare("parameters", ROWS, ["name", "shape"])


def _stopped(rank: int, size: int, directory: str, where: str) -> dict[str, Any]:
    host, beside = _join(rank, size, directory, timeout_s=GROUP_TIMEOUT_S if where == "compiling" else 600)
    ddp = DDP(nn.Linear(4, 2)) if where == "training" else None
    line = ddp.channel if ddp is not None else Channel(dist.group.WORLD)
    # Before it is stopped, rank 0 has said which process it is: its channel does that. (This is no barrier, in which it
    # could be stopped.)
    if rank == 0:
        beside.set("signed", "")
    beside.wait(["signed"], timedelta(seconds=120))
    for _ in range(2):
        if ddp is not None:
            _step(ddp)
    if where == "compiling":
        _compile()
    if rank == 0:
        _wait_for_end(directory, size)
        return {}
    # This is not set before, because on a busy machine the start may take longer than that. It is not set on rank 0
    # either, which may be stopped at the very end of its second step: more than this has passed when it goes on.
    line.timeout_s = GROUP_TIMEOUT_S
    _strike(beside, rank, size, host, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        _wait_for_host(line, ddp, where)
    took_s = time.monotonic() - start
    # Nobody waits here either: the store has been asked, and is silent.
    start = time.monotonic()
    line.report("forward", ValueError("something else"))
    line.give_up(0, "forward", "it is stopped")
    with pytest.raises(StoreSilentError):
        line.news()
    if where == "agreeing":
        # Nothing is under way that gloo would wait for.
        dist.destroy_process_group()
    told_s = time.monotonic() - start
    _meet(beside, rank, size, "heard")
    if rank == 1:
        os.kill(host, signal.SIGCONT)
    # It answers again.
    line.store_thread._overdue.exception(60)
    line.news()
    with open(f"{directory}/pipe", "wb") as pipe:
        pipe.write(b"x")
    return {"error": str(caught.value), "rank": caught.value.rank, "took_s": took_s, "told_s": told_s}


@pytest.mark.parametrize(("world_size", "where"), [(2, "training"), (3, "training"), (2, "agreeing"), (3, "agreeing")])
def test_a_stopped_host_is_named_at_the_groups_time_out(
    ranks: Ranks, tmp_path: Path, world_size: int, where: str
) -> None:
    told = ranks(
        _stopped, str(tmp_path), where, world_size=world_size, backend=None, timeout=180, settle_s=120, clean_s=1
    )
    for found in told[1:]:
        assert found["rank"] == 0
        assert "rank 0 is stopped (by SIGSTOP, or in a debugger)" in found["error"]
        assert "store does not answer" in found["error"]
        assert GROUP_TIMEOUT_S - 1 < found["took_s"] < GROUP_TIMEOUT_S + store_thread.ANSWER_S + BUSY_S
        assert found["told_s"] < store_thread.ANSWER_S + BUSY_S


@pytest.mark.full
def test_a_stopped_host_does_not_hold_up_ranks_that_compile_together(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(_stopped, str(tmp_path), "compiling", backend=None, timeout=180, settle_s=120, clean_s=1)[1]
    assert found["rank"] == 0
    assert "for rank 0, which is not compiling and did not come" in found["error"]
    assert found["took_s"] < GROUP_TIMEOUT_S + store_thread.ANSWER_S + BUSY_S


def _killed(rank: int, size: int, directory: str, where: str) -> dict[str, Any]:
    host, beside = _join(rank, size, directory)
    ddp = DDP(nn.Linear(4, 2))
    for _ in range(2):
        _step(ddp)
    if rank == 0:
        _wait_for_end(directory, size)
    _strike(beside, rank, size, host, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        _wait_for_host(ddp.channel, ddp if where == "training" else None, where)
    took_s = time.monotonic() - start
    start = time.monotonic()
    ddp.channel.report("forward", ValueError("something else"))
    told_s = time.monotonic() - start
    # Each has its error before one of them, ending, breaks a connection.
    _meet(beside, rank, size, "heard")
    return {"error": str(caught.value), "rank": caught.value.rank, "took_s": took_s, "told_s": told_s}


@pytest.mark.parametrize("where", ["training", "agreeing"])
def test_a_killed_host_is_named_at_once(ranks: Ranks, tmp_path: Path, where: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(_killed, str(tmp_path), where, world_size=3, backend=None, timeout=180, settle_s=120)
    assert sorted(caught.value.results) == [1, 2]
    for found in caught.value.results.values():
        assert found["rank"] == 0, found["error"]
        # 2 s, on a machine that is not busy.
        assert found["took_s"] < 2 + BUSY_S
        assert found["told_s"] < store_thread.ANSWER_S + BUSY_S


PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import paceline
from paceline import DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=600))
ddp = DDP(torch.nn.Linear(4, 2))
ddp(torch.ones(2, 4)).sum().backward()
print("trained", flush=True)
sys.stdin.readline()
raise ValueError("a bad file")
"""


def _start(rank: int, port: int) -> subprocess.Popen[str]:
    environ = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_a_program_ends_and_says_why_though_the_store_is_silent(free_port: int) -> None:
    programs = [_start(rank, free_port) for rank in range(2)]
    try:
        for program in programs:
            assert program.stdout.readline() == "trained\n"
        os.kill(programs[0].pid, signal.SIGSTOP)
        start = time.monotonic()
        _, said = programs[1].communicate("\n", timeout=120)
        took_s = time.monotonic() - start
        assert programs[1].returncode == 1, said
        assert "ValueError: a bad file" in said
        assert took_s < store_thread.ANSWER_S + store_thread.END_S + BUSY_S
        # It goes on, hears of it or sees that the other is gone, and ends.
        os.kill(programs[0].pid, signal.SIGCONT)
        _, said = programs[0].communicate("\n", timeout=120)
        assert programs[0].returncode == 1, said
        assert "ValueError: a bad file" in said
    finally:
        for program in programs:
            program.kill()
            program.communicate()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
