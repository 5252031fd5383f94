"""The line over an all-gather of byte tensors: one hop for words that fit into a row, and two if one does not.

The all-gather is whatever the ranks are connected by: a backend such as gloo, or shared memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.control import wire
from paceline.control.agree import ENCODING_BYTES, WORD_LIMIT_BYTES, Line

AllGather = Callable[[Tensor, list[Tensor], float], object]
"""Takes this rank's bytes, tensors for everybody's, and how many seconds it may take; returns when all have come."""

ROW_BYTES = 256
_LENGTH = struct.Struct("<I")


class TensorLine(Line):
    """The agreements of ranks that are connected by ``all_gather``."""

    def __init__(
        self, all_gather: AllGather, *, name: str, rank: int, size: int, limit_bytes: int = WORD_LIMIT_BYTES
    ) -> None:
        super().__init__(name=name, rank=rank, size=size, limit_bytes=limit_bytes)
        self._all_gather = all_gather
        self._longest_bytes = limit_bytes + wire.HEAD_BYTES + ENCODING_BYTES

    def gather(self, topic: str, turn: int, word: bytes, *, timeout_s: float) -> list[bytes | None]:
        """Returns when all ranks have come. Whatever the all-gather raises is raised."""
        rows = self._exchange(row_of(word[: ROW_BYTES - _LENGTH.size], ROW_BYTES, length=len(word)), timeout_s)
        lengths = [_LENGTH.unpack_from(row)[0] for row in rows]
        # All ranks know the same lengths, so that nobody waits for a second hop that another rank does not take.
        allowed = [length if length <= self._longest_bytes else 0 for length in lengths]
        if max(allowed) + _LENGTH.size > ROW_BYTES:
            rows = self._exchange(row_of(word, max(allowed) + _LENGTH.size), timeout_s)
        return [row[_LENGTH.size :][:length] or None for row, length in zip(rows, allowed, strict=True)]

    def _exchange(self, mine: Tensor, timeout_s: float) -> list[bytes]:
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        self._all_gather(mine, everybodys, timeout_s)
        return [bytes_of(row) for row in everybodys]


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a tensor of bytes. ``tensor.numpy()`` would need numpy, which not everybody has beside torch."""
    assert tensor.dtype is torch.uint8, "only bytes"
    assert tensor.is_contiguous(), "only bytes that lie one after another"
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())


def row_of(word: bytes, n_bytes: int, *, length: int | None = None) -> Tensor:
    """A tensor of ``n_bytes`` with ``word`` and its length. ``length`` is given if ``word`` is only its beginning."""
    data = _LENGTH.pack(len(word) if length is None else length) + word
    assert len(data) <= n_bytes, f"{len(data)} bytes do not fit into a row of {n_bytes}"
    return torch.frombuffer(bytearray(data.ljust(n_bytes, b"\0")), dtype=torch.uint8)


def word_in(row: Tensor) -> bytes:
    """The word in a row."""
    data = bytes_of(row)
    return data[_LENGTH.size :][: _LENGTH.unpack_from(data)[0]]
