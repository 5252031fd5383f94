"""Putting taps into a graph that Dynamo has captured, and taking the wrapper's marks out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paceline import _torch
from paceline.compiler import ops
from paceline.compiler import tap as taps
from paceline.compiler.crossing import changed_memory, tensors_of
from paceline.compiler.run import GraphMark
from paceline.reducer import Reducer


@dataclass
class Tapped:
    """What became of a graph. If parameters are tapped, it has one more input, the last: the number of a binding."""

    gm: fx.GraphModule
    positions: list[int] = field(default_factory=list)
    """Which inputs are tapped parameters."""
    groups: list[list[str]] = field(default_factory=list)
    """The names of those that are reported together."""
    untapped: dict[str, str] = field(default_factory=dict)
    """Parameters that some wrapper reduces and that have no tap all the same: name and reason."""
    reducers: list[Reducer] = field(default_factory=list)


def take_marks(graph: fx.Graph) -> list[GraphMark]:
    """Remove the marks of wrappers' forwards, and tell which there were."""
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
    """``nodes``, and all that is made of them."""
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
    """Let the parameters among the inputs that some wrapper reduces pass through taps, in a copy of the graph."""
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
            # What is tapped is a view that autograd lets nobody change, and that an update of the parameter outdates.
            reason = "forward changes it in place"
        if reason is not None:
            done.untapped[reducer.slots.of(value).name] = reason
            continue
        node_of[id(value)] = node
        by_reducer.setdefault(reducer, []).append(value)
        done.positions.append(position)
    if not node_of:
        return done
    # Dynamo looks at the inputs of its own once more.
    graph, copy_of = _copy(gm.graph)
    place_of = {key: place for place, key in enumerate(node_of)}
    with graph.inserting_before(graph.find_nodes(op="placeholder")[-1].next):
        binding = graph.placeholder("paceline_binding")
        # From nowhere that the user can see.
        _torch.set_source(binding, None)
        for reducer, params in by_reducer.items():
            for members in taps.group(reducer, params):
                nodes = [node_of[id(param)] for param in members]
                places = [place_of[id(param)] for param in members]
                tapped = graph.call_function(ops.tap, ([copy_of[node] for node in nodes], binding, places, taps.FORM))
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
    """Another graph like this one, and what stands in it for each node."""
    copied, copy_of = fx.Graph(), dict[fx.Node, fx.Node]()
    copied.output(copied.graph_copy(graph, copy_of))
    for node in graph.find_nodes(op="placeholder"):
        _torch.copy_source(node, copy_of[node])
    return copied, copy_of


def _uses_with_grad(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Who uses each input while gradients are recorded.

    What happens to a parameter without (an update in place, say) is to happen to the parameter itself.
    """
    uses: dict[fx.Node, list[fx.Node]] = {}
    for node, recording in grad_modes(graph):
        if recording and node.op != "output":
            for source in node.all_input_nodes:
                if source.op == "placeholder":
                    uses.setdefault(source, []).append(node)
    return uses


def grad_modes(graph: fx.Graph) -> Iterator[tuple[fx.Node, bool]]:
    """Each node, and whether gradients are recorded there."""
    recording = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _torch.set_grad_enabled:
            recording = bool(node.args[0])
        yield node, recording
