"""Agree: everybody learns the same of what everybody brought, or who is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from paceline.control import VALUE_LIMIT_BYTES, Agreement, Channel
from paceline.errors import BadArgumentError, BadTypeError, PeerFailedError

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
        Agreements(untouched, rank=0, size=2).agree("graph", value, timeout_s=1, while_waiting=lambda: None)
