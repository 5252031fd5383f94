"""What a graph is made of, in lines that can be compared between ranks.

A line names a node's operation and where its inputs come from. It leaves out numbers and the index of a device: a
rank's own number, its sizes and its offsets stand in graphs as constants, and are meant to differ. It leaves out the
keys of wrappers in marks, which are not compiled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from paceline import _torch
from paceline.compiler.taps import ops

_MARKS = tuple(map(_torch.name_of_target, (ops.enter, ops.leave)))
_TORCHS_COLLECTIVES = ("_c10d_functional", "c10d.")
_LINE_LIMIT = 400


@dataclass(frozen=True)
class GraphLine:
    """One node."""

    text: str
    """What is compared between ranks."""
    exact: str
    """The same with its numbers."""
    at: str
    """The line of the user's code that it comes from; empty if unknown."""
    is_collective: bool


@dataclass(frozen=True)
class Fingerprint:
    """A graph, node by node."""

    lines: tuple[GraphLine, ...]

    @property
    def exact_digest(self) -> str:
        """A digest that is equal for graphs that do not differ at all."""
        return _digest(line.exact for line in self.lines)

    @property
    def collectives(self) -> str:
        """A digest that is equal for graphs whose collectives are alike."""
        return _digest(line.text for line in self.lines if line.is_collective)

    def node_digests(self) -> list[str]:
        return [_digest([line.text])[:12] for line in self.lines]

    def tell(self, index: int) -> str:
        """Describe node ``index`` in words."""
        if index >= len(self.lines):
            return "nothing, its graph ends there"
        line = self.lines[index]
        return f"{line.exact[:_LINE_LIMIT]}{f' at {line.at}' if line.at else ''}"


def fingerprint(graph: fx.Graph) -> Fingerprint:
    """The fingerprint of ``graph`` as it is now. The graph may be changed afterwards."""
    numbers = {node: n for n, node in enumerate(graph.nodes)}
    return Fingerprint(tuple(_line(node, numbers) for node in graph.nodes))


def first_difference(nodes_of_rank: Sequence[Sequence[str]]) -> int:
    """The first node in which some rank differs from rank 0."""
    ours = nodes_of_rank[0]
    found = []
    for theirs in nodes_of_rank[1:]:
        differing = (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        if ours != theirs:
            found.append(next(differing, min(len(ours), len(theirs))))
    return min(found)


def _line(node: fx.Node, numbers: dict[fx.Node, int]) -> GraphLine:
    name = _target(node)
    is_mark = name.startswith(_MARKS)
    parts = (node.args, node.kwargs)
    text = f"{node.op} {name}{_told(parts, numbers, exact=False, keyed=is_mark)}"
    exact = f"{node.op} {name}{_told(parts, numbers, exact=True, keyed=is_mark)}"
    if node.op == "placeholder":
        value = node.meta.get("example_value")
        text, exact = f"placeholder {_kind(value)}", f"placeholder {_example(value)}"
    is_collective = node.op == "call_function" and name.startswith(_collectives())
    return GraphLine(text, exact, _user_line(node), is_collective)


@cache
def _collectives() -> tuple[str, ...]:
    """What the names of collectives begin with. Messages between two ranks are none: only those two have them."""
    # This is imported late, because it reads the files that the operators are named after.
    from paceline.tracing.operator_namespace import operators
    from paceline.tracing.ops import POINT_TO_POINT, STARTERS

    ours = (getattr(operators, name) for name in STARTERS if name not in POINT_TO_POINT)
    return (*_TORCHS_COLLECTIVES, *map(_torch.name_of_target, ours))


def _target(node: fx.Node) -> str:
    target = node.target
    if node.op == "placeholder":
        return ""
    if isinstance(target, str):
        return target
    return _torch.name_of_target(target)


def _told(value: Any, numbers: dict[fx.Node, int], *, exact: bool, keyed: bool) -> str:
    def tell(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{numbers[value]}"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(tell, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}: {tell(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice{tell((value.start, value.stop, value.step))}"
        if value is None or value is ... or isinstance(value, (bool, torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, str):
            return "key" if keyed else repr(value)
        if isinstance(value, torch.device):
            return str(value) if exact else value.type
        if isinstance(value, (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(value) if exact else type(value).__name__.removeprefix("Sym").lower()
        return type(value).__name__

    return tell(value)


def _kind(value: Any) -> str:
    return f"{value.dtype}, {value.dim()} dimensions" if isinstance(value, torch.Tensor) else type(value).__name__


def _example(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = tuple(map(str, value.stride())) if value.layout is torch.strided else ()
        return f"{value.dtype} {tuple(map(str, value.shape))} {strides} {value.device} {value.requires_grad}"
    return f"{type(value).__name__} {value}"


def _user_line(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    path, _, rest = lines[-1].removeprefix('File "').partition('", line ')
    return f"{path.rpartition('/')[2]}:{rest.partition(',')[0]}"


def _digest(texts: Any) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
