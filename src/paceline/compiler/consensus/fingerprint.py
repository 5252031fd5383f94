"""What a graph is made of, in lines that can be compared between ranks.

A line names a node's operation and where its inputs come from. It leaves out numbers and the index of a device: a
rank's own number, its sizes and its offsets stand in graphs as constants, and are meant to differ. It leaves out the
keys of wrappers in marks, which are not compiled, and the names of groups, since ranks may be in different ones.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from paceline import _torch
from paceline.compiler.consensus.collectives import Collective
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
    ranks: tuple[int, ...] | None
    """If it is a collective, the ranks that take part in it; empty if it is not known which."""


@dataclass(frozen=True)
class Fingerprint:
    """A graph, node by node."""

    lines: tuple[GraphLine, ...]

    @property
    def exact_digest(self) -> str:
        """A digest that is equal for graphs that do not differ at all."""
        return _digest(line.exact for line in self.lines)

    @property
    def collectives(self) -> list[Collective]:
        return [Collective(n, line.ranks) for n, line in enumerate(self.lines) if line.ranks is not None]

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


def first_difference(nodes_of_rank: Sequence[Sequence[str]]) -> int | None:
    """The first node in which some rank differs from rank 0; None if there is none."""
    ours = nodes_of_rank[0]
    found = []
    for theirs in nodes_of_rank[1:]:
        differing = (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        if ours != theirs:
            found.append(next(differing, min(len(ours), len(theirs))))
    return min(found, default=None)


def _line(node: fx.Node, numbers: dict[fx.Node, int]) -> GraphLine:
    name = _target(node)
    is_mark = name.startswith(_MARKS)
    is_collective = node.op == "call_function" and name.startswith(_collectives())
    groups = _groups(node) if is_collective else {}
    parts = (node.args, node.kwargs)
    hidden = dict.fromkeys(groups, "group")
    text = f"{node.op} {name}{_told(parts, numbers, exact=False, keyed=is_mark, names=hidden)}"
    shown = {group: f"{group!r} of ranks {list(ranks)}" for group, ranks in groups.items()}
    exact = f"{node.op} {name}{_told(parts, numbers, exact=True, keyed=is_mark, names=shown)}"
    if node.op == "placeholder":
        value = node.meta.get("example_value")
        text, exact = f"placeholder {_kind(value)}", f"placeholder {_example(value)}"
    ranks = next(iter(groups.values()), ()) if is_collective else None
    return GraphLine(text, exact, _user_line(node), ranks)


def _groups(node: fx.Node) -> dict[str, tuple[int, ...]]:
    """The groups that a collective names, with their ranks."""
    found = {}
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, str):
            # Other texts name reductions. A group may have been destroyed after the code was traced.
            with contextlib.suppress(ValueError):
                found[value] = tuple(dist.get_process_group_ranks(_torch.group_named(value)))
    return found


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


def _told(value: Any, numbers: dict[fx.Node, int], *, exact: bool, keyed: bool, names: Mapping[str, str]) -> str:
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
            return "key" if keyed else names.get(value, repr(value))
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
