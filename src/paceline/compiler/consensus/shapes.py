"""What a rank has seen of a frame's inputs, as a message: the frame's name, and the sizes and numbers by source."""

from __future__ import annotations

import json
from typing import Any

from paceline import _torch
from paceline.errors import DisagreementError

NAME_LIMIT = 1000
DIMENSION_LIMIT = 64


def encode(frame: str, sizes: _torch.Sizes) -> bytes:
    """The message of a rank that has traced ``frame``. It leaves out what other ranks would refuse."""
    fitting = {name: entry for name, entry in sizes.items() if _is_name(name) and _is_entry(entry)}
    return json.dumps({"frame": frame[:NAME_LIMIT], "sizes": fitting}, sort_keys=True).encode()


def decode(body: bytes, rank: int) -> tuple[str, _torch.Sizes]:
    """The frame and sizes in a message of ``rank``. Raises if it does not have the form that `encode` makes."""
    match read_json(body, rank):
        case {"frame": str(frame), "sizes": dict(sizes), **rest} if not rest:
            if _is_name(frame) and all(_is_name(name) and _is_entry(entry) for name, entry in sizes.items()):
                return frame, sizes
    raise refusal(rank)


def read_json(body: bytes, rank: int) -> Any:
    """The content of a message, which may be anything that JSON can express."""
    try:
        # A number of thousands of digits is a ValueError, and deep nesting is a RecursionError.
        return json.loads(body)
    except (ValueError, RecursionError):
        raise refusal(rank) from None


def read_texts(body: bytes, rank: int) -> dict[str, str]:
    """The content of a message that is a few texts by name."""
    texts = read_json(body, rank)
    if isinstance(texts, dict) and all(isinstance(text, str) and _is_name(text) for text in texts.values()):
        return texts
    raise refusal(rank)


def refusal(rank: int) -> DisagreementError:
    return DisagreementError(
        f"What rank {rank} said about its compilation cannot be understood. "
        "Run the same version of Paceline and torch on every rank."
    )


def _is_name(name: str) -> bool:
    return len(name) <= NAME_LIMIT


def _is_entry(entry: Any) -> bool:
    match entry:
        case [scalar, size, stride]:
            return _is_number(scalar) and _is_part(size, _is_size) and _is_part(stride, _is_stride)
    return False


def _is_number(value: Any) -> bool:
    return value is None or value == _torch.DYNAMIC or _is_int(value)


def _is_part(value: Any, is_item: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= DIMENSION_LIMIT and all(map(is_item, value))
    return value is None or value == _torch.DYNAMIC


def _is_size(value: Any) -> bool:
    return value == _torch.DYNAMIC or _is_int(value)


def _is_stride(value: Any) -> bool:
    match value:
        case ["S", int(dimension)]:
            return _is_int(dimension) and 0 <= dimension < DIMENSION_LIMIT
    return _is_size(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
