"""Agree: everybody learns the same of what everybody brought, or who is missing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import Agreement, Channel, hang, sign_in
from paceline.control.agree import WORD_LIMIT_BYTES, Line
from paceline.control.board import Board
from paceline.control.store_line import StoreLine
from paceline.control.tensor_line import ROW_BYTES, TensorLine
from paceline.control.waiter import Patience
from paceline.control.wire import LIMIT_BYTES
from paceline.errors import BadArgumentError, BadTypeError, RankLostError
from paceline.settings import HangWatch
from paceline.testing import RankError
from tests.control._common import BUSY_S, group_store
from tests.on_ranks import on_ranks

Ranks = Callable[..., list[Any]]


def _channel() -> Channel:
    made = Channel(dist.group.WORLD)
    dist.barrier()
    return made


def test_what_can_be_asked_of_an_agreement() -> None:
    found = Agreement("graph", ((3,), (5,), None, (3,)))
    assert found.values == (3, 5, None, 3)
    assert found.missing == (2,)
    assert not found.equal
    assert found.differing == (1,)
    assert (found.reduce(sum), found.reduce(max), found.reduce(min)) == (11, 5, 3)
    assert Agreement("graph", ((b"x",), (b"x",))).equal
    assert not Agreement("graph", ((b"x",), None)).equal


def _line(kind: str, rank: int, size: int) -> Line:
    if kind == "store":
        board = Board(dist.PrefixStore("line", group_store()), name="job")
        return StoreLine(board, rank=rank, size=size, waiter=lambda topic, timeout_s: Patience(timeout_s))
    return TensorLine(lambda mine, rows, _: dist.all_gather(rows, mine), name="job", rank=rank, size=size)


def _agree(rank: int, size: int, kind: str) -> None:
    line = _line(kind, rank, size)
    large = line.agree("large", bytes([rank]) * WORD_LIMIT_BYTES, timeout_s=60)
    assert large.values == tuple(bytes([r]) * WORD_LIMIT_BYTES for r in range(size))
    # Around the length up to which a word goes in one hop, of one rank or of all.
    for n_bytes in range(ROW_BYTES - 40, ROW_BYTES + 1):
        found = line.agree("slots", b"x" * n_bytes, b"y" * (rank == 0), timeout_s=60)
        assert found.words == tuple((b"x" * n_bytes, b"y" * (r == 0)) for r in range(size))
    for word in ("first", "second"):
        found = line.agree("words", f"{word} of {rank}", rank, b"", timeout_s=60)
        assert found.words == tuple((f"{word} of {r}", r, b"") for r in range(size))
    assert line.agree("same", b"\x00\xff" * 100, timeout_s=60).equal
    assert line.agree("numbers", -rank, timeout_s=60).values == tuple(-r for r in range(size))


@pytest.mark.parametrize("kind", ["store", "tensor"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_learn_what_all_brought(ranks: Ranks, world_size: int, kind: str) -> None:
    ranks(_agree, kind, world_size=world_size, timeout=120)


def test_a_word_that_is_of_another_round_damaged_or_too_long_is_refused() -> None:
    told: list[bytes] = []

    def all_gather(mine: torch.Tensor, rows: list[torch.Tensor], timeout_s: float) -> None:
        told.append(bytes(mine.tolist()))
        for row in rows:
            row.copy_(mine)
        damaged = {1: told[0], 2: told[-1][:-1] + b"\x01", 3: b"\xff" * ROW_BYTES}
        rows[1].copy_(torch.tensor(list(damaged[len(told) - 1] if len(told) > 1 else told[0]), dtype=torch.uint8))

    line = TensorLine(all_gather, name="job", rank=0, size=2)
    for n in range(4):
        found = line.agree("graph", n, timeout_s=1)
        # What rank 1 seems to say was sealed for another rank, or another round, or does not end.
        assert found.words == ((n,), None)


@pytest.mark.parametrize("missing", [0, 2])
@on_ranks(world_size=3)
def test_a_rank_that_is_late_is_named_to_all_and_learns_it_too(rank: int, size: int, missing: int) -> None:
    line = _channel()
    if rank == missing:
        # It comes when the others have given it up; it learns that, and not something else.
        line._board.store.wait(["agree/graph/0/verdict"])
    decides, other = (present for present in range(size) if present != missing)
    if rank == decides:
        # Only this rank gives up, and not before the other one is there, so that nobody else is named.
        line._board.store.wait([f"agree/graph/0/{other}"])
    found = line.agree("graph", rank, timeout_s=0.3 if rank == decides else 60)
    assert found.values == tuple(None if other == missing else other for other in range(size))
    assert line.agree("graph", 7).equal


@on_ranks()
def test_what_was_agreed_on_does_not_pile_up_in_the_store(rank: int, size: int) -> None:
    line = _channel()
    rounds = 20
    for n in range(rounds):
        line.agree("graph", n)
    dist.barrier()
    keys = [f"agree/graph/{n}/{what}" for n in range(rounds) for what in (*range(size), "verdict")]
    # The last round: two contributions and a verdict.
    assert sum(line._board.has(key) for key in keys) == 3


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, BadTypeError),
        (True, BadTypeError),
        (1.5, BadTypeError),
        (2**63, BadArgumentError),
        (b"x" * LIMIT_BYTES, BadArgumentError),
        ("\u00e9" * (LIMIT_BYTES // 2), BadArgumentError),
    ],
)
def test_what_cannot_be_agreed_on_is_refused_before_anybody_waits(value: Any, error: type[Exception]) -> None:
    untouched: Any = None
    with pytest.raises(error):
        TensorLine(untouched, name="job", rank=0, size=2).agree("graph", value, timeout_s=1)


# -- ranks that do not come ----------------------------------------------------------------------------


def _ended(rank: int, size: int, how: str) -> tuple[str, float]:
    """The last rank ends before it comes; the others wait for it to wrap a module."""
    if rank == size - 1:
        if how == "killed, signed":
            sign_in(dist.group.WORLD)
        else:
            Channel(dist.group.WORLD)
        dist.barrier()
        if how == "exited":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        DDP(nn.Linear(2, 2))
    assert caught.value.rank == size - 1
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(("how", "world_size"), [("killed", 2), ("killed, signed", 3), ("exited", 3)])
def test_a_rank_that_has_ended_is_not_waited_for(ranks: Ranks, how: str, world_size: int) -> None:
    with pytest.raises(RankError) as ended:
        ranks(_ended, how, world_size=world_size, group_timeout_s=600, timeout=120, settle_s=60)
    assert len(ended.value.results) == world_size - 1
    for told, took_s in ended.value.results.values():
        assert f"Rank {world_size - 1} is gone: its process has ended" in told
        assert "the comparison of parameters or options" in told
        # 2 s on a machine that is not busy; far from the group's time-out.
        assert took_s < 2 + BUSY_S


def _stuck(rank: int, size: int) -> str:
    """Rank 1 has a channel, and is somewhere else."""
    store = dist.PrefixStore("test", group_store())
    with mock.patch.object(hang, "_settings", HangWatch("enforce", 1.0)):
        line = _channel()
    if rank == 1:
        _until_told(store)
        with pytest.raises(RankLostError):
            line.agree("graph", 1)
        return ""
    # Patient, so that a slow machine is not taken for a rank that does not answer.
    with mock.patch.object(hang, "ANSWER_S", 20.0), pytest.raises(RankLostError) as caught:
        line.agree("graph", 0)
    assert caught.value.rank == 1
    store.set("told", "")
    return str(caught.value)


def _until_told(store: Any) -> None:
    store.wait(["told"], timedelta(seconds=120))


def test_the_watch_reports_a_rank_that_does_not_come_to_agree(ranks: Ranks) -> None:
    told = ranks(_stuck, group_timeout_s=600, timeout=120)[0]
    assert "Rank 0 has waited" in told
    assert "in the comparison of graph" in told
    assert "rank 1: collective 0; is in code of its own at " in told
    assert "in _until_told" in told
