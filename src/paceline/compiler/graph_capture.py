"""Gets hold of the graph that Dynamo captures, whatever backend it goes to.

[Note: catching the graph]
Dynamo can call a function of ours while it traces (its ``comptime``). That function puts our backend in front of the
backend of the graph that is being made, and of no other. This works for every backend and changes nothing outside of
that graph. Neither hooks nor swapped parameters have to be traced: the graph is changed when it is complete, with every
use of a parameter in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from paceline import _torch
from paceline.compiler.backend import Backend, backend
from paceline.compiler.taps.graph_run import Mark, compilation_failed


def _at_compile_time(context: Any) -> None:
    def wrap(inner: Any) -> Any:
        named = _torch.original_backend(inner)
        return inner if named is backend or isinstance(named, Backend) else Backend(inner)

    _torch.wrap_backend(context, wrap)
    _torch.tell_of_failure(context, compilation_failed)


def catch_graph(mark: Mark) -> None:
    """Traced by Dynamo: let our backend have the graph that is being made.

    Reading the wrapper's key makes Dynamo compile anew for another wrapper. Otherwise it would run this wrapper's graph
    with the parameters of the other.
    """
    _torch.at_compile_time(_at_compile_time, mark.key)


class _Hook:
    """A forward pre-hook that catches the graph of the module it is on."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            catch_graph(self.mark)

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """What a copy of a module has instead of the hook."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        pass


class Inside:
    """Calls a module that may be compiled by itself, inside of its wrapper, so that its graph is caught."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._made_for: object = None
        self._call: Callable[..., Any] | None = None

    def call(self, module: nn.Module) -> Callable[..., Any]:
        """What to call instead of ``module``: the module itself, unless it is compiled."""
        compiled = _torch.compiled_call(module)
        if compiled is None:
            return module
        if compiled is not self._made_for:
            self._made_for, self._call = compiled, self._compile_like(compiled, module)
        return self._call or module

    def listen(self, module: nn.Module, *, owner: object) -> None:
        """Catch graphs of ``torch.compile(m)``, which compiles hooks with the module, as long as ``owner`` lives."""
        inside = _torch.optimized_module(module)
        if inside is not None:
            handle = inside.register_forward_pre_hook(_Hook(self._mark))
            weakref.finalize(owner, handle.remove).atexit = False

    def _compile_like(self, compiled: object, module: nn.Module) -> Callable[..., Any] | None:
        """Compile a call of ``module`` like ``compiled``, since ``m.compile()`` compiles each hook by itself."""
        mark = self._mark

        def call(*args: Any, **kwargs: Any) -> Any:
            catch_graph(mark)
            return _torch.call_with_hooks(module, *args, **kwargs)

        # Dynamo counts how often it has compiled a code object, so each module needs one of its own.
        call.__code__ = call.__code__.replace()
        return cast("Callable[..., Any] | None", _torch.compile_like(compiled, call))
