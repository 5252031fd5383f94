"""What travels between ranks besides tensors: typed messages, each sealed to the place it is kept at.

::

    magic 2 | version 1 | kind 1 | payload length 4 | seal 24 | payload: the kind's fields, one after another

A field is an int (8 bytes), text or bytes (4 bytes of length, then the content), or a list of those. The seal is about
everything else and the place (channel, topic, number, rank): what was damaged, cut off, copied here from another
place, or written by somebody who does not know the job's secret does not fit it (``seal`` says more). Anything wrong
with a message raises `BadMessageError` and nothing else, and nothing is built from a message before it is checked.
"""

from __future__ import annotations

import enum
import logging
import struct

from paceline.control import seal as seals

MAGIC = b"pl"
VERSION = 2
LIMIT_BYTES = 1 << 20
"""The longest payload, unless a line allows more."""

Item = int | str | bytes
Field = Item | tuple[Item, ...]

_log = logging.getLogger("paceline.control")
_HEAD = struct.Struct(f"<2sBBI{seals.SEAL_BYTES}s")
HEAD_BYTES = _HEAD.size
_LENGTH = struct.Struct("<I")
_INT = struct.Struct("<q")


class BadMessageError(ValueError):
    """These bytes are not the message that should be here; the text says why."""


class MessageKind(enum.IntEnum):
    """The kind of a message. The numbers are what is sent, so they never change."""

    WORD = 1
    """What one rank says, in an agreement or for whoever looks."""
    VERDICT = 2
    """The outcome of an agreement."""
    FAILURE = 3
    """A rank failed, and this is why."""
    REPLAN = 4
    """A rank has left the plan of buckets."""
    WHEREABOUTS = 6
    """Where a rank is."""
    PROCESS = 7
    """Which process a rank is."""
    REPORT = 8
    """One rank's account of why a group that spans hosts cannot go on."""


SCHEMAS: dict[MessageKind, tuple[type, ...]] = {
    MessageKind.WORD: (tuple,),
    MessageKind.VERDICT: (bytes, tuple),
    MessageKind.FAILURE: (int, str, str, str, str, int),
    MessageKind.REPLAN: (int, int, str),
    MessageKind.WHEREABOUTS: (int, int, int, int, str, str, str, str, tuple),
    MessageKind.PROCESS: (int, int, str),
    MessageKind.REPORT: (int, str, str),
}


def encode(kind: MessageKind, *fields: Field, place: str, limit_bytes: int = LIMIT_BYTES) -> bytes:
    """The message for ``place``. Raises ValueError if it would be longer than ``limit_bytes``."""
    assert tuple(map(type, fields)) == SCHEMAS[kind], f"{kind.name} has other fields"
    payload = b"".join(map(_field, fields))
    if len(payload) > limit_bytes:
        raise ValueError(
            f"A message of {len(payload)} bytes is longer than the {limit_bytes} that the channel carries."
        )
    seal = _seal(kind, payload, place)
    return _HEAD.pack(MAGIC, VERSION, kind, len(payload), seal) + payload


def fitting(text: str, limit_bytes: int) -> str:
    """The beginning of ``text`` that takes ``limit_bytes`` in a message at most. No character is cut in two."""
    room_bytes = limit_bytes
    for at, character in enumerate(text[: limit_bytes + 1]):
        room_bytes -= len(_encoded(character))
        if room_bytes < 0:
            return text[:at]
    return text


def decode(kind: MessageKind, data: bytes, *, place: str, limit_bytes: int = LIMIT_BYTES) -> tuple[Field, ...]:
    """The fields of the message that was kept at ``place``."""
    if len(data) < _HEAD.size:
        raise BadMessageError(f"{len(data)} bytes are too few for a message")
    magic, version, number, length, seal = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BadMessageError("it does not begin as a message does")
    if version != VERSION:
        raise BadMessageError(
            f"it is of version {version}, and this rank speaks {VERSION}: use the same Paceline on all ranks"
        )
    if number != kind:
        raise BadMessageError(f"it is of kind {number}, not {kind.name}")
    if length > limit_bytes or length != len(data) - _HEAD.size:
        raise BadMessageError(f"it claims {length} bytes and has {len(data) - _HEAD.size}")
    payload = data[_HEAD.size :]
    if not seals.fits(seal, _sealed_place(kind, place), payload):
        raise BadMessageError("its seal does not fit: it was damaged, was forged, or belongs somewhere else")
    return _fields(payload, SCHEMAS[kind])


def has_other_secret(data: bytes) -> bool:
    """Whether the head of this message says that it was sealed with another secret than this rank has."""
    if len(data) < _HEAD.size:
        return False
    magic, version, _, _, seal = _HEAD.unpack_from(data)
    return (magic, version) == (MAGIC, VERSION) and seal[: seals.MARK_BYTES] != seals.mark()


class Reader:
    """Reads messages, and refuses whatever else is in their place. Refusals are logged, but not often."""

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def read(
        self, kind: MessageKind, data: bytes, *, place: str, limit_bytes: int = LIMIT_BYTES
    ) -> tuple[Field, ...] | None:
        """The fields of the message that was kept at ``place``; None if it is refused."""
        try:
            return decode(kind, data, place=place, limit_bytes=limit_bytes)
        except BadMessageError as error:
            # It logs once per place, and for a few places only: garbage that fills the store must not fill the log.
            if place not in self._refused and len(self._refused) < 16:
                self._refused.add(place)
                _log.warning("A message on the control channel was refused (%s): %s.", place, error)
            return None


def _seal(kind: MessageKind, payload: bytes, place: str) -> bytes:
    return seals.make(_sealed_place(kind, place), payload)


def _sealed_place(kind: MessageKind, place: str) -> str:
    return f"{kind}/{place}"


def _field(value: Field) -> bytes:
    if isinstance(value, int):
        return b"i" + _INT.pack(value)
    if isinstance(value, str):
        raw = _encoded(value)
        return b"s" + _LENGTH.pack(len(raw)) + raw
    if isinstance(value, bytes):
        return b"b" + _LENGTH.pack(len(value)) + value
    return b"l" + _LENGTH.pack(len(value)) + b"".join(map(_field, value))


def _encoded(text: str) -> bytes:
    # A message of an exception may hold half a surrogate pair.
    return text.encode(errors="backslashreplace")


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
    # Each item of a list takes at least a byte. So a list, too, cannot claim more memory than was sent.
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
