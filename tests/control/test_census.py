"""Who is who: what a host can say of the processes of other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.control import processes, progress
from paceline.control.board import Board
from paceline.control.census import Census
from paceline.control.hang import Inquiries
from paceline.control.processes import birth, process_state, this_host, this_process
from paceline.control.progress import Progress
from paceline.control.wire import MessageKind


def _board() -> Board:
    return Board(dist.HashStore(), name="job")


def _sign(board: Board, rank: int, pid: int, *, host: str = "") -> None:
    board.put(f"process/{rank}", MessageKind.PROCESS, pid, birth(pid), host or this_host())


def test_a_process_is_followed_to_its_end(process: subprocess.Popen[bytes]) -> None:
    board = _board()
    # The process is rank 1 of its group, and rank 7 among all.
    census = Census(board, ranks=[5, 7])
    inquiries = Inquiries(board, Progress(None, rank=0, size=2, wrapper=1), census, rank=0, size=2, directory=None)
    assert census.state(1) == ""
    _sign(board, 7, process.pid)
    assert census.state(1) == "running"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert census.state(1) == "stopped"
    assert (inquiries.gone(), inquiries.stopped(), inquiries.is_running(1)) == ([], [1], True)
    process.kill()
    process.wait()
    assert census.state(1) == "gone"
    assert (inquiries.gone(), inquiries.stopped(), inquiries.is_running(1)) == ([1], [], False)


def test_of_processes_elsewhere_nothing_is_said(process: subprocess.Popen[bytes]) -> None:
    board = _board()
    census = Census(board, ranks=range(3))
    _sign(board, 0, process.pid, host="another")
    board.store.set("process/1", "garbage")
    assert [census.state(rank) for rank in range(3)] == ["", "", ""]


def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_process()
    monkeypatch.setattr(processes, "_kernel", lambda: "another")
    assert this_host() != here.host
    assert process_state(here) == ""


def test_a_rank_is_missed_only_by_who_has_gone_further(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    own, other = (Progress(tmp_path, rank=rank, size=2, wrapper=1) for rank in range(2))
    for each in (own, other):
        each.start("all-reduce", "bucket 0", torch.ones(1))
    numbers = process.pid, birth(process.pid), 1, 2, 1, 0, 0.0
    progress._WHO.pack_into(other._memory, 0, progress.MAGIC, *numbers, this_host().encode(), b"train.py")
    board = _board()
    inquiries = Inquiries(board, own, Census(board, ranks=range(2)), rank=0, size=2, directory=tmp_path)
    own.start("all-reduce", "bucket 1", torch.ones(1))
    assert inquiries.missed() == []
    other.start("all-reduce", "bucket 1", torch.ones(1))
    process.kill()
    process.wait()
    # It ended, having done all that this rank has: maybe there was no more to do.
    assert inquiries.missed() == []
    own.start("all-reduce", "bucket 2", torch.ones(1))
    assert inquiries.missed() == [1]
