"""What is called instead of a compiled graph: the wrapper's part around it, in plain Python."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from paceline.compiler.taps.parameter_binding import Bindings

Compiled = Callable[..., Any]
Announcement = Callable[[], bool]
"""Called before each run, until it returns True."""


class Wrapper(Protocol):
    """What a wrapper does around a graph that its forward is part of."""

    def enter_graph(self) -> None:
        """Do what precedes the module's forward."""

    def leave_graph(self, outputs: Sequence[Tensor], *, own: Sequence[Tensor]) -> None:
        """Do what follows the module's forward.

        A backward of ``outputs`` must be noticed if it uses the wrapper's parameters. One of its ``own`` outputs must
        always be noticed.
        """

    def graph_failed(self, error: BaseException) -> None:
        """Hear that the graph raised or was interrupted."""

    def compilation_failed(self, error: BaseException) -> None:
        """Hear that the graph could not be compiled."""

    def outdate_graphs(self, reducer: object) -> None:
        """Have graphs compiled anew, if ``reducer`` is the wrapper's own."""


_wrappers: weakref.WeakValueDictionary[str, Wrapper] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Mark:
    """The sign by which graphs know a wrapper. Dynamo guards its key, and compiles anew when the key is another one."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.renew()

    def renew(self) -> None:
        """Take another key: the wrapper has other parameters now, which earlier graphs do not fit."""
        self.key = f"wrapper {next(_numbers)}"
        wrapper = self._wrapper()
        if wrapper is not None:
            _wrappers[self.key] = wrapper


def enter(key: str) -> None:
    wrapper = _wrappers.get(key)
    if wrapper is not None:
        wrapper.enter_graph()


def leave(key: str, outputs: Sequence[Tensor], *, own: Sequence[Tensor]) -> None:
    wrapper = _wrappers.get(key)
    if wrapper is not None:
        wrapper.leave_graph(outputs, own=own)


def compilation_failed(key: str, error: BaseException) -> None:
    wrapper = _wrappers.get(key)
    if wrapper is not None:
        wrapper.compilation_failed(error)


def outdate(reducer: object) -> None:
    """Have Dynamo compile anew what it compiled for the wrapper that ``reducer`` belongs to."""
    for wrapper in list(_wrappers.values()):
        wrapper.outdate_graphs(reducer)


@dataclass(frozen=True)
class GraphMark:
    """Where the forward of a wrapper begins in a graph, or ends."""

    key: str
    leaves: bool = False
    inputs: tuple[int, ...] = ()
    """For an end: which inputs of the graph are outputs of the wrapper, made by an earlier graph."""
    outputs: tuple[int, ...] = ()
    """For an end: which outputs of the graph are outputs of the wrapper, or are made of them."""


class Run:
    """A compiled graph, and what the wrappers in it do before and after. With ``bindings`` it takes one more input."""

    def __init__(
        self,
        compiled: Compiled,
        *,
        marks: Sequence[GraphMark],
        bindings: Bindings | None = None,
        announcement: Announcement | None = None,
    ) -> None:
        self._compiled = compiled
        self._entered = [mark.key for mark in marks if not mark.leaves]
        turn = {key: n for n, key in enumerate(self._entered)}
        # All wrappers are entered before the graph runs, each inside of the one before, so they are left in reverse.
        self._left = sorted((mark for mark in marks if mark.leaves), key=lambda mark: -turn.get(mark.key, -1))
        self._has_marks = bool(marks)
        self._bindings = bindings
        self._announcement = announcement

    def __call__(self, *args: Any) -> Any:
        if self._announcement is not None and self._announcement():
            self._announcement = None
        given = args if self._bindings is None else (*args, self._bindings.number(args))
        if not self._has_marks:
            return self._compiled(*given)
        entered: list[str] = []
        try:
            for key in self._entered:
                entered.append(key)
                enter(key)
            outputs = self._compiled(*given)
            for mark in self._left:
                came, own = [args[n] for n in mark.inputs], [outputs[n] for n in mark.outputs]
                leave(mark.key, _with_grad([*outputs, *came]), own=_with_grad([*own, *came]))
                if mark.key in entered:
                    entered.remove(mark.key)
        except BaseException as error:
            for key in reversed(entered):
                with contextlib.suppress(KeyError):
                    _wrappers[key].graph_failed(error)
            raise
        return outputs


def _with_grad(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]
