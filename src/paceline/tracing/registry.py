"""What a row is: one thing of torch's distributed package, or of hooks, that the compiler learns from us.

A row has a subject (what users write), the form it takes in a graph, and knows how to put itself in place. The rows
stand in the files of what they are about, in tuples named ``ROWS``. ``installation`` collects and installs them. To add
one, see CONTRIBUTING.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline import _torch


@dataclasses.dataclass(frozen=True)
class Row(abc.ABC):
    """A thing that is made traceable."""

    subject: str
    """The thing as people write it."""
    form: str
    """What is in the graph in its place, and what the graph then depends on; this is a line of the docs."""

    @abc.abstractmethod
    def install(self) -> None:
        """Make it traceable."""


@dataclasses.dataclass(frozen=True)
class FunctionRow(Row):
    """A function that is traced by way of another one, of the same signature, in plain Python."""

    original: Callable[..., Any]
    traced: Callable[..., Any]
    is_checked: bool = True
    """Whether torch compares the signatures. It cannot do so if a default is the group at the moment of import."""

    def install(self) -> None:
        torch.compiler.substitute_in_graph(self.original, skip_signature_check=not self.is_checked)(self.traced)


@dataclasses.dataclass(frozen=True)
class OverrideRow(Row):
    """A function row for a function or class whose own rule in torch is not enough."""

    original: Any
    traced: Callable[..., Any]

    def install(self) -> None:
        _torch.trace_instead(self.original, self.traced)


@dataclasses.dataclass(frozen=True)
class AroundRow(Row):
    """An override row whose ``traced`` function calls ``torchs``, which torch traces as it would the original."""

    original: Any
    traced: Callable[..., Any]
    torchs: Callable[..., Any]

    def install(self) -> None:
        _torch.trace_as(self.torchs, self.original)
        _torch.trace_instead(self.original, self.traced)


@dataclasses.dataclass(frozen=True)
class AnswerRow(Row):
    """A function of ours that is called while tracing, on the real object; its answer is a constant of the graph."""

    function: Callable[[Any], Any]

    def install(self) -> None:
        _torch.answer_while_tracing(self.function)


@dataclasses.dataclass(frozen=True)
class MembersRow(Row):
    """What may be read of an object of an opaque type, beyond what torch lets the compiler read."""

    kind: type
    constant: frozenset[str] = frozenset()
    """Members that are read while tracing and are constants of the graph."""
    traced: frozenset[str] = frozenset()
    """Methods that are traced into."""

    def install(self) -> None:
        _torch.allow_members(self.kind, constant=self.constant, traced=self.traced)


@dataclasses.dataclass(frozen=True)
class RefusalRow(Row):
    """A function that is not traced: the graph breaks there, with a reason."""

    original: Any
    explanation: str
    hints: tuple[str, ...]

    def install(self) -> None:
        _torch.refuse_in_graph(self.original, name=self.subject, explanation=self.explanation, hints=list(self.hints))


@dataclasses.dataclass(frozen=True)
class EnterRefusalRow(RefusalRow):
    """Objects of a type, ``original``, that are not traced as context managers."""

    def install(self) -> None:
        _torch.refuse_to_enter(self.original, name=self.subject, explanation=self.explanation, hints=list(self.hints))


@dataclasses.dataclass(frozen=True)
class SpecialRow(Row):
    """Anything else."""

    action: Callable[[], None]

    def install(self) -> None:
        self.action()


def stand_in() -> Callable[..., Any]:
    """A function that stands in traced code for one of torch's, as torch itself traces it (see :class:`AroundRow`)."""

    def never_called(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    return never_called


def functions(module: Any, here: Mapping[str, Any], forms: Mapping[str, str]) -> tuple[Row, ...]:
    """A function row for each name of ``forms``: a function of ``module``, and one of the same name in ``here``."""
    return tuple(FunctionRow(f"dist.{name}", form, getattr(module, name), here[name]) for name, form in forms.items())
