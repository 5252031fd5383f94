"""What is called instead of a compiled graph: the wrapper's part around it, in plain Python."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

Compiled = Callable[..., Any]
Announcement = Callable[[], bool]
"""Called before a run; True if it has said what it had to say."""


class Wrapper(Protocol):
    """What a wrapper does around a graph that its forward is part of."""

    def enter_graph(self) -> None:
        """Before: what precedes the module's forward."""

    def leave_graph(self, outputs: Sequence[Tensor]) -> None:
        """After: a backward of ``outputs`` must be noticed."""

    def graph_failed(self, error: BaseException) -> None:
        """It raised, or was interrupted."""

    def compilation_failed(self, error: BaseException) -> None:
        """It could not be made."""

    def outdate_graphs(self, reducer: object) -> None:
        """If ``reducer`` is the wrapper's own: graphs made for it are to be compiled anew."""


_wrappers: weakref.WeakValueDictionary[str, Wrapper] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Mark:
    """What graphs know a wrapper by. Dynamo guards its key: with another one it compiles anew."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.renew()

    def renew(self) -> None:
        """The wrapper has other parameters now, and graphs made before do not fit any more."""
        self.key = f"wrapper {next(_numbers)}"
        wrapper = self._wrapper()
        if wrapper is not None:
            _wrappers[self.key] = wrapper


def enter(key: str) -> None:
    wrapper = _wrappers.get(key)
    if wrapper is not None:
        wrapper.enter_graph()


def leave(key: str, outputs: Sequence[Tensor]) -> None:
    wrapper = _wrappers.get(key)
    if wrapper is not None:
        wrapper.leave_graph(outputs)


def compilation_failed(key: str, error: BaseException) -> None:
    wrapper = _wrappers.get(key)
    if wrapper is not None:
        wrapper.compilation_failed(error)


def outdate(reducer: object) -> None:
    """Have Dynamo compile anew what it compiled for the wrapper that ``reducer`` belongs to."""
    for wrapper in list(_wrappers.values()):
        wrapper.outdate_graphs(reducer)


class Run:
    """A compiled graph with what the wrappers in it do before and after.

    ``plain`` is the graph without taps. It runs should the parameters that are given not be those that were tapped:
    Dynamo looks at their shapes, not at their identity. The first time as it is, since a parameter that was replaced
    is known to the wrapper afterwards; then compiled, as blocks that share one graph stay others.
    """

    def __init__(
        self,
        compiled: Compiled,
        plain: Compiled,
        *,
        marks: Sequence[tuple[str, str]],
        positions: Sequence[int],
        params: Sequence[Tensor],
        on_mismatch: Callable[[], None],
        compile_plain: Callable[[Compiled], Compiled] | None = None,
        announcement: Announcement | None = None,
    ) -> None:
        self._compiled = compiled
        self._plain = plain
        self._marks = marks
        self._positions = positions
        self._param_ids = [id(param) for param in params]
        self._on_mismatch = on_mismatch
        self._compile_plain = compile_plain
        self._mismatches = 0
        self._announcement = announcement

    def __call__(self, *args: Any) -> Any:
        run = self._compiled
        if [id(args[position]) for position in self._positions] != self._param_ids:
            self._on_mismatch()
            self._mismatches += 1
            if self._mismatches > 1 and self._compile_plain is not None:
                self._plain, self._compile_plain = self._compile_plain(self._plain), None
            run = self._plain
        if self._announcement is not None and self._announcement():
            self._announcement = None
        if not self._marks:
            return run(*args)
        entered: list[str] = []
        try:
            for kind, key in self._marks:
                if kind == "enter":
                    entered.append(key)
                    enter(key)
            outputs = run(*args)
            tensors = [output for output in outputs if isinstance(output, Tensor) and output.requires_grad]
            for kind, key in self._marks:
                if kind == "leave":
                    leave(key, tensors)
                    if key in entered:
                        entered.remove(key)
        except BaseException as error:
            for key in reversed(entered):
                with contextlib.suppress(KeyError):
                    _wrappers[key].graph_failed(error)
            raise
        return outputs
