"""Putting taps into a graph that Dynamo has captured, and taking the wrapper's marks out."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from paceline import _torch
from paceline.compiler import ops
from paceline.compiler import tap as taps
from paceline.compiler.crossing import changed_memory, tensors_of
from paceline.reducer import Reducer


@dataclass
class Tapped:
    """What was done to a graph."""

    marks: list[tuple[str, str]] = field(default_factory=list)
    """("enter" or "leave", key of the wrapper), in order."""
    positions: list[int] = field(default_factory=list)
    """Which inputs are tapped parameters ..."""
    params: list[Tensor] = field(default_factory=list)
    """... and which those are."""
    groups: list[list[str]] = field(default_factory=list)
    """The names of those that are reported together."""
    untapped: dict[str, str] = field(default_factory=dict)
    """Parameters that some wrapper reduces and that have no tap all the same: name and reason."""
    reducers: list[Reducer] = field(default_factory=list)


def take_marks(graph: fx.Graph) -> list[tuple[str, str]]:
    """Remove the marks of wrappers' forwards, and tell which there were."""
    marks: list[tuple[str, str]] = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (ops.enter, ops.leave):
            marks.append(("enter" if node.target is ops.enter else "leave", node.args[0]))
            graph.erase_node(node)
    return marks


def is_tapped(graph: fx.Graph) -> bool:
    return bool(graph.find_nodes(op="call_function", target=ops.tap))


def put_taps(graph: fx.Graph, example_inputs: Sequence[Any]) -> Tapped:
    """Let the parameters among the inputs that some wrapper reduces pass through taps."""
    done = Tapped()
    placeholders = list(graph.find_nodes(op="placeholder"))
    node_of: dict[int, fx.Node] = {}
    by_reducer: dict[Reducer, list[Tensor]] = {}
    uses = _uses_with_grad(graph)
    changed = changed_memory(graph)
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
        done.params.append(value)
    if not placeholders or not node_of:
        return done
    with graph.inserting_before(placeholders[-1].next):
        for reducer, params in by_reducer.items():
            for members in taps.group(reducer, params):
                nodes = [node_of[id(param)] for param in members]
                key = taps.register_tap(reducer, members)
                tapped = graph.call_function(ops.tap, (nodes, key))
                done.groups.append([reducer.slots.of(param).name for param in members])
                examples = [node.meta.get("example_value") for node in nodes]
                tapped.meta["example_value"] = examples
                for n, (node, example) in enumerate(zip(nodes, examples, strict=True)):
                    part = graph.call_function(operator.getitem, (tapped, n))
                    part.meta["example_value"] = example
                    for user in uses[node]:
                        user.replace_input_with(node, part)
    return done


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
