"""Makes the messages of a rank that is broken: other bytes, other bytes with a seal that fits, and other content."""

from __future__ import annotations

import json
import random
from typing import Any
from unittest import mock

from paceline.control import wire
from paceline.control.wire import Field, Item, MessageKind

NUMBERS = (0, 1, -1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63))
TEXTS = (
    "",
    "\x00",
    "\x1b[2J",
    "../" * 20,
    "é\U0001f6b4",
    "9" * 5000 + " x",
    "-1 x",
    "x" * 20_000,
    "\ud800",
    "lost",
    "[" * 3000,
)
DEEP, LARGE = "@deep@", "@large@"
"""What stands in JSON for lists in lists, and for a number with more digits than Python reads."""


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Other bytes."""
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
                n_bytes = rng.choice((4, 8))
                raw[at : at + n_bytes] = (rng.choice(NUMBERS) % 2 ** (8 * n_bytes)).to_bytes(n_bytes, "little")
            case 4:
                # Two messages are spliced.
                other = rng.randrange(len(data) + 1)
                raw[at:] = data[other:]
            case 5:
                raw = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(raw)


def _item(rng: random.Random) -> Item:
    made: tuple[Item, ...] = (rng.choice(NUMBERS), rng.choice(TEXTS), rng.choice(TEXTS).encode(errors="replace"))
    return rng.choice(made)


def mutated_fields(rng: random.Random, fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Other content: numbers, texts, types, and how many there are."""
    told = list(fields)
    for _ in range(rng.choice((1, 1, 1, 3))):
        at = rng.randrange(len(told)) if told else 0
        match rng.randrange(8):
            case 0 if told:
                del told[at]
            case 1:
                told.insert(at, _item(rng))
            case 2 if told:
                told[at] = tuple(_item(rng) for _ in range(rng.choice((0, 1, 3, 500))))
            case _ if told:
                told[at] = _other(rng, told[at])
    return tuple(told)


def _other(rng: random.Random, value: Field) -> Field:
    """Mostly a value of the same type."""
    if rng.random() < 0.2:
        return _item(rng)
    if isinstance(value, int):
        return rng.choice(NUMBERS)
    if isinstance(value, str):
        return rng.choice(TEXTS)
    if isinstance(value, bytes):
        return mutated_bytes(rng, value)
    return tuple(item for item in mutated_fields(rng, value) if not isinstance(item, tuple))


def mutated_json(rng: random.Random, value: Any) -> bytes:
    """The JSON of other content, or other JSON."""
    text = json.dumps(_other_json(rng, value))
    text = text.replace(json.dumps(DEEP), "[" * 5000 + "]" * rng.choice((5000, 0)))
    text = text.replace(json.dumps(LARGE), "9" * rng.choice((400, 4300, 5000)))
    return mutated_bytes(rng, text.encode()) if rng.random() < 0.3 else text.encode()


def _other_json(rng: random.Random, value: Any) -> Any:
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        if rng.random() < 0.1:
            return list(value.values()) if isinstance(value, dict) else {str(n): item for n, item in enumerate(value)}
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
        match rng.randrange(6):
            case 0:
                del copy[key]
            case 1 if isinstance(copy, dict):
                copy[rng.choice(TEXTS)] = _junk(rng)
            case 1:
                copy += [_junk(rng)] * rng.choice((1, 300))
            case _:
                copy[key] = _other_json(rng, copy[key])
        return copy
    return _junk(rng)


def _junk(rng: random.Random) -> Any:
    nested: Any = rng.choice(TEXTS)
    for _ in range(rng.choice((0, 1, 20, 300))):
        nested = [nested] if rng.random() < 0.5 else {"x": nested}
    more = (None, True, 0.5, float("nan"), float("inf"), [], {}, "?", "", DEEP, LARGE, nested, rng.choice(NUMBERS))
    return rng.choice(more)


class Mutator:
    """Makes the messages of a broken rank. ``sealed`` tells whether the last one has a seal that fits."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.sealed = True

    def message(self, kind: MessageKind, *fields: Field, place: str) -> bytes:
        """A message for ``place``: that of an honest rank, with something changed."""
        honest = wire.encode(kind, *fields, place=place)
        way = self.rng.randrange(8)
        self.sealed = way > 1
        if way == 0:
            data = mutated_bytes(self.rng, honest)
            self.sealed = data == honest
            return data
        if way == 1:
            # A message of another place, or of another kind.
            other = self.rng.choice([kind, *MessageKind])
            return seal(other, honest[wire.HEAD_BYTES :], f"{place}1")
        if way == 2:
            return seal(kind, mutated_bytes(self.rng, honest[wire.HEAD_BYTES :]), place)
        return seal(kind, b"".join(map(wire._field, mutated_fields(self.rng, fields))), place)


def seal(kind: MessageKind, payload: bytes, place: str) -> bytes:
    """Any bytes as a message whose envelope fits."""
    with mock.patch.dict(wire.SCHEMAS, {kind: (bytes,)}), mock.patch.object(wire, "_field", bytes):
        return wire.encode(kind, payload, place=place, limit_bytes=2**30)
