"""The seal with a secret: what somebody writes who can reach the store, and does not know the secret, is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline import DDP, settings
from paceline.control import Channel, seal, wire
from paceline.control.board import Board
from paceline.control.failure import Failure, News
from paceline.control.store_line import StoreLine
from paceline.control.waiter import Patience
from paceline.control.wire import BadMessageError, MessageKind
from paceline.errors import BadArgumentError, DisagreementError
from tests.on_ranks import on_ranks

PLACE = "job/1/agree/graph/0/1"
OURS, THEIRS = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def _as(secret: str | None, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What ``call`` gives for somebody with this secret."""
    with mock.patch.dict(os.environ):
        os.environ.pop(settings.SECRET, None)
        if secret is not None:
            os.environ[settings.SECRET] = secret
        return call(*args, **options)


def _word(*items: Any, place: str = PLACE) -> bytes:
    return wire.encode(MessageKind.WORD, items, place=place)


@pytest.mark.parametrize("theirs", [None, THEIRS])
def test_a_message_with_another_secret_or_none_is_refused(theirs: str | None) -> None:
    assert _as(OURS, wire.decode, MessageKind.WORD, _as(OURS, _word, "x"), place=PLACE) == (("x",),)
    for writer, reader in ((theirs, OURS), (OURS, theirs)):
        message = _as(writer, _word, "x")
        with pytest.raises(BadMessageError, match="seal does not fit"):
            _as(reader, wire.decode, MessageKind.WORD, message, place=PLACE)
        assert _as(reader, wire.has_other_secret, message)
    # The mark can be seen by everybody, and helps nobody.
    forged = bytearray(_as(theirs, _word, "x"))
    at = wire.HEAD_BYTES - seal.SEAL_BYTES
    forged[at : at + seal.MARK_BYTES] = _as(OURS, seal.mark)
    with pytest.raises(BadMessageError, match="seal does not fit"):
        _as(OURS, wire.decode, MessageKind.WORD, bytes(forged), place=PLACE)


def test_every_bit_of_the_seal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SECRET, OURS)
    message = _word("x")
    for bit in range(8 * (wire.HEAD_BYTES - seal.SEAL_BYTES), 8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadMessageError, match="seal does not fit"):
            wire.decode(MessageKind.WORD, bytes(changed), place=PLACE)
    assert OURS.encode() not in message


@pytest.mark.parametrize("text", ["", "hunter2", "x" * 31, "é" * 40, "line\n" * 20])
def test_a_secret_that_cannot_be_one_is_an_error_that_does_not_show_it(text: str) -> None:
    with pytest.raises(BadArgumentError, match="PACELINE_SECRET must have at least 32") as raised:
        _as(text, _word, "x")
    assert not text or text not in str(raised.value)


# -- the store -----------------------------------------------------------------------------------------


def test_what_was_forged_gives_way_to_the_first_message_and_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SECRET, OURS)
    board = Board(dist.HashStore(), name="job/1")
    board.store.set("verdict", _as(None, _word, "theirs", place="job/1/verdict"))
    assert board.put_first("verdict", MessageKind.WORD, ("first",)) == (("first",),)
    assert board.put_first("verdict", MessageKind.WORD, ("second",)) == (("first",),)
    assert board.read("verdict", MessageKind.WORD) == (("first",),)
    # Somebody who writes all the time is not waited for.
    busy = mock.Mock(**{"compare_set.side_effect": [b"a", b"b", b"c", b"d", b"e", StopIteration]})
    assert Board(busy, name="job/1").put_first("verdict", MessageKind.WORD, ("mine",)) is None


def test_a_verdict_that_was_copied_from_an_earlier_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SECRET, OURS)
    board = Board(dist.HashStore(), name="job/1")
    place = "job/1/agree/graph/0"
    old = tuple(_word(f"old {rank}", place=f"{place}/{rank}") for rank in range(2))
    board.put("agree/graph/0/verdict", MessageKind.VERDICT, b"\1\1", old)
    line = StoreLine(board, rank=1, size=2, waiter=lambda topic, timeout_s: Patience(0))
    assert line.agree("graph", "new", timeout_s=0).words == (None, ("new",))
    again = StoreLine(board, rank=1, size=2, waiter=lambda topic, timeout_s: Patience(0))
    assert again.agree("graph", "old 1", timeout_s=0).words == (("old 0",), ("old 1",))


def test_a_count_of_reports_that_was_forged_takes_no_time() -> None:
    board = Board(dist.HashStore(), name="job/1")
    news = News(board, rank=0, size=2)
    board.add("failures", 2**62)
    board.put("failure/7", MessageKind.FAILURE, 1, "forward", "KeyError", "", "", 0)
    assert news.first() == Failure(1, "forward", "KeyError", "")


# -- ranks with different secrets ----------------------------------------------------------------------


def _set_secret(rank: int, what: str) -> None:
    os.environ[settings.SECRET] = OURS
    if rank == 1 and what == "none":
        del os.environ[settings.SECRET]
    elif rank == 1:
        os.environ[settings.SECRET] = THEIRS


@pytest.mark.parametrize("what", ["none", "another"])
@on_ranks(timeout=60)
def test_ranks_with_different_secrets_are_told_so_when_they_wrap(rank: int, size: int, what: str) -> None:
    _set_secret(rank, what)
    with pytest.raises(DisagreementError, match=f"messages of rank {1 - rank} do not fit the PACELINE_SECRET") as told:
        DDP(torch.nn.Linear(2, 2))
    assert OURS not in str(told.value)
    assert THEIRS not in str(told.value)


@on_ranks(timeout=60, world_size=3)
def test_every_rank_hears_of_one_that_has_another_secret(rank: int, size: int) -> None:
    _set_secret(rank, "another")
    with pytest.raises(DisagreementError, match="Ranks were started with different secrets"):
        DDP(torch.nn.Linear(2, 2))


@on_ranks(timeout=60)
def test_ranks_with_different_secrets_are_told_so_when_they_would_share_memory(rank: int, size: int) -> None:
    _set_secret(rank, "another")
    with pytest.raises(DisagreementError, match=f"messages of rank {1 - rank} do not fit"):
        dist.new_group([0, 1], backend="shm")


@on_ranks(timeout=60)
def test_bytes_in_the_place_of_the_jobs_name_and_of_a_verdict_give_way(rank: int, size: int) -> None:
    store: Any = dist.PrefixStore("paceline", dist.distributed_c10d._get_process_group_store(dist.group.WORLD))
    if rank == 0:
        store.set("job", "../../elsewhere")
        store.set("1/agree/graph/0/verdict", _as(None, _word, "x"))
        store.set("1/given_up", "no message")
    dist.barrier()
    channel = Channel(dist.group.WORLD)
    assert len(channel.job) == 32
    assert channel.agree("graph", rank).values == (0, 1)
    channel.give_up(1, "forward", "it is lost")
    dist.barrier()
    assert channel.news() == Failure(1, "forward", "", "it is lost", final=True, lost=True)
