"""An exception that ends a rank's program reaches the others, wherever it was raised."""

from __future__ import annotations

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
from paceline.control import last_words, own_files
from paceline.errors import PeerFailedError, RankLostError, StateError
from tests.control._common import BUSY_S
from tests.on_ranks import on_ranks

Ranks = Callable[..., list[Any]]


class LossError(RuntimeError):
    pass


class _FailingLoss(torch.autograd.Function):
    """Fails in backward, before that has reached the module."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise LossError("the loss has no gradient here")


def _train(rank: int, world_size: int, where: str) -> str:
    ddp = DDP(nn.Linear(3, 3))
    ddp(torch.ones(2, 3)).sum().backward()
    out = ddp(torch.ones(2, 3))
    if rank == 1:
        try:
            if where == "loader":
                raise LossError("no such file")
            if where == "module":
                ddp.module.weight.register_hook(_raise)
            (out.sum() if where == "module" else _FailingLoss.apply(out)).backward()
        except LossError as error:
            # What the interpreter does with an exception that nobody catches; the process goes on, which is the
            # harder case: no closed connection tells the others.
            sys.excepthook(type(error), error, error.__traceback__)
        return "raised"
    start = time.monotonic()
    with pytest.raises(PeerFailedError) as caught:
        out.sum().backward()
    # Far from the group's time-out.
    assert time.monotonic() - start < BUSY_S
    assert caught.value.rank == 1
    return str(caught.value)


def _raise(grad: torch.Tensor) -> None:
    raise LossError("a hook on the weight")


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("loader", "LossError: no such file"),
        ("loss", "LossError: the loss has no gradient here"),
        ("module", "LossError: a hook on the weight"),
    ],
)
def test_the_others_hear_of_an_exception_that_ends_a_program(ranks: Ranks, where: str, told: str) -> None:
    message, _ = ranks(_train, where, group_timeout_s=600, timeout=120)
    assert told in message
    assert "rank 1" in message


@on_ranks()
def test_an_error_that_others_caused_is_not_told_again(rank: int, world_size: int) -> None:
    ddp = DDP(nn.Linear(3, 3))
    dist.barrier()
    if rank == 0:
        error = RankLostError("another rank is gone")
        sys.excepthook(type(error), error, None)
    dist.barrier()
    assert ddp._reducer.channel.news() is None


def test_the_hook_that_was_there_is_called_even_if_telling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(last_words, "_hook", None)
    monkeypatch.setattr(own_files, "keep", False)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: seen.append(error))
    speakers = [mock.Mock(), mock.Mock()]
    speakers[0].report.side_effect = OSError("the store is gone")
    for speaker in speakers:
        last_words.speak_for(speaker)
    error = ValueError("boom")
    sys.excepthook(ValueError, error, None)
    assert seen == [error]
    # Two speakers, one hook.
    speakers[1].report.assert_called_once_with("its program", error, final=True)


def test_all_wrappers_together_linger_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    speakers = [mock.Mock() for _ in range(3)]
    monkeypatch.setattr(last_words, "_speakers", speakers)
    monkeypatch.setattr(own_files, "keep", False)
    monkeypatch.setattr("atexit.register", lambda function: None)
    last_words._chain(lambda *args: None)(PeerFailedError, PeerFailedError("", rank=1), None)
    (lingered,) = {str(speaker.mock_calls) for speaker in speakers}
    # They hear one deadline, and no report: this error is an echo.
    assert lingered.startswith("[call.linger(1, deadline=")


PROGRAM = """
import os, signal, sys, time, torch, paceline
what, backend = sys.argv[1:]
world = paceline.init(backend=backend)

def train():
    paceline.DDP(torch.nn.Linear(4, 2 + world.rank * (what == "mismatch")))
    ddp = paceline.DDP(torch.nn.Linear(4, 2))
    ddp(torch.ones(1, 4)).sum().backward()
    if what == "all" or world.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    ddp(torch.ones(1, 4)).sum().backward()

train()
"""


def _run_program(tmp_path: Path, what: str, backend: str) -> tuple[int, list[str]]:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "train", "--script", str(program), what, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUSY_S * 2)
    # What every rank has written itself; the launcher's own words are tested elsewhere.
    return done.returncode, [line for line in done.stderr.splitlines() if "[rank0]:" in line or "[rank1]:" in line]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.full), "cpu:shm"])
def test_a_ctrl_c_on_one_rank_is_news_for_the_others(tmp_path: Path, backend: str) -> None:
    _, told = _run_program(tmp_path, "one", backend)
    assert [line for line in told if "[rank1]:" in line] == [
        f"  [rank 1] [rank1]: KeyboardInterrupt: at {tmp_path}/train.py:11 in train"
    ]
    (error,) = [line for line in told if line.startswith("[rank0]: paceline.errors")]
    assert "PeerFailedError: rank 1 raised in its program: KeyboardInterrupt (" in error


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.full), "cpu:shm"])
def test_a_ctrl_c_on_all_ranks_is_one_line_for_each(tmp_path: Path, backend: str) -> None:
    status, told = _run_program(tmp_path, "all", backend)
    assert status == 128 + signal.SIGINT
    said = f"KeyboardInterrupt: at {tmp_path}/train.py:11 in train"
    assert told == [f"[rank0]: {said}", f"  [rank 1] [rank1]: {said}"]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.full), "cpu:shm"])
def test_a_mismatch_is_shown_once_and_with_the_users_frames_only(tmp_path: Path, backend: str) -> None:
    _, told = _run_program(tmp_path, "mismatch", backend)
    assert "\n".join(told).count("Ranks were given different") == 1
    files = [line for line in told if " File " in line]
    assert len(files) == 2
    assert all(f'File "{tmp_path}/train.py"' in line for line in files)
    assert told[-1].endswith("ParameterMismatchError: Rank 0 raises the same error, and shows it.")


def test_what_the_user_has_seen_of_the_causes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "keep", False)
    shown: list[BaseException] = []
    hook = last_words._chain(lambda kind, error, traceback: shown.append(error))
    try:
        try:
            raise KeyError("the user's own")
        except KeyError:
            # Our own code raises like this for an error of a backend, which no frame of the user's has seen.
            error = StateError("ours")
            error.__context__ = error.__cause__ = RuntimeError("a backend's")
            error.__cause__.__context__ = sys.exception()
            raise error  # noqa: B904
    except StateError as raised:
        hook(type(raised), raised, raised.__traceback__)
    assert shown[0].__cause__ is None
    assert isinstance(shown[0].__context__, KeyError)
    assert not shown[0].__suppress_context__


def test_causes_that_lead_back_to_the_error_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "keep", False)
    shown: list[BaseException] = []
    hook = last_words._chain(lambda kind, error, traceback: shown.append(error))
    backend, error = RuntimeError("a backend's"), StateError("ours")
    error.__context__, backend.__context__ = backend, error
    hook(type(error), error, None)
    assert shown == [error]
    assert error.__context__ is None


def test_importing_leaves_the_hook_alone() -> None:
    code = "import sys, paceline; print(sys.excepthook is sys.__excepthook__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "True"
