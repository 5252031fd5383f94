"""Digests of tensors, by which replicas are compared: 64 bits for all bytes of a tensor, made where it lives.

The bytes are read as a table of 64-bit words. Its rows and its columns are summed, and each sum is weighted by its
position, so that a tensor whose bytes only moved has another digest. This takes two passes over the memory and no copy
of it. It does not protect against somebody who wants two tensors to have the same digest.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline import _torch

_COLUMNS = 1024
# These are odd 64-bit numbers whose bits are well mixed. Multiplication by them wraps.
_ROW, _COLUMN, _TAIL, _MORE = (
    -7046029254386353131,
    -4417276706812531889,
    -8663945395140668459,
    2885561159178294103,
)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A 64-bit digest of the bytes, as a tensor of no dimensions on the same device.

    For a DTensor these are the bytes that this rank holds.
    """
    tensor = _torch.local_tensor(tensor)
    words, rest = _as_words(tensor)
    rows = words.numel() // _COLUMNS
    table = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    parts = [words[rows * _COLUMNS :], rest.to(torch.int64)]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if rows:
        total = total + _weigh(table.sum(1), _ROW) + _weigh(table.sum(0), _COLUMN)
    for n, part in enumerate(parts):
        if part.numel():
            total = total + _weigh(part, _TAIL + 2 * n)
    # The length counts, so that zeros of different lengths differ.
    return total + _signed(tensor.numel() * _MORE + tensor.element_size())


def combine(digests: Iterable[Tensor | int]) -> Tensor:
    """One digest of several, in their order, on the CPU."""
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for one in digests:
        total = total * _ROW + (one if isinstance(one, int) else one.cpu()) + _COLUMN
    return total


def _as_words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of ``tensor`` as 64-bit words, and what is left over as bytes."""
    flat = tensor.detach()
    if flat.layout is not torch.strided:
        flat = flat.to_dense()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return flat[:whole].view(torch.int64), flat[whole:]


def _weigh(numbers: Tensor, factor: int) -> Tensor:
    # The weights are odd, since an even weight loses the highest bits, which are first mixed into the lower ones.
    weights = torch.arange(1, 2 * numbers.numel(), 2, dtype=torch.int64, device=numbers.device) * factor
    return ((numbers ^ (numbers >> 32)) * weights).sum()


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
