"""``paceline doctor``: what it shows of the jobs whose files it finds."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import Channel, jobs, stacks
from paceline.control.progress import Progress
from paceline.run import cli
from paceline.run.doctor import doctor, verdicts

Ranks = Callable[..., list[Any]]


def _two_groups(rank: int, size: int, base: str) -> tuple[str, str]:
    seen = io.StringIO()
    with mock.patch.dict(os.environ, PACELINE_JOB_DIR=base):
        ddp = DDP(nn.Linear(2, 2))
        other = Channel(dist.new_group())
        ddp(torch.ones(1, 2)).sum().backward()
        dist.barrier()
        if rank == 0:
            doctor(out=seen)
        dist.barrier()
    return seen.getvalue(), other.job[:8]


def test_the_doctor_shows_the_channels_of_all_groups_of_the_newest_ranks(ranks: Ranks, tmp_path: Path) -> None:
    told, other = ranks(_two_groups, str(tmp_path))[0]
    assert "\nwrapper 1: 2 ranks, of which 2 have files here" in told
    assert f"\nwrapper 1 of group {other}: 2 ranks, of which 2 have files here" in told
    assert "all-reduce of bucket 0" in told


def test_jobs_are_listed_with_script_and_start_and_never_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_JOB_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["/home/me/train.py"])
    kept = []
    for name in "ab":
        directory = jobs.make_directory(name * 32)
        assert directory is not None
        kept.append(Progress(directory, rank=0, size=2, wrapper=1))
    assert cli.main(["doctor"]) == 0
    told = capsys.readouterr().out
    today = time.strftime("%Y-%m-%d", time.localtime(kept[0].path.stat().st_mtime))
    for name in "ab":
        assert f"job {tmp_path / (name * 32)}: /home/me/train.py, started {today} " in told
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert cli.main(["doctor"]) == 0
    assert "No job runs" in capsys.readouterr().out
    assert cli.main(["doctor", str(tmp_path / ("a" * 32))]) == 1


def test_a_report_of_a_hang_outlives_the_ctrl_c_that_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(tmp_path, rank=0, size=1, wrapper=1)
    progress.note_report("Rank 0 has waited 30 s in the all-reduce of bucket 0.\n  rank 0: here")
    progress.fail("rank 0 raised in its program: KeyboardInterrupt: at train.py:3 in step")
    monkeypatch.setattr("paceline.run.doctor.process_state", lambda process: "gone")
    monkeypatch.setattr("paceline.control.whereabouts.process_state", lambda process: "gone")
    (told,) = verdicts(tmp_path)
    assert told == "last report: Rank 0 has waited 30 s in the all-reduce of bucket 0.\n  rank 0: here"
    progress.fail("rank 0 raised in its program: ValueError: a: long: story")
    assert verdicts(tmp_path) == ["first cause: rank 0 raised in its program: ValueError"]


def test_the_users_thread_comes_first() -> None:
    library = f'Thread 0x1 (most recent call first):\n  File "{os.__file__}", line 1 in wait'
    main = f'Current thread 0x2 (most recent call first):\n  File "{__file__}", line 3 in train'
    told = stacks.user_thread_first(f"{main}\n\n{library}\n")
    assert told.splitlines() == [*main.splitlines(), *library.splitlines()]
    assert stacks.user_thread_first(f"{library}\n\n{main}\n") == told
    assert stacks.user_line(told) == f"{__file__}:3 in train"


PROGRAM = """
import os, signal, sys, torch, paceline
world = paceline.init(hang_after_s=0.5)
ddp = paceline.DDP(torch.nn.Linear(4, 2))
ddp(torch.ones(1, 4)).sum().backward()
if world.rank == 1 and sys.argv[1] == "raise":
    raise ValueError("a bad batch")
if world.rank == 1:
    def stuck():
        while True:
            signal.pause()
    stuck()
ddp(torch.ones(1, 4)).sum().backward()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_JOB_DIR", str(tmp_path / "jobs"))
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_a_launched_job_that_dies_says_of_what(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--script", str(program), "raise"]) == 1
    told = capfd.readouterr().err.splitlines()
    assert told[-2] == "paceline: first cause: rank 1 raised in its program: ValueError"
    assert told[-1].startswith(f"paceline: for more: python -m paceline doctor {program.parent / 'jobs'}")


@pytest.mark.full
def test_a_hang_that_a_ctrl_c_ended_can_still_be_read_about(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "paceline", "train", "--script", str(program), "hang"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if "Rank 1 has not started" in line:
                launcher.send_signal(signal.SIGINT)
                break
        told = launcher.stderr.read()
    assert launcher.returncode == 128 + signal.SIGINT
    last = told.partition("paceline: last report: ")[2]
    assert "Rank 1 has not started broadcast of the order of buckets" in last
    assert "in stuck" in last
    assert cli.main(["doctor"]) == 0
    assert "Rank 1 has not started broadcast of the order of buckets" in capfd.readouterr().out


def test_the_doctor_without_patients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_JOB_DIR", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    assert "No job runs" in capsys.readouterr().out
    (tmp_path / ("a" * 32)).mkdir(mode=0o700)
    (tmp_path / ("a" * 32) / "wrapper1.rank0").write_bytes(b"garbage")
    assert cli.main(["doctor"]) == 1
    assert "holds no files" in capsys.readouterr().out
