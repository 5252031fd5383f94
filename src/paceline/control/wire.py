"""What travels between ranks besides tensors: typed messages, each sealed to the place it is kept at.

::

    magic 2 | version 1 | kind 1 | payload length 4 | seal 8 | payload: the kind's fields, one after another

A field is an int (8 bytes), text or bytes (4 bytes of length, then itself), or a list of such. The seal is a digest of
everything else and of the place (channel, topic, number, rank): what was damaged, cut off, or copied here from another
place does not fit it. It is no signature: who can write to the store can also compute it, as he can end the job.
Whatever is wrong raises `BadMessageError`, and nothing else; nothing is built from a message before it is checked.
"""

from __future__ import annotations

import enum
import hashlib
import struct

MAGIC = b"pl"
VERSION = 1
LIMIT_BYTES = 1 << 20
"""The longest payload."""

Field = int | str | bytes | tuple[int | str | bytes, ...]

_HEAD = struct.Struct("<2sBBI8s")
_LENGTH = struct.Struct("<I")
_INT = struct.Struct("<q")


class BadMessageError(ValueError):
    """These bytes are not the message that should be here; the text says why."""


class Kind(enum.IntEnum):
    """What a message is; its value on the wire is for ever."""

    VALUE = 1
    """One rank's contribution to an agreement."""
    VERDICT = 2
    """What an agreement came to."""
    FAILURE = 3
    """A rank failed, and this is why."""
    REPLAN = 4
    """A rank has left the plan of buckets."""
    WORDS = 5
    """Text for people."""
    POSITION = 6
    """Where a rank is."""
    PROCESS = 7
    """Which process a rank is."""


SCHEMAS: dict[Kind, tuple[type, ...]] = {
    Kind.VALUE: (tuple,),
    Kind.VERDICT: (bytes, tuple),
    Kind.FAILURE: (int, str, str, str, str, int),
    Kind.REPLAN: (int, int, str),
    Kind.WORDS: (str,),
    Kind.POSITION: (int, int, int, str, str, str, str, tuple),
    Kind.PROCESS: (int, int, str),
}


def encode(kind: Kind, *fields: Field, place: str) -> bytes:
    """The message for ``place``. Raises ValueError if it would be longer than `LIMIT_BYTES`."""
    assert tuple(map(type, fields)) == SCHEMAS[kind], f"{kind.name} has other fields"
    payload = b"".join(map(_field, fields))
    if len(payload) > LIMIT_BYTES:
        raise ValueError(
            f"A message of {len(payload)} bytes is longer than the {LIMIT_BYTES} that the channel carries."
        )
    seal = _seal(kind, payload, place)
    return _HEAD.pack(MAGIC, VERSION, kind, len(payload), seal) + payload


def decode(kind: Kind, data: bytes, *, place: str) -> tuple[Field, ...]:
    """The fields of the message that was kept at ``place``."""
    if len(data) < _HEAD.size:
        raise BadMessageError(f"{len(data)} bytes are too few for a message")
    magic, version, number, length, seal = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadMessageError("it does not begin as a message does")
    if version != VERSION:
        raise BadMessageError(
            f"it is of version {version}, and this rank speaks {VERSION}: use one Paceline on all ranks"
        )
    if number != kind:
        raise BadMessageError(f"it is of kind {number}, not {kind.name}")
    if length > LIMIT_BYTES or length != len(data) - _HEAD.size:
        raise BadMessageError(f"it claims {length} bytes and has {len(data) - _HEAD.size}")
    payload = data[_HEAD.size :]
    if seal != _seal(kind, payload, place):
        raise BadMessageError("its seal does not fit: it was damaged, or belongs somewhere else")
    return _fields(payload, SCHEMAS[kind])


def _seal(kind: Kind, payload: bytes, place: str) -> bytes:
    return hashlib.blake2b(payload, digest_size=8, key=hashlib.sha256(f"{kind}/{place}".encode()).digest()).digest()


def _field(value: Field) -> bytes:
    if isinstance(value, int):
        return b"i" + _INT.pack(value)
    if isinstance(value, str):
        # A message of an exception may hold half a surrogate pair.
        raw = value.encode(errors="backslashreplace")
        return b"s" + _LENGTH.pack(len(raw)) + raw
    if isinstance(value, bytes):
        return b"b" + _LENGTH.pack(len(value)) + value
    return b"l" + _LENGTH.pack(len(value)) + b"".join(map(_field, value))


def _fields(payload: bytes, types: tuple[type, ...]) -> tuple[Field, ...]:
    found: list[Field] = []
    at = 0
    for wanted in types:
        value, at = _read(payload, at, may_nest=True)
        if type(value) is not wanted:
            raise BadMessageError(f"field {len(found)} is of type {type(value).__name__}, not {wanted.__name__}")
        found.append(value)
    if at != len(payload):
        raise BadMessageError(f"{len(payload) - at} bytes are left over")
    return tuple(found)


def _read(payload: bytes, at: int, *, may_nest: bool) -> tuple[Field, int]:
    tag = payload[at : at + 1]
    at += 1
    if tag == b"i":
        if at + _INT.size > len(payload):
            raise BadMessageError("it ends inside a number")
        return _INT.unpack_from(payload, at)[0], at + _INT.size
    if tag not in (b"s", b"b", b"l") or at + _LENGTH.size > len(payload):
        raise BadMessageError(f"there is no field at byte {at - 1}")
    (length,) = _LENGTH.unpack_from(payload, at)
    at += _LENGTH.size
    # An item of a list takes a byte at the least, so that a list cannot claim more memory than was sent either.
    if length > len(payload) - at:
        raise BadMessageError("it ends inside a field")
    if tag == b"l":
        if not may_nest:
            raise BadMessageError("a list holds a list")
        items: list[int | str | bytes] = []
        for _ in range(length):
            item, at = _read(payload, at, may_nest=False)
            assert not isinstance(item, tuple)
            items.append(item)
        return tuple(items), at
    raw = payload[at : at + length]
    if tag == b"b":
        return raw, at + length
    try:
        return raw.decode(), at + length
    except UnicodeDecodeError as error:
        raise BadMessageError("its text is not UTF-8") from error
