"""What was compiled for a wrapper, and why something was not."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from paceline.reduction.reducer import Reducer


@dataclass
class GraphRecord:
    """One graph that was given to a backend."""

    backend: str
    n_nodes: int
    taps: list[list[str]] = field(default_factory=list)
    """The names of the parameters that are reported together."""
    untapped: dict[str, str] = field(default_factory=dict)
    """Parameters among its inputs that are not reported, and why not. Autograd brings their gradients."""
    starts: bool = False
    """Whether the forward of the wrapper begins in it."""
    cuts: list[str] = field(default_factory=list)
    """Where it was cut into parts, and why; only with ``split=True``."""


_records: weakref.WeakKeyDictionary[Reducer, list[GraphRecord]] = weakref.WeakKeyDictionary()


def note(reducer: Reducer, record: GraphRecord) -> None:
    _records.setdefault(reducer, []).append(record)


def records_of(reducer: Reducer) -> list[GraphRecord]:
    """The graphs that report gradients to ``reducer``, in the order in which they were compiled."""
    return list(_records.get(reducer, []))
