"""``Span``: a stretch of memory, which is all that the kernel knows of a tensor."""

from __future__ import annotations

from torch import Tensor

Span = tuple[int, int]
"""An address and a number of bytes."""


def span(tensor: Tensor) -> Span:
    """Where a tensor is, if its elements lie in memory one after another."""
    return tensor.data_ptr(), tensor.nbytes
