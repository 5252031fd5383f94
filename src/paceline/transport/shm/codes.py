"""The numbers that the kernel and Python have in common. They are those of ``csrc/pl.h``; a test compares them."""

from __future__ import annotations

import zlib
from enum import IntEnum
from functools import cache
from typing import Literal

import torch

ABI = 7
"""The version of ``csrc/pl.h``; a library that was left over from another one is not called."""
MAX_RANKS = 64


class Op(IntEnum):
    """How elements of several ranks become one; always folded in rank order."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class Kind(IntEnum):
    """What a collective is called in messages, and what ranks must agree on."""

    BARRIER = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    GATHER = 4
    SCATTER = 5
    ALL_TO_ALL = 6
    REDUCE = 7
    REDUCE_SCATTER = 8
    SPARSE_ALL_REDUCE = 9


DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.complex64: 4,
    torch.complex128: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.uint8: 10,
    torch.uint16: 11,
    torch.uint32: 12,
    torch.uint64: 13,
    torch.bool: 14,
}

_OTHERS_FROM = 1 << 8


@cache
def dtype_number(dtype: torch.dtype) -> int:
    """A number for any dtype, for the kernel to compare between ranks; it need not know the dtype."""
    return DTYPES.get(dtype, _OTHERS_FROM + zlib.crc32(str(dtype).encode()) % (1 << 16))


# Where a rank can be made to fail (fail_at).
PHASES = (
    "posted",  # the descriptor is written, nothing is staged
    "staged",  # inputs are in the staging area
    "before_publish",  # all is written, nobody has been told
    "published",  # others were told, the gate has not been passed
    "passed",  # every rank has arrived; others' memory may be read
    "reduced",  # own share is reduced, in the middle of a large collective too
    "copied",  # results of others are copied out
    "sending",  # point to point: a part of the message is in the ring
    "receiving",  # point to point: a part of the message is out of the ring
)
Action = Literal["kill", "stop"]
ACTIONS: dict[Action, int] = {"kill": 1, "stop": 2}


class Outcome(IntEnum):
    """How a job ended."""

    OK = 0
    PENDING = 1
    LOST = 2
    LEFT = 3
    TIMED_OUT = 4
    POISONED = 5
    DISAGREED = 6
    CLOSED = 7
    FORKED = 8
    ARGUMENT = 9
    MEMORY = 10
    INTERRUPTED = 11
