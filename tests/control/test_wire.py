"""Messages of the control channel: what is put up is read, and nothing else is, whatever the bytes."""

from __future__ import annotations

import contextlib
import random
import struct
import time
import tracemalloc
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from paceline.control import wire
from paceline.control.board import Board
from paceline.control.failure import Failure, News
from paceline.control.store_line import StoreLine
from paceline.control.waiter import Patience
from paceline.control.wire import BadMessageError, Field, MessageKind
from paceline.errors import DisagreementError

PLACE = "job/1/agree/graph/0/1"
FIELDS: dict[MessageKind, tuple[Field, ...]] = {
    MessageKind.WORD: ((b"\x00digest", "text", 5),),
    MessageKind.VERDICT: (b"\x01\x01", (2**63 - 1, -(2**63))),
    MessageKind.FAILURE: (
        3,
        "forward",
        "KeyError",
        'quotes " \\ \n lines, ünïcødé \U0001f6b4',
        "train.py:88 in load",
        1,
    ),
    MessageKind.REPLAN: (1, 12, "'first.weight' was frozen"),
    MessageKind.WHEREABOUTS: (1, 2, 3, 4, "a", "b", "c", "d", ("x", b"y", 3)),
    MessageKind.PROCESS: (4711, 123456, "trainer-1a2b3c4d"),
    MessageKind.REPORT: (-1, "disagreed", ""),
}


@pytest.mark.parametrize("kind", list(MessageKind))
def test_a_message_survives_the_way(kind: MessageKind) -> None:
    fields = FIELDS[kind]
    assert wire.decode(kind, wire.encode(kind, *fields, place=PLACE), place=PLACE) == fields


def test_text_that_is_no_unicode_is_sent_as_it_can_be() -> None:
    message = wire.encode(MessageKind.WORD, ("half \ud800",), place=PLACE)
    assert wire.decode(MessageKind.WORD, message, place=PLACE) == (("half \\ud800",),)


def _replan(place: str = PLACE) -> bytes:
    return wire.encode(MessageKind.REPLAN, *FIELDS[MessageKind.REPLAN], place=place)


MESSAGE = _replan()
ALTERED = {
    "nothing": (b"", "too few"),
    "truncated head": (MESSAGE[:7], "too few"),
    "truncated": (MESSAGE[:-1], "claims"),
    "longer": (MESSAGE + b"\x00", "claims"),
    "version": (MESSAGE[:2] + b"\x01" + MESSAGE[3:], "version 1"),
    "magic": (b"PK" + MESSAGE[2:], "begin"),
    "kind": (wire.encode(MessageKind.WORD, ("x",), place=PLACE), "of kind"),
    "flipped": (MESSAGE[:-3] + bytes([MESSAGE[-3] ^ 1]) + MESSAGE[-2:], "seal"),
    "replayed": (_replan("job/1/agree/graph/1/1"), "seal"),
    "another job": (_replan(PLACE.replace("job", "old")), "seal"),
    "oversized": (MESSAGE[:4] + struct.pack("<I", wire.LIMIT_BYTES + 1) + bytes(wire.LIMIT_BYTES + 9), "claims"),
}


@pytest.mark.parametrize(("data", "why"), ALTERED.values(), ids=ALTERED)
def test_what_is_not_the_message_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadMessageError, match=why):
        wire.decode(MessageKind.REPLAN, data, place=PLACE)


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match="longer than"):
        wire.encode(MessageKind.WORD, ("x" * (wire.LIMIT_BYTES + 1),), place=PLACE)


# -- fuzz ----------------------------------------------------------------------------------------------

MUTATIONS = 100_000


def _reseal(kind: MessageKind, data: bytes, place: str = PLACE) -> bytes:
    """Make the envelope fit, so that what is inside has to be refused for its own sake."""
    payload = data[wire._HEAD.size :]
    seal = wire._seal(kind, payload, place)
    return wire._HEAD.pack(wire.MAGIC, wire.VERSION, kind, len(payload), seal) + payload


def _mutated(rng: random.Random, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw)) if raw else 0
        match rng.randrange(6):
            case 0:
                del raw[at:]
            case 1:
                raw[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
            case 2 if raw:
                raw[at] ^= 1 << rng.randrange(8)
            case 3:
                # Lengths are where harm would be done.
                raw[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)))
            case 4:
                raw[at : at + 1] = rng.choice((b"i", b"s", b"b", b"l", b"l" * 60))
            case 5:
                raw = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(raw)


def _mutations(count: int, *, seed: int) -> Iterator[tuple[MessageKind, bytes]]:
    rng = random.Random(seed)
    messages = {kind: wire.encode(kind, *fields, place=PLACE) for kind, fields in FIELDS.items()}
    for n in range(count):
        kind = rng.choice(list(MessageKind))
        if n % 100 == 0:
            # Many short items claim much for little.
            yield kind, _reseal(kind, bytes(wire.HEAD_BYTES) + b"l\xff\xff\xff\xff" * rng.randrange(1, 10_000))
            continue
        data = _mutated(rng, messages[kind])
        yield kind, _reseal(kind, data) if n % 2 else data


@pytest.mark.full
def test_a_hundred_thousand_mutated_messages_are_read_or_refused() -> None:
    read, slowest_s = 0, 0.0
    for kind, data in _mutations(MUTATIONS, seed=0):
        start = time.process_time()
        read += _try(kind, data)
        slowest_s = max(slowest_s, time.process_time() - start)
    # A changed number inside resealed bytes is a fine message; most are not.
    assert 0 < read < MUTATIONS / 2
    assert slowest_s < 1


def test_no_message_takes_much_more_memory_than_it_has_bytes() -> None:
    most_bytes = 0
    tracemalloc.start()
    try:
        for kind, data in _mutations(2000, seed=1):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            _try(kind, data)
            most_bytes = max(most_bytes, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    # The longest are of 50 kB.
    assert most_bytes < 200_000


def _try(kind: MessageKind, data: bytes) -> bool:
    try:
        fields = wire.decode(kind, data, place=PLACE)
    except BadMessageError:
        return False
    assert tuple(map(type, fields)) == wire.SCHEMAS[kind]
    return True


def test_garbage_in_the_store_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Everything that reads the store, on bytes that fit the place or do not: an answer at once, of the right type."""

    def answers() -> Iterator[bytes]:
        for kind, data in _mutations(1_000_000, seed=2):
            yield data if len(data) % 3 else b""
            for wanted in ("given_up", "failure/1", "agree/graph/0/verdict", "agree/graph/0/1"):
                yield _reseal(kind, data, f"job/1/{wanted}")

    # It answers every question with the next of these bytes, and takes everything.
    given = answers()
    answer = {"get.side_effect": given, "compare_set.side_effect": lambda *_: next(given)}
    garbage = mock.Mock(**{"check.return_value": True, "add.return_value": 3}, **answer)
    board = Board(garbage, name="job/1")
    start, agreed = time.process_time(), 0
    for n in range(500):
        line = StoreLine(board, rank=n % 2, size=2, waiter=lambda topic, timeout_s: Patience(timeout_s))
        # Bytes that look like a message under another secret are an error, which says so.
        with contextlib.suppress(DisagreementError):
            found = line.agree("graph", n, timeout_s=5)
            assert len(found.words) == 2
            assert all(word is None or isinstance(word, tuple) for word in found.words)
            agreed += 1
        news = News(board, rank=0, size=2).first()
        assert news is None or isinstance(news, Failure)
    assert time.process_time() - start < 20
    assert agreed > 100
    # Who fills the store must not fill the log.
    assert 0 < len(caplog.records) <= 16


def test_garbage_in_a_real_store_counts_as_not_there() -> None:
    board = Board(dist.HashStore(), name="job/1")
    for text in ("", "garbage", "pl"):
        board.store.set("words", text)
        assert board.read("words", MessageKind.WORD) is None
    board.put("words", MessageKind.WORD, ("fine",))
    board.put_first("words", MessageKind.WORD, ("too late",))
    assert board.read("words", MessageKind.WORD) == (("fine",),)
    assert Board(board.store, name="job/2").read("words", MessageKind.WORD) is None
