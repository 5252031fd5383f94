"""Compiles the parts of a graph one after the other, and runs them as one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from paceline import _torch
from paceline.compiler.graph_values import value_of
from paceline.compiler.split.cut import Cut
from paceline.compiler.split.subgraph import Subgraph

Compiled = Callable[..., Any]


def compile_subgraphs(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    parts: Sequence[Subgraph],
    cuts: Sequence[Cut],
    *,
    fake_inputs: _torch.FakeInputs,
    compile_function: Callable[..., Compiled],
) -> list[Compiled]:
    """Compile each part for inputs that are laid out as the parts before it will lay them out.

    A compiler may choose other strides, as inductor does for convolutions. Code that was compiled for the original
    strides would then be wrong.
    """
    values = {
        node: fake_inputs.of(value)
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    }
    compiled: list[Compiled] = []
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        module = _torch.make_graph_module(gm, part.graph, name=f"{type(gm).__name__}_part{number}")
        _torch.copy_what_dynamo_says(gm, module, reason=None if is_last else str(cuts[number]))
        inputs = [values[node] for node in part.inputs]
        for placeholder, value in zip(part.placeholders, inputs, strict=True):
            placeholder.meta["example_value"] = value
        context = _torch.SubgraphContext(fake_inputs)
        compiled.append(context.compile(compile_function, module, inputs, show_outputs=not is_last))
        outputs = None if is_last else context.outputs(compiled[-1], inputs)
        for node, output in zip(part.outputs, outputs or [None] * len(part.outputs), strict=True):
            strides = output.stride() if isinstance(output, Tensor) else None
            values[node] = fake_inputs.like(value_of(node), strides)
    return compiled


class Chain:
    """Calls compiled parts in order, and lets go of each value when no later part needs it."""

    def __init__(self, gm: fx.GraphModule, parts: Sequence[Subgraph], compiled: Sequence[Compiled]) -> None:
        output = next(iter(gm.graph.find_nodes(op="output")))
        nodes = list(gm.graph.find_nodes(op="placeholder"))
        nodes += [node for part in parts for node in part.outputs]
        attributes = [node for node in output.all_input_nodes if node.op == "get_attr"]
        self._n_results = len(nodes) - len(gm.graph.find_nodes(op="placeholder"))
        self._attributes = [operator.attrgetter(str(node.target))(gm) for node in attributes]
        slots = {node: n for n, node in enumerate(nodes + attributes)}
        self._slots = slots
        self._output = output.args[0]
        last_use = {slots[node]: n for n, part in enumerate(parts) for node in part.inputs}
        kept = {slots[node] for node in output.all_input_nodes}
        self._steps = [
            (
                run,
                [slots[node] for node in part.inputs],
                [slots[node] for node in part.outputs],
                [slot for slot, last in last_use.items() if last == n and slot not in kept],
            )
            for n, (part, run) in enumerate(zip(parts, compiled, strict=True))
        ]

    def __call__(self, *args: Any) -> Any:
        values: list[Any] = [*args, *[None] * self._n_results, *self._attributes]
        for run, inputs, outputs, done in self._steps:
            results = run(*[values[slot] for slot in inputs])
            for slot, result in zip(outputs, results, strict=True):
                values[slot] = result
            del results
            for slot in done:
                values[slot] = None
        return map_arg(self._output, lambda node: values[self._slots[node]])
