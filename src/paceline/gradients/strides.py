"""How a gradient's elements lie in memory: as those of its parameter do, without holes."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory without holes or overlap, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def has_default_strides(tensor: Tensor) -> bool:
    """Whether the strides are the default ones. ``is_contiguous()`` ignores those of dimensions of size 1."""
    if 1 not in tensor.shape:
        return tensor.is_contiguous()
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_stride(param: Tensor) -> tuple[int, ...]:
    """The strides of a parameter's gradient: the parameter's own, or the nearest without holes if it has holes."""
    return param.stride() if is_dense(param) else torch.empty_like(param, device="meta").stride()
