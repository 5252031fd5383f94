"""``paceline.spawn``: ranks without a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import BadArgumentError, BadTypeError, PeerFailedError, RankLostError
from paceline.run import spawn as spawn_module


def _train(out: str, how: str) -> None:
    world = paceline.init()
    ddp = paceline.DDP(torch.nn.Linear(4, 2))
    ddp(torch.ones(1, 4)).sum().backward()
    if world.rank == 1 and how == "raise":
        raise ValueError("no such file")
    if world.rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        raise SystemExit(world.rank * 3)
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    (Path(out) / str(world.rank)).write_text(f"{world.backend} {int(total)}", encoding="ascii")


def test_a_function_is_called_on_all_ranks(tmp_path: Path) -> None:
    before = dict(os.environ)
    paceline.spawn(_train, 2, str(tmp_path), "")
    assert [(tmp_path / str(rank)).read_text(encoding="ascii") for rank in (0, 1)] == ["cpu:shm 3"] * 2
    assert dict(os.environ) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("raise", PeerFailedError, "rank 1 raised:\n\nTraceback"),
        pytest.param("die", RankLostError, "rank 1 was killed by signal 9, and said nothing", marks=pytest.mark.full),
        pytest.param("exit", RankLostError, "rank 1 ended with exit code 3", marks=pytest.mark.full),
    ],
)
def test_the_first_cause_is_raised(tmp_path: Path, how: str, error: type[RankLostError], said: str) -> None:
    with pytest.raises(error) as caught:
        paceline.spawn(_train, 2, str(tmp_path), how)
    assert str(caught.value).startswith(said)
    assert caught.value.rank == 1
    if how == "raise":
        assert "ValueError: no such file" in str(caught.value)


@pytest.mark.parametrize(
    ("fn", "nproc", "error", "said"),
    [
        ("train", 2, BadTypeError, "fn must be a function, got str"),
        (print, 2.0, BadTypeError, "nproc must be a whole number, got float"),
        (print, True, BadTypeError, "nproc must be a whole number, got bool"),
        (print, 0, BadArgumentError, "nproc must be at least 1, got 0"),
    ],
)
def test_bad_arguments_start_nothing(fn: object, nproc: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        paceline.spawn(fn, nproc)  # type: ignore[arg-type]


def test_the_cause_comes_before_its_echoes() -> None:
    with pytest.raises(PeerFailedError, match="rank 2 raised:\n\nthe cause") as caught:
        spawn_module._raise_first([1, -15, 1], [b"~an echo", b"", b"!the cause"])
    assert caught.value.rank == 2
    with pytest.raises(RankLostError, match="rank 1 was killed by signal 9"):
        spawn_module._raise_first([1, -9], [b"~an echo", b""])
    with pytest.raises(PeerFailedError, match="rank 0 raised:\n\nan echo"):
        spawn_module._raise_first([1, 0], [b"~an echo", b""])
    spawn_module._raise_first([0, 0], [b"", b""])


# What a notebook looks like from here: its functions are in ``__main__``, which has no file.
NOTEBOOK = """
import torch, paceline
from paceline.errors import StateError
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
def train(steps):
    world = paceline.init()
    ddp = paceline.DDP(torch.nn.Linear(400, 400))
    for _ in range(steps):
        ddp(torch.ones(200, 400)).sum().backward()
    if world.rank == 0:
        print("trained", world.world_size, flush=True)
paceline.spawn(train, 2, 3)
paceline.init(device="cpu")
try:
    paceline.spawn(train, 2, 3)
except StateError as error:
    print(error)
paceline.shutdown()
"""


def test_a_function_of_a_notebook_is_started_in_forks() -> None:
    done = subprocess.run([sys.executable, "-"], input=NOTEBOOK, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "trained 2"
    assert "Call paceline.shutdown() first" in second
