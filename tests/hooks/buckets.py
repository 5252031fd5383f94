"""Buckets made by hand, to run hooks without a wrapper."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SHAPES = ((24, 16), (7,), (8, 4, 3, 3), (2, 2), ())


class HandMadeBucket:
    def __init__(self, parameters: list[Tensor], buffer: Tensor, *, index: int = 0, of: int = 1) -> None:
        self._parameters, self._buffer, self._index, self._of = parameters, buffer, index, of

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        return self._index == self._of - 1


def make_parameters(dtype: torch.dtype = torch.float32, shapes: tuple[Any, ...] = SHAPES) -> list[Tensor]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def make_buckets(parameters: list[list[Tensor]], *, scale: float = 1.0) -> list[HandMadeBucket]:
    """One bucket for each list of parameters, with random gradients."""
    buffers = [torch.randn(sum(p.numel() for p in ps), dtype=ps[0].dtype) * scale for ps in parameters]
    return [HandMadeBucket(ps, buffers[i], index=i, of=len(buffers)) for i, ps in enumerate(parameters)]


def exact_mean(tensor: Tensor) -> Tensor:
    """The exact average over the ranks."""
    total = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def seed_rank(rank: int) -> None:
    torch.manual_seed(1000 + rank)


def run_all(hook: Any, state: Any, buckets: list[HandMadeBucket]) -> list[Tensor]:
    """All buckets under way at once, as in a backward."""
    futures = [hook(state, bucket) for bucket in buckets]
    return [future.wait() for future in futures]
