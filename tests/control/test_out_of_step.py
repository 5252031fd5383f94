"""Ranks that do not do the same: at the end, the one that is out of step is named, with what it did instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import hang
from paceline.errors import LoneForwardError, RankLostError
from paceline.settings import HangWatch
from tests.control._common import group_store

Ranks = Callable[..., list[Any]]
BACKENDS = ["gloo", "cpu:shm"]
TIMEOUT_S = 3.0


def _until_told() -> None:
    group_store().wait(["told"], timedelta(seconds=120))


def _skip_a_step(rank: int, size: int, mode: str) -> str:
    """Rank 1 leaves out a backward. Nobody notices until it has one fewer in the end."""
    # At the time-out the watch has not looked yet, because it looks after half a minute.
    answer_s = hang.ANSWER_S if mode == "off" else 20.0
    with mock.patch.object(hang, "_settings", HangWatch(mode)), mock.patch.object(hang, "ANSWER_S", answer_s):
        ddp = DDP(nn.Linear(4, 2))
        for step in range(5):
            loss = ddp(torch.ones(1, 4)).sum()
            if (rank, step) == (1, 2):
                continue
            if (rank, step) == (0, 4):
                with pytest.raises(RankLostError) as caught:
                    loss.backward()
                group_store().set("told", "")
                assert type(caught.value) is RankLostError
                assert caught.value.rank == 1
                return str(caught.value)
            loss.backward()
        _until_told()
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_the_time_out_a_rank_that_skipped_a_step_is_named_with_its_line(ranks: Ranks, backend: str) -> None:
    told, _ = ranks(_skip_a_step, "observe", backend=backend, group_timeout_s=TIMEOUT_S, timeout=120, clean_s=1)
    assert "(the group's time-out) in the all-reduce of bucket 0" in told
    assert "Rank 1 has not started all-reduce of bucket 0" in told
    assert "in _until_told." in told
    assert "Rank 1 has run as many forwards as rank 0 (5), but one backward fewer (4 instead of 5)" in told


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_watch_the_rank_that_does_not_wait_is_named_at_least(ranks: Ranks, backend: str) -> None:
    told, _ = ranks(_skip_a_step, "off", backend=backend, group_timeout_s=TIMEOUT_S, timeout=120, clean_s=1)
    assert "rank 1 says nothing." in told
    assert "rank 1: it does not say where it is; with hang_watch='observe' it would" in told


def _evaluate_alone(rank: int, size: int) -> str:
    """Rank 1 evaluates while rank 0, whose buffers it wants, does something else."""
    ddp = DDP(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    ddp(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    if rank == 0:
        _until_told()
        return ""
    ddp.eval()
    with mock.patch.object(hang, "ANSWER_S", 20.0), pytest.raises(LoneForwardError) as caught, torch.no_grad():
        ddp(torch.ones(2, 4))
    group_store().set("told", "")
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_evaluates_alone_is_told_how_to(ranks: Ranks, backend: str) -> None:
    _, told = ranks(_evaluate_alone, backend=backend, group_timeout_s=TIMEOUT_S, timeout=120, clean_s=1)
    assert "in _until_told." in told
    assert "call ddp.module(x) there" in told


PROGRAM = """
import sys, torch, paceline
what, backend = sys.argv[1:]
world = paceline.init(backend=backend)
module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
ddp = paceline.DDP(module, broadcast_buffers=what == "eval")
for _ in range(3 + world.rank * (what != "eval")):
    ddp(torch.ones(2, 4)).sum().backward()
if what == "eval" and world.rank == 1:
    ddp.eval()
    ddp(torch.ones(2, 4))
if what == "shutdown":
    paceline.shutdown()
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("end", "RankLostError: Rank 0 finished after 3 backwards, and this is the 4th of rank 1. If ranks have"),
        ("shutdown", "RankLostError: Rank 0 finished after 3 backwards, and this is the 4th of rank 1. If ranks have"),
        ("eval", "LoneForwardError: Rank 0 has finished, and rank 1 alone called the wrapper's forward. To evaluate"),
    ],
)
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.full), "cpu:shm"])
def test_a_rank_that_goes_on_when_the_others_have_finished_is_told_so(
    tmp_path: Path, what: str, said: str, backend: str
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "train", "--script", str(program), what, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert said in done.stderr
