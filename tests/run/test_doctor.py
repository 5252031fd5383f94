"""``paceline doctor``: what it shows of the jobs whose files it finds."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import Channel
from paceline.run import cli
from paceline.run.doctor import doctor

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
