"""Mixed precision: forward and backward run in low precision, parameters and their gradients stay in full precision.

While a module's forward runs, each of its parameters is replaced by its cast. The cast is part of the autograd graph,
so gradients come back through it in full precision. The swap happens around the call of every module, not only of the
root. It also lasts for the length of a backward, so that forwards which checkpointing runs again find low-precision
parameters too.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from paceline import _torch
from paceline.gradients.roster import makes_sparse_gradients


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes for parameters and inputs, for the reduction of gradients, and for buffers. None changes nothing."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with every floating-point tensor in it cast to ``dtype``."""
    leaves, spec = _torch.pytree_flatten(tree)
    cast = [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return _torch.pytree_unflatten(cast, spec)


class _SparseCast(torch.autograd.Function):
    """``param.to(dtype)`` for a parameter whose gradient is sparse, which the backward of ``to`` refuses."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = param.dtype
        return param.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class Swap:
    """Puts low-precision parameters into ``module`` while any part of it runs, and while backward does.

    It is entered as a context manager for a backward, in which recomputed code may read parameters without calling a
    module.
    """

    def __init__(self, module: nn.Module, config: Any, *, ignored: frozenset[str]) -> None:
        self._dtype: torch.dtype | None = config.param_dtype
        self._root = module
        self._ignored_names = ignored
        self._ignored = {id(param) for name, param in module.named_parameters() if name in ignored}
        self._running: list[object] = []
        self._replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        self._casts: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        if config.buffer_dtype is not None:
            self._cast_buffers(config.buffer_dtype, ignored)
        if self._dtype is not None:
            enter, leave = _WeakHook(self, "_enter"), _WeakHook(self, "_leave")
            for owner in module.modules():
                self._handles.append(owner.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                self._handles.append(owner.register_forward_hook(leave, always_call=True))
            weakref.finalize(self, _remove_all, self._handles).atexit = False

    def _cast_buffers(self, dtype: torch.dtype, ignored: frozenset[str]) -> None:
        for prefix, owner in self._root.named_modules():
            for key, buffer in _torch.buffers_of(owner).items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is not None and buffer.is_floating_point() and name not in ignored:
                    _torch.buffers_of(owner)[key] = buffer.to(dtype)

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward as the compiler traces it, with the same casts as values of the graph.

        Nothing is put into the module here, and the hooks do nothing while the compiler traces.
        """
        if self._dtype is None:
            return self._root(*args, **kwargs)
        casts = {
            name: param.to(self._dtype)
            for name, param in self._root.named_parameters()
            if param.is_floating_point() and name not in self._ignored_names
        }
        return functional_call(
            self._root, casts, cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype), tie_weights=True
        )

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._running.append(module)
        if len(self._running) == 1:
            self._replace(module)
        if module is self._root and self._dtype is not None:
            return cast_floats(args, self._dtype), cast_floats(kwargs, self._dtype)
        return None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # This is called even if a hook before ours raised, in which case this call was never entered.
        if self._running and self._running[-1] is module:
            self._running.pop()
            self._restore_if_idle()

    def __enter__(self) -> Swap:
        """A backward begins. It gets new casts, as those of the last forward may have no graph, or another one."""
        self._running.append(self)
        if len(self._running) == 1 and self._dtype is not None:
            with torch.enable_grad():
                self._replace(self._root)
        return self

    def __exit__(self, *exc: object) -> None:
        if self in self._running:
            # If the backward raised, whatever was running inside it is over as well.
            del self._running[self._running.index(self) :]
            self._restore_if_idle()

    def _restore_if_idle(self) -> None:
        if not self._running:
            for holder, key, param in self._replaced:
                holder[key] = param
            self._replaced.clear()
            self._casts.clear()

    def _replace(self, module: nn.Module) -> None:
        assert self._dtype is not None
        for owner in module.modules():
            holder = _torch.parameters_of(owner)
            for key, param in holder.items():
                if param is None or id(param) in self._ignored or not param.is_floating_point():
                    continue
                if id(param) not in self._casts:
                    sparse = makes_sparse_gradients(owner)
                    cast = _SparseCast.apply(param, self._dtype) if sparse else param.to(self._dtype)
                    self._casts[id(param)] = cast
                self._replaced.append((holder, key, param))
        for holder, key, param in self._replaced:
            holder[key] = self._casts[id(param)]


class _WeakHook:
    """A method of a :class:`Swap` as a module's hook. It does nothing once the swap is gone, or in a copy."""

    def __init__(self, swap: Swap | None, method: str) -> None:
        self._swap = None if swap is None else weakref.ref(swap)
        self._method = method

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        swap = None if self._swap is None else self._swap()
        return None if swap is None else getattr(swap, self._method)(*args)

    def __reduce__(self) -> tuple[type[_WeakHook], tuple[None, str]]:
        return _WeakHook, (None, self._method)


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
