"""Where a value must not be handed from one part of a graph to another.

[Note: memory across cuts]
A part is compiled for inputs that each have memory of their own, and that have the shapes which Dynamo knows at the end
of the graph. So a graph is not cut where two values cross that share memory which the graph changes, such as a tensor
and a view of it: after a change of one, a compiler would go on with the old contents of the other. Nor is a graph cut
between a value and an operator that changes its shape in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping

from torch import fx

from paceline.compiler.graph_values import changed_memory, tensors_of, value_of

SHARED = "values that share memory, which the graph changes, must not be handed to another part"
RESHAPED = "a value whose shape is changed in place must not be handed to another part"
_RESHAPING = {"as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_"}
_RESHAPING |= {"t_", "transpose_", "unsqueeze_"}


def obstacles(graph: fx.Graph, position: Mapping[fx.Node, int]) -> list[str]:
    """For each operator, why there must be no cut in front of it; "" if no value that would cross forbids one."""
    found = [""] * len(position)
    for start, end in _shared(graph, position):
        found[start + 1 : end + 1] = [SHARED] * (end - start)
    for start, end in _reshaped(graph, position):
        found[start + 1 : end + 1] = [RESHAPED] * (end - start)
    return found


def _shared(graph: fx.Graph, position: Mapping[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """The spans of operators in which two values are alive that share memory which is changed somewhere."""
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
    """The spans of operators in which a value has another shape than the graph says."""
    for node, at in position.items():
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name not in _RESHAPING or not node.all_input_nodes:
            continue
        value = value_of(node)
        for source in graph.nodes:
            if source is not node.args[0] and (value is None or value_of(source) is not value):
                continue
            if source.op == "placeholder":
                # Each part is given the input as it was before the first part.
                yield -1, max(at, _last_use(source, position))
            elif _start(source, position) < at:
                yield _start(source, position), at


def _start(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    source = node.args[0] if node.target is operator.getitem else None
    # The members of a tuple are taken out in the part that makes the tuple.
    is_member = isinstance(source, fx.Node) and isinstance(value_of(source), (tuple, list))
    return position.get(source if is_member else node, -1)  # type: ignore[arg-type]


def _last_use(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    is_sequence = isinstance(value_of(node), (tuple, list))
    users = [user for user in node.users if not (is_sequence and user.target is operator.getitem)]
    last = len(position) - 1
    return max((position.get(user, last) for user in users), default=-1)
