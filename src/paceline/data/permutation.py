"""A shuffled order of n things that is computed place by place, and not stored.

The order is a permutation with a key, as ciphers are: a Feistel network over the smallest power of two that holds n,
applied again to what falls outside (*cycle walking*). So a rank computes only its own samples, at any place of the
order, and a dataset of a billion samples costs no memory. A network over few bits has too few different orders. So a
small order is stored: it sorts its things by numbers that are made from the key.

The order follows from these lines alone. A saved position means the same with another release of torch, whose own
generators promise no such thing.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

STORED = 4096
"""Up to this size, orders are stored."""
# The number is even, so that both halves have their own width again at the end.
_ROUNDS = 8
# An odd 64-bit number whose bits are well mixed. Multiplication by it wraps.
_FACTOR = -7046029254386353131


class Permutation:
    """The order of ``range(size)`` that belongs to ``key``. Different keys have unrelated orders."""

    def __init__(self, size: int, *, key: tuple[int, ...]) -> None:
        self._size = size
        bits = max(2, (size - 1).bit_length())
        self._widths = bits - bits // 2, bits // 2
        seed = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(seed[8 * n : 8 * n + 8], "little", signed=True) for n in range(_ROUNDS)]
        self._stored = self._sorted() if size <= STORED else None

    def at(self, places: Tensor) -> Tensor:
        """What is at these places of the order; ``places`` is an int64 tensor of one dimension."""
        if self._stored is not None:
            return self._stored[places]
        found = self._scramble(places)
        outside = (found >= self._size).nonzero().squeeze(1)
        while outside.numel():
            again = self._scramble(found[outside])
            found[outside] = again
            outside = outside[again >= self._size]
        return found

    def _sorted(self) -> Tensor:
        numbers = torch.arange(self._size)
        for key in self._keys[:2]:
            numbers = _mix(numbers, key, bits=62)
        return torch.argsort(numbers, stable=True)

    def _scramble(self, numbers: Tensor) -> Tensor:
        wide, narrow = self._widths
        left, right = numbers >> narrow, numbers & ((1 << narrow) - 1)
        for key in self._keys:
            left, right = right, left ^ _mix(right, key, bits=wide)
            wide, narrow = narrow, wide
        return (left << narrow) | right


def _mix(numbers: Tensor, key: int, *, bits: int) -> Tensor:
    """A number of so many ``bits`` for each of ``numbers``, in which the key and all their bits count."""
    mixed = (numbers ^ key) * _FACTOR
    # These are arithmetic shifts. The copies of the sign that they bring in are either mixed further or masked.
    mixed = (mixed ^ (mixed >> 32)) * _FACTOR
    return (mixed >> (63 - bits)) & ((1 << bits) - 1)
