"""Putting taps into a graph that Dynamo has captured, and taking the wrapper's marks out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from paceline import _torch
from paceline.compiler.graph_values import changed_memory, grad_modes, tensors_of
from paceline.compiler.taps import ops
from paceline.compiler.taps import tap as taps
from paceline.compiler.taps.graph_run import GraphMark
from paceline.reduction.reducer import Reducer


@dataclass
class Tapped:
    """What became of a graph. If parameters are tapped, it has one more input, the last: the number of a binding."""

    gm: fx.GraphModule
    positions: list[int] = field(default_factory=list)
    """Which inputs are tapped parameters."""
    groups: list[list[str]] = field(default_factory=list)
    """The names of the parameters that are reported together."""
    untapped: dict[str, str] = field(default_factory=dict)
    """Parameters that some wrapper reduces and that have no tap, each with the reason."""
    reducers: list[Reducer] = field(default_factory=list)


def take_marks(graph: fx.Graph) -> list[GraphMark]:
    """Remove the marks of wrappers' forwards from the graph, and return them."""
    marks: list[GraphMark] = []
    inputs = list(graph.find_nodes(op="placeholder"))
    (output,) = graph.find_nodes(op="output")
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (ops.enter, ops.leave):
            continue
        if node.target is ops.enter:
            marks.append(GraphMark(node.args[0]))
        else:
            left, key = node.args
            behind = _all_behind(left)
            marks.append(
                GraphMark(
                    key,
                    leaves=True,
                    inputs=tuple(n for n, each in enumerate(inputs) if each in left),
                    outputs=tuple(n for n, each in enumerate(output.args[0]) if each in behind),
                )
            )
        graph.erase_node(node)
    return marks


def _all_behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """``nodes``, and every node that is computed from them."""
    found = set(nodes)
    stack = list(found)
    while stack:
        new = stack.pop().users.keys() - found
        found |= new
        stack += new
    return found


def is_empty(graph: fx.Graph) -> bool:
    """Whether there is nothing to compute."""
    return all(node.op in ("placeholder", "output") for node in graph.nodes)


def is_tapped(graph: fx.Graph) -> bool:
    return bool(graph.find_nodes(op="call_function", target=ops.tap))


def put_taps(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Tapped:
    """Copy the graph. In the copy, inputs that are parameters which some wrapper reduces pass through taps."""
    done = Tapped(gm)
    node_of: dict[int, fx.Node] = {}
    by_reducer: dict[Reducer, list[Tensor]] = {}
    uses = _uses_with_grad(gm.graph)
    changed = changed_memory(gm.graph)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        if not isinstance(value, Tensor) or not value.requires_grad or not value.is_leaf or not uses.get(node):
            continue
        reducer = taps.owner_of(value)
        if reducer is None or id(value) in node_of:
            continue
        if reducer not in done.reducers:
            done.reducers.append(reducer)
        reason = reducer.why_not_early(value)
        if reason is None and any(memory in changed for memory, _ in tensors_of(node)):
            # A tap returns a view. Autograd lets nobody change it, and a change of the parameter outdates it.
            reason = "forward changes it in place"
        if reason is not None:
            done.untapped[reducer.slots.of(value).name] = reason
            continue
        node_of[id(value)] = node
        by_reducer.setdefault(reducer, []).append(value)
        done.positions.append(position)
    if not node_of:
        return done
    # This works on a copy, since Dynamo looks at the inputs of its own graph once more.
    graph, copy_of = _copy(gm.graph)
    entry_of = {key: entry for entry, key in enumerate(node_of)}
    with graph.inserting_before(graph.find_nodes(op="placeholder")[-1].next):
        binding = graph.placeholder("paceline_binding")
        # It comes from nowhere that the user can see.
        _torch.set_source(binding, None)
        for reducer, params in by_reducer.items():
            for members in taps.group(reducer, params):
                nodes = [node_of[id(param)] for param in members]
                entries = [entry_of[id(param)] for param in members]
                copies = [copy_of[node] for node in nodes]
                tapped = graph.call_function(ops.tap, (copies, binding, entries, ops.VERSION))
                done.groups.append([reducer.slots.of(param).name for param in members])
                examples = [node.meta.get("example_value") for node in nodes]
                tapped.meta["example_value"] = examples
                for n, (node, example) in enumerate(zip(nodes, examples, strict=True)):
                    part = graph.call_function(operator.getitem, (tapped, n))
                    part.meta["example_value"] = example
                    for user in uses[node]:
                        copy_of[user].replace_input_with(copy_of[node], part)
    done.gm = _torch.make_graph_module(gm, graph, name=type(gm).__name__)
    _torch.copy_what_dynamo_says(gm, done.gm, reason=None)
    return done


def _copy(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of this graph, and the copy of each node."""
    copied, copy_of = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph, copy_of))
    for node in graph.find_nodes(op="placeholder"):
        _torch.copy_source(node, copy_of[node])
    return copied, copy_of


def _uses_with_grad(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that use each input while gradients are recorded.

    What happens while they are not recorded, such as an update in place, must happen to the parameter itself.
    """
    uses: dict[fx.Node, list[fx.Node]] = {}
    for node, recording in grad_modes(graph):
        if recording and node.op != "output":
            for source in node.all_input_nodes:
                if source.op == "placeholder":
                    uses.setdefault(source, []).append(node)
    return uses
