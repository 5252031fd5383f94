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
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import VALUE_LIMIT_BYTES, Agreement, Channel, hang, sign_in
from paceline.errors import BadArgumentError, BadTypeError, PeerFailedError, RankLostError
from paceline.options import HangWatch
from paceline.testing import RankError

Ranks = Callable[..., list[Any]]


def _channel() -> Channel:
    made = Channel(dist.group.WORLD)
    dist.barrier()
    return made


def test_what_can_be_asked_of_an_agreement() -> None:
    found = Agreement("graph", (3, 5, None, 3))
    assert found.missing == (2,)
    assert not found.equal
    assert found.differing == (1,)
    assert (found.reduce(sum), found.reduce(max), found.reduce(min)) == (11, 5, 3)
    assert Agreement("graph", (b"x", b"x")).equal
    assert not Agreement("graph", (b"x", None)).equal


def _agree(rank: int, size: int) -> list[Agreement]:
    line = _channel()
    first, second = (line.agree("words", f"{word} of {rank}".encode()) for word in ("first", "second"))
    same = line.agree("same", b"\x00\xff" * 100)
    numbers = line.agree("numbers", -rank)
    large = line.agree("large", bytes([rank]) * VALUE_LIMIT_BYTES)
    assert large.values == tuple(bytes([r]) * VALUE_LIMIT_BYTES for r in range(size))
    return [first, second, same, numbers]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_learn_what_all_brought(ranks: Ranks, world_size: int) -> None:
    told = ranks(_agree, world_size=world_size, timeout=120)
    assert all(found == told[0] for found in told)
    first, second, same, numbers = told[0]
    assert first.values == tuple(f"first of {rank}".encode() for rank in range(world_size))
    assert second.values == tuple(f"second of {rank}".encode() for rank in range(world_size))
    assert same.equal
    assert numbers.reduce(min) == 1 - world_size


def _missing(rank: int, size: int, missing: int) -> Agreement:
    line = _channel()
    if rank == missing:
        # It comes when the others have given it up; it learns that, and not something else.
        line._board.store.wait(["agree/graph/0/verdict"])
    found = line.agree("graph", rank, timeout_s=0.3)
    later = line.agree("graph", 7)
    assert later.equal
    return found


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_is_late_is_named_to_all_and_learns_it_too(ranks: Ranks, missing: int) -> None:
    told = ranks(_missing, missing, world_size=3)
    assert told[0] == told[1] == told[2]
    assert told[0].missing == (missing,)


def _failed(rank: int, size: int) -> str:
    line = _channel()
    if rank == 1:
        line.report("compiling", ValueError("no such op"), final=True)
        return ""
    with pytest.raises(PeerFailedError) as caught:
        line.agree("graph", 1)
    return str(caught.value)


def test_a_rank_that_failed_is_news_to_those_that_wait_for_it(ranks: Ranks) -> None:
    assert "rank 1 raised in compiling: ValueError: no such op" in ranks(_failed)[0]


def _many(rank: int, size: int) -> int:
    line = _channel()
    rounds = 20
    for n in range(rounds):
        line.agree("graph", n)
    dist.barrier()
    keys = [f"agree/graph/{n}/{what}" for n in range(rounds) for what in (*range(size), "verdict")]
    return sum(line._board.has(key) for key in keys)


def test_what_was_agreed_on_does_not_pile_up_in_the_store(ranks: Ranks) -> None:
    # The last round: two contributions and a verdict.
    assert ranks(_many) == [3, 3]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("text", BadTypeError),
        (True, BadTypeError),
        (1.5, BadTypeError),
        (2**63, BadArgumentError),
        (b"x" * (VALUE_LIMIT_BYTES + 1), BadArgumentError),
    ],
)
def test_what_cannot_be_agreed_on_is_refused_before_anybody_waits(value: Any, error: type[Exception]) -> None:
    from paceline.control.agreement import Agreements

    untouched: Any = None
    with pytest.raises(error):
        Agreements(untouched, rank=0, size=2).agree("graph", value, untouched)


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
        assert took_s < 2 + 15


def _stuck(rank: int, size: int) -> str:
    """Rank 1 has a channel, and is somewhere else."""
    store = dist.PrefixStore("test", dist.distributed_c10d._get_process_group_store(dist.group.WORLD))
    with mock.patch.object(hang, "_settings", HangWatch("enforce", 1.0)):
        line = _channel()
    if rank == 1:
        _until_told(store)
        with pytest.raises(RankLostError):
            line.agree("graph", 1)
        return ""
    with pytest.raises(RankLostError) as caught:
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
