"""Mixed precision: forward and backward in a low precision, parameters and their gradients in full.

While a module's forward runs, each of its parameters is replaced by its cast, which is part of the autograd
graph: gradients come back through the cast in full precision by themselves. The swap happens around every
module's call, not only the root's, so that a checkpointed layer that runs again in backward finds low-precision
parameters too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline import _torch


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes for parameters and inputs, for the reduction of gradients, and for buffers; None: as they are."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with every floating-point tensor in it cast to ``dtype``."""
    leaves, spec = _torch.pytree_flatten(tree)
    cast = [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return _torch.pytree_unflatten(cast, spec)


class Swap:
    """Puts low-precision parameters into ``module`` while any part of it runs."""

    def __init__(self, module: nn.Module, config: Any, *, ignored: frozenset[str]) -> None:
        self._dtype: torch.dtype | None = config.param_dtype
        self._root = module
        self._ignored = {id(param) for name, param in module.named_parameters() if name in ignored}
        self._depth = 0
        self._replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        self._handles: list[RemovableHandle] = []
        if config.buffer_dtype is not None:
            self._cast_buffers(config.buffer_dtype, ignored)
        if self._dtype is not None:
            for owner in module.modules():
                self._handles.append(owner.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
                self._handles.append(owner.register_forward_hook(self._leave, always_call=True))

    def _cast_buffers(self, dtype: torch.dtype, ignored: frozenset[str]) -> None:
        for prefix, owner in self._root.named_modules():
            for key, buffer in owner._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is not None and buffer.is_floating_point() and name not in ignored:
                    owner._buffers[key] = buffer.to(dtype)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if self._depth == 1:
            self._replace(module)
        if module is self._root and self._dtype is not None:
            return cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)
        return None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            for place, key, param in self._replaced:
                place[key] = param
            self._replaced.clear()

    def _replace(self, module: nn.Module) -> None:
        assert self._dtype is not None
        casts: dict[int, Tensor] = {}
        for owner in module.modules():
            holder: dict[str, Any] = owner._parameters
            for key, param in holder.items():
                if param is None or id(param) in self._ignored or not param.is_floating_point():
                    continue
                if id(param) not in casts:
                    casts[id(param)] = param.to(self._dtype)
                self._replaced.append((holder, key, param))
        for place, key, param in self._replaced:
            place[key] = casts[id(param)]
