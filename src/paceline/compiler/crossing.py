"""Where values must not be handed from one part of a graph to another.

[Note: memory across cuts]
A part is compiled for inputs that each have memory of their own, with the shapes that Dynamo knows at the end of the
graph. So a graph is not cut where two values cross that share memory which the graph changes (a tensor and a view of
it, say): a compiler would go on with the old contents of the other. Nor is it cut between a value and an operator that
changes its shape in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from paceline import _torch

SHARED = "values that share memory, which the graph changes, must not be handed to another part"
RESHAPED = "a shape is changed in place, and must not be between two parts"
_RESHAPING = {"as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_"}
_RESHAPING |= {"t_", "transpose_", "unsqueeze_"}


def value_of(node: fx.Node) -> Any:
    """What stands for the result of ``node`` while it is compiled: a tensor without memory, a symbolic number."""
    return node.meta.get("example_value", node.meta.get("val"))


def tensors_of(node: fx.Node) -> list[tuple[int, Tensor]]:
    """The tensors that stand for the result of ``node``, each with the number of its memory."""
    value = value_of(node)
    found = [each for each in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(each, Tensor)]
    return [(memory, each) for each in found if (memory := _torch.memory_of(each)) is not None]


def changed_memory(graph: fx.Graph) -> set[int]:
    """What the graph changes in place: Dynamo has done it to the tensors without memory, which count it."""
    return {memory for node in graph.nodes for memory, tensor in tensors_of(node) if tensor._version}


def obstacles(graph: fx.Graph, position: Mapping[fx.Node, int]) -> list[str]:
    """For each operator why there can be no cut in front of it, going by what would cross; "" if there can."""
    found = [""] * len(position)
    for start, end in _shared(graph, position):
        found[start + 1 : end + 1] = [SHARED] * (end - start)
    for start, end in _reshaped(graph, position):
        found[start + 1 : end + 1] = [RESHAPED] * (end - start)
    return found


def _shared(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Between which operators two values are alive that share memory which is changed somewhere."""
    alive: dict[int, list[tuple[int, int]]] = {}
    for node in graph.nodes:
        start, end = _start(node, position), _last_use(node, position)
        for memory, _ in tensors_of(node) if end > start else ():
            alive.setdefault(memory, []).append((start, end))
    for memory in changed_memory(graph):
        spans = sorted(alive.get(memory, ()))
        for n, (_, end) in enumerate(spans):
            yield from ((later, min(end, last)) for later, last in spans[n + 1 :] if later < end)


def _reshaped(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Between which operators a value is alive whose shape is not what it is said to be."""
    for node, place in position.items():
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name not in _RESHAPING or not node.all_input_nodes:
            continue
        value = value_of(node)
        for source in graph.nodes:
            if source is not node.args[0] and (value is None or value_of(source) is not value):
                continue
            if source.op == "placeholder":
                # It is given to each part as it was before the first.
                yield -1, max(place, _last_use(source, position))
            elif _start(source, position) < place:
                yield _start(source, position), place


def _start(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    source = node.args[0] if node.target is operator.getitem else None
    # A member of a tuple is taken out where the tuple is made.
    is_member = isinstance(source, fx.Node) and isinstance(value_of(source), (tuple, list))
    return position.get(source if is_member else node, -1)  # type: ignore[arg-type]


def _last_use(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    is_sequence = isinstance(value_of(node), (tuple, list))
    users = [user for user in node.users if not (is_sequence and user.target is operator.getitem)]
    last = len(position) - 1
    return max((position.get(user, last) for user in users), default=-1)
