"""Gradients that travel at half of their size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from paceline.hooks.allreduce import allreduce, start_sum
from paceline.hooks.contract import Hook, HookBucket, group_of, own_hook


@own_hook(takes_group=True)
def fp16_compress(state: Any, bucket: HookBucket) -> Future[Tensor]:
    """Average the bucket over the ranks of ``state`` (a process group or None for all) in float16.

    A gradient whose average is beyond 65504 becomes infinite, which a ``GradScaler`` notices; one whose
    average is below 6e-8 becomes zero.

    Example::

        ddp.register_comm_hook(None, paceline.hooks.fp16_compress)
    """
    return _average_in(torch.float16, state, bucket)


@own_hook(takes_group=True)
def bf16_compress(state: Any, bucket: HookBucket) -> Future[Tensor]:
    """Average the bucket over the ranks of ``state`` (a process group or None for all) in bfloat16.

    bfloat16 has the range of float32 and three digits.

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
    # A cast from float16 to bfloat16 or back would lose digits or range and save nothing. Sparse gradients travel as
    # they are, since backends sum them in few dtypes.
    return dtype.itemsize < buffer.dtype.itemsize and buffer.layout is torch.strided


def _average_in(dtype: torch.dtype, state: Any, bucket: HookBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    # A cast would drop the imaginary parts.
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    if not _is_smaller(dtype, values):
        return allreduce(state, bucket)
    group = group_of(state)
    # The division comes before the cast, so that the sum over all ranks fits into the small dtype.
    small = torch.div(values, group.size(), out=torch.empty_like(values, dtype=dtype))

    def decompress(done: Future[Tensor]) -> Tensor:
        values.copy_(done.value())
        return buffer

    return start_sum(small, group).then(decompress)


@dataclass(frozen=True)
class Compressed:
    """A hook that runs another one on a smaller copy of the bucket. It is a class so that it can be pickled."""

    wrapped_hook: Hook
    dtype: torch.dtype

    def __post_init__(self) -> None:
        inner = getattr(self.wrapped_hook, "__qualname__", type(self.wrapped_hook).__qualname__)
        name = f"{'fp16' if self.dtype == torch.float16 else 'bf16'}({inner})"
        # Logs call it by these names, as they would a function.
        for attribute in ("__name__", "__qualname__"):
            object.__setattr__(self, attribute, name)

    def __call__(self, state: Any, bucket: HookBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        # The wrapped hook may multiply gradients, so it cannot be given complex numbers as pairs of real ones.
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
