"""Gradients that travel in half of their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paceline.hooks.allreduce import allreduce, start_sum
from paceline.hooks.contract import Bucket, Hook, group_of, overlapping


@overlapping
def fp16_compress(state: Any, bucket: Bucket) -> Future[Tensor]:
    """Average the bucket over the ranks of ``state`` (a process group or None for all) in float16.

    A gradient whose average is beyond 65504 becomes infinite, which a ``GradScaler`` notices; one whose
    average is below 6e-8 becomes zero.

    Example::

        ddp.register_comm_hook(None, paceline.hooks.fp16_compress)
    """
    return _average_in(torch.float16, state, bucket)


@overlapping
def bf16_compress(state: Any, bucket: Bucket) -> Future[Tensor]:
    """Average the bucket over the ranks of ``state`` (a process group or None for all) in bfloat16.

    It has the range of float32 and three digits.

    Example::

        ddp.register_comm_hook(None, paceline.hooks.bf16_compress)
    """
    return _average_in(torch.bfloat16, state, bucket)


def fp16(hook: Hook) -> Hook:
    """Let ``hook`` work on a float16 copy of the bucket.

    Gradients are cast before the hook divides them: beyond 65504 they become infinite.

    Example::

        ddp.register_comm_hook(state, paceline.hooks.fp16(paceline.hooks.powersgd))
    """
    return Compressed(hook, torch.float16)


def bf16(hook: Hook) -> Hook:
    """Let ``hook`` work on a bfloat16 copy of the bucket.

    Example::

        ddp.register_comm_hook(state, paceline.hooks.bf16(paceline.hooks.powersgd))
    """
    return Compressed(hook, torch.bfloat16)


def _is_smaller(dtype: torch.dtype, buffer: Tensor) -> bool:
    # float16 to bfloat16 or back would lose digits or range and save nothing. Sparse gradients travel as
    # they are: backends sum them in few dtypes.
    return dtype.itemsize < buffer.dtype.itemsize and buffer.layout is torch.strided


def _average_in(dtype: torch.dtype, state: Any, bucket: Bucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    # A cast would drop the imaginary parts.
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    if not _is_smaller(dtype, values):
        return allreduce(state, bucket)
    group = group_of(state)
    # Divided on the way into the small dtype, not in it: the sum of all ranks has to fit.
    small = torch.div(values, group.size(), out=torch.empty_like(values, dtype=dtype))

    def decompress(done: Future[Tensor]) -> Tensor:
        values.copy_(done.value())
        return buffer

    return start_sum(small, group).then(decompress)


@dataclass(frozen=True)
class Compressed:
    """A hook that runs another one on a smaller copy of the bucket. A class, so that it can be pickled."""

    wrapped_hook: Hook
    dtype: torch.dtype

    def __post_init__(self) -> None:
        inner = getattr(self.wrapped_hook, "__qualname__", type(self.wrapped_hook).__qualname__)
        name = f"{'fp16' if self.dtype == torch.float16 else 'bf16'}({inner})"
        # What a function would be called in a log.
        for attribute in ("__name__", "__qualname__"):
            object.__setattr__(self, attribute, name)

    def __call__(self, state: Any, bucket: Bucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        # The wrapped hook may multiply gradients, so halves of complex numbers will not do here.
        if buffer.is_complex() or not _is_smaller(self.dtype, buffer):
            return self.wrapped_hook(state, bucket)
        bucket.set_buffer(buffer.to(self.dtype))
        try:
            future = self.wrapped_hook(state, bucket)
        except BaseException:
            bucket.set_buffer(buffer)
            raise

        def decompress(done: Future[Tensor]) -> Tensor:
            bucket.set_buffer(buffer)
            return buffer.copy_(done.value())

        return future.then(decompress)
