"""Hooks of our own in the place of torch's hooks that cannot run on every backend.

- ``quantization_pertensor_hook`` and ``quantization_perchannel_hook`` read a future in the form that only
  NCCL gives it.
- ``batched_powerSGD_hook`` of torch 2.13 fails in its own assertion as soon as it compresses.

``register_comm_hook`` calls :func:`resolve`, so that code which registers one of them works unchanged. The hooks of
this file start their collectives before they return, so they also overlap with backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.hooks.allreduce import allreduce
from paceline.hooks.contract import HookBucket, group_of, own_hook
from paceline.hooks.powersgd import LowRank, Memory, PowerSGDState, average_low_rank
from paceline.hooks.torch_hooks import is_torch_hook

_LEVELS = 255


def resolve(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook to run where ``hook`` was registered: its replacement, or ``hook`` itself.

    >>> from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook
    >>> resolve(quantization_pertensor_hook).__name__
    'quantize_whole'
    """
    if isinstance(hook, functools.partial):
        inner = resolve(hook.func)
        return hook if inner is hook.func else functools.partial(inner, *hook.args, **hook.keywords)
    return next((ours for name, ours in _REPLACEMENTS.items() if is_torch_hook(hook, *name)), hook)


@own_hook(takes_group=True)
def quantize_whole(process_group: Any, bucket: HookBucket) -> Future[Tensor]:
    """Average buckets that travel as 8-bit numbers, with one scale for each bucket and rank."""
    return _average_quantized(group_of(process_group), bucket, max(1, bucket.buffer().numel()))


@own_hook(takes_group=True)
def quantize_blocks(process_group: Any, bucket: HookBucket, bucket_size: int = 512) -> Future[Tensor]:
    """Average buckets that travel as 8-bit numbers, with one scale for every ``bucket_size`` numbers."""
    return _average_quantized(group_of(process_group), bucket, bucket_size)


def _average_quantized(group: dist.ProcessGroup, bucket: HookBucket, block_numel: int) -> Future[Tensor]:
    buffer = bucket.buffer()
    if buffer.layout is not torch.strided or buffer.is_complex() or not buffer.numel():
        return allreduce(group, bucket)
    blocks = math.ceil(buffer.numel() / block_numel)
    values = torch.zeros(blocks * block_numel, device=buffer.device)
    values[: buffer.numel()] = buffer
    # Scales and numbers travel in one message, as a second exchange would have to start in a callback.
    message = _encode(values.view(blocks, block_numel))
    received = [torch.empty_like(message) for _ in range(group.size())]
    work = dist.all_gather(received, message, group=group, async_op=True)
    assert work is not None

    def average(done: Future[Any]) -> Tensor:
        done.value()  # raises if the exchange failed
        total = _decode(received[0], blocks)
        for other in received[1:]:
            total += _decode(other, blocks)
        return buffer.copy_(total.view(-1)[: buffer.numel()] / len(received))

    return work.get_future().then(average)


def _encode(blocks: Tensor) -> Tensor:
    """``[scales, zero points, numbers]`` as bytes. Zero is always one of the levels, and stays exact."""
    low, high = torch.aminmax(blocks, dim=1)
    scale = (high.clamp(min=0) - low.clamp(max=0)) / _LEVELS
    # A block of zeros gets 1 as its scale. A block with an infinity or nan gets that as its scale, and decodes to nan.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low.clamp(max=0) / scale).round()
    numbers = ((blocks / scale[:, None]).round() + zero[:, None]).clamp(0, _LEVELS).nan_to_num(0.0)
    header = torch.stack([scale, zero]).view(torch.uint8)
    return torch.cat([header.view(-1), numbers.to(torch.uint8).view(-1)])


def _decode(message: Tensor, blocks: int) -> Tensor:
    header_bytes = 2 * blocks * torch.float32.itemsize
    # This copies, as the bytes of a message may not be aligned for float32.
    scale, zero = message[:header_bytes].clone().view(torch.float32).view(2, blocks, 1)
    return (message[header_bytes:].view(blocks, -1).float() - zero) * scale


@own_hook(takes_group=False)
def powersgd_batched(state: Any, bucket: HookBucket) -> Future[Tensor]:
    """PowerSGD on whole buckets seen as square matrices; ``state`` is torch's ``PowerSGDState``.

    The memory is kept where torch keeps it, so torch's own saving and loading of the state work.
    """
    group, buffer, index = group_of(state.process_group), bucket.buffer(), bucket.index()
    starts = state.iter >= state.start_powerSGD_iter
    ours = PowerSGDState(
        rank=state.matrix_approximation_rank,
        error_feedback=state.use_error_feedback,
        warm_start=state.warm_start,
        epsilon=state.orthogonalization_epsilon,
    )
    ours.iter = state.iter
    state.maybe_increase_iter(bucket)
    if not starts or buffer.layout is not torch.strided or buffer.is_complex() or not buffer.numel():
        return allreduce(group, bucket)
    side = math.isqrt(buffer.numel() - 1) + 1
    square = buffer.new_zeros(side, side)
    square.view(-1)[: buffer.numel()] = buffer
    memory = Memory((side, side), index, state.error_dict.get(index), state.q_memory_dict.get(index))
    if memory.error is not None:
        memory.error = memory.error.view(side, side)
    matrix = LowRank(square, memory, ours)
    state.total_numel_before_compression += buffer.numel()
    state.total_numel_after_compression += matrix.p.numel() + matrix.q.numel()

    def keep(done: Future[Tensor]) -> Tensor:
        average = done.value().view(-1)[: buffer.numel()]
        if memory.error is not None:
            state.error_dict[index] = memory.error.view(-1)
        if memory.q is not None:
            state.q_memory_dict[index] = memory.q
        return buffer.copy_(average)

    return average_low_rank([matrix], [], square, group).then(keep)


_REPLACEMENTS = {
    ("quantization_hooks", "quantization_pertensor_hook"): quantize_whole,
    ("quantization_hooks", "quantization_perchannel_hook"): quantize_blocks,
    ("powerSGD_hook", "batched_powerSGD_hook"): powersgd_batched,
}
