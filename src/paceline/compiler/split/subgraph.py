"""Makes each part of a cut graph a graph of its own, with what it needs from the parts before it.

[Note: what crosses a cut]
- Tensors and integers cross as they are. An integer that the shapes of a part depend on crosses even if no operator of
  the part names it, since a compiler has to find where a symbol comes from.
- Floats and booleans do not cross, since AOTAutograd takes none as an input. The part that uses them computes them
  again. A float that was read from a tensor crosses as a tensor, because the tensor that it was read from may have
  changed.
- Tuples and lists are taken apart in front of the cut.
- ``get_attr`` nodes, such as the subgraphs of higher-order operators, are copied to every part that uses them.
- Contexts (autocast, whether gradients are recorded) are left where a part ends and entered anew where the next one
  begins.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from paceline import _torch
from paceline.compiler.graph_values import value_of
from paceline.compiler.split.cut import Body


class Subgraph:
    """A run of operators as a graph of its own."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes
        self.inputs: list[fx.Node] = []
        """The nodes of the whole graph whose values it needs, in the order of its placeholders."""
        self.outputs: list[fx.Node] = []
        """The nodes of the whole graph whose values it gives to others."""
        self.graph = fx.Graph()
        self.placeholders: list[fx.Node] = []


def make_subgraphs(graph: fx.Graph, body: Body, positions: Sequence[int]) -> list[Subgraph]:
    """Cut ``graph`` in front of the operators with these numbers.

    Nodes are added to ``graph`` itself, which goes on to compute the same.
    """
    home = _find_homes(body, positions)
    _take_sequences_apart(graph, home)
    _wrap_floats(graph, home)
    parts = [Subgraph([]) for _ in range(len(positions) + 1)]
    for node in graph.nodes:
        if node in home:
            parts[home[node]].nodes.append(node)
    binders = _binders(graph)
    order = {node: n for n, node in enumerate(graph.nodes)}
    for number, part in enumerate(parts):
        needed = _inputs(part.nodes, binders, lambda node, n=number: home.get(node, -1) < n)
        part.inputs = sorted(needed, key=lambda node: (not isinstance(value_of(node), torch.SymInt), order[node]))
    taken = {node for part in parts for node in part.inputs}
    taken.update(next(iter(graph.find_nodes(op="output"))).all_input_nodes)
    contexts = _Contexts()
    for part in parts:
        part.outputs = [node for node in part.nodes if node in taken]
        _build(part, contexts, is_last=part is parts[-1])
    return parts


# -- who computes what -------------------------------------------------------------------------------------


def _find_homes(body: Body, positions: Sequence[int]) -> dict[fx.Node, int]:
    """The number of the part that each operator is in."""
    home: dict[fx.Node, int] = {}
    ends = [*positions, len(body.nodes)]
    number = 0
    for position, node in enumerate(body.nodes):
        while position >= ends[number]:
            number += 1
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in home and isinstance(value_of(source), (tuple, list)):
            home[node] = home[source]
        else:
            home[node] = number
    return home


def _take_sequences_apart(graph: fx.Graph, home: dict[fx.Node, int]) -> None:
    """Let users of a tuple or list in other parts take its members instead."""
    for node in list(home):
        members = value_of(node)
        if not isinstance(members, (tuple, list)):
            continue
        abroad = [user for user in node.users if home.get(user) != home[node]]
        if not abroad:
            continue
        with graph.inserting_after(node):
            taken = [_member(graph, node, n, member) for n, member in enumerate(members)]
        for item in taken:
            if isinstance(item, fx.Node):
                home[item] = home[node]
        for user in abroad:
            user.args = map_arg(user.args, lambda arg: taken if arg is node else arg)  # noqa: B023
            user.kwargs = map_arg(user.kwargs, lambda arg: taken if arg is node else arg)  # noqa: B023


def _member(graph: fx.Graph, node: fx.Node, number: int, value: Any) -> Any:
    if not isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, tuple, list)):
        return value
    item = graph.call_function(operator.getitem, (node, number))
    item.meta["example_value"] = value
    return item


def _is_repeated(node: fx.Node) -> bool:
    """Whether the result cannot cross a cut, so that it is computed again."""
    return node.op != "placeholder" and isinstance(value_of(node), (torch.SymFloat, torch.SymBool, float, bool))


def _wrap_floats(graph: fx.Graph, home: dict[fx.Node, int]) -> None:
    """Let floats that were read from a tensor cross as a tensor.

    An input that is used only for its number is left alone: Dynamo made it from a float attribute of the program.
    """
    for node in list(home):
        if node.target != "item" or not _is_repeated(node):
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source.op == "placeholder" and all(user.target == "item" for user in source.users):
            continue
        copies: dict[int, fx.Node] = {}
        for user in list(node.users):
            number = home.get(user, home[node])
            if number == home[node]:
                continue
            if number not in copies:
                with graph.inserting_after(node):
                    wrapped = graph.call_function(torch.scalar_tensor, (node,), {"dtype": torch.float64})
                with graph.inserting_after(wrapped):
                    copies[number] = graph.call_method("item", (wrapped,))
                wrapped.meta["example_value"] = _as_tensor(source)
                copies[number].meta = dict(node.meta)
                home[wrapped], home[copies[number]] = home[node], number
            user.replace_input_with(node, copies[number])


def _as_tensor(source: fx.Node) -> Any:
    value = value_of(source)
    return value.new_empty((), dtype=torch.float64, requires_grad=False)


# -- what a part needs -------------------------------------------------------------------------------------


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, (tuple, list)):
        return set().union(*map(_symbols, value))
    return _torch.free_symbols(value) if isinstance(value, (Tensor, torch.SymInt)) else set()


def _binders(graph: fx.Graph) -> dict[Any, fx.Node]:
    """For each symbol, the first node whose value it is."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, torch.SymInt) and len(symbols := _torch.free_symbols(value)) == 1:
            (symbol,) = symbols
            if value.node.expr == symbol:
                found.setdefault(symbol, node)
    return found


def _inputs(nodes: list[fx.Node], binders: dict[Any, fx.Node], is_earlier: Any) -> set[fx.Node]:
    own = set(nodes)
    found: set[fx.Node] = set()
    repeated: set[fx.Node] = set()

    def need(node: fx.Node) -> None:
        if node in own or node in repeated or node.op == "get_attr" or node.target is _torch.enter_autocast:
            return
        if _is_repeated(node):
            repeated.add(node)
            for source in node.all_input_nodes:
                need(source)
        else:
            found.add(node)

    for node in nodes:
        for source in node.all_input_nodes:
            need(source)
    for symbol in set().union(*(_symbols(value_of(node)) for node in (*nodes, *found))):
        binder = binders.get(symbol)
        if binder is not None and binder not in own and is_earlier(binder):
            found.add(binder)
    return found


# -- contexts ----------------------------------------------------------------------------------------------


class _Contexts:
    """The contexts that are open at some operator of the whole graph."""

    def __init__(self) -> None:
        self._before = torch.is_grad_enabled()
        self._grad = self._before
        self._autocast: list[fx.Node] = []

    def note(self, node: fx.Node) -> None:
        if node.target is _torch.set_grad_enabled:
            self._grad = bool(node.args[0])
        elif node.target is _torch.enter_autocast:
            self._autocast.append(node)
        elif node.target is _torch.exit_autocast:
            self._autocast.remove(node.args[0])  # type: ignore[arg-type]

    def enter(self, graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Enter the open contexts in ``graph``; yields the nodes that entered them, each with its copy."""
        for node in self._autocast:
            yield node, graph.node_copy(node)
        if self._grad != self._before:
            graph.call_function(_torch.set_grad_enabled, (self._grad,))

    def leave(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        if self._grad != self._before:
            graph.call_function(_torch.set_grad_enabled, (self._before,))
        for node in reversed(self._autocast):
            graph.call_function(_torch.exit_autocast, (copies[node],))


# -- its graph ---------------------------------------------------------------------------------------------


def _build(part: Subgraph, contexts: _Contexts, *, is_last: bool) -> None:
    graph = part.graph
    copies: dict[fx.Node, fx.Node] = {}
    for node in part.inputs:
        placeholder = graph.placeholder(node.name, type_expr=node.type)
        # A value that crosses is an input in this part only. So nothing but the value is taken over from its node.
        placeholder.meta = dict(node.meta) if node.op == "placeholder" else {"example_value": value_of(node)}
        _torch.copy_source(node, placeholder)
        copies[node] = placeholder
        part.placeholders.append(placeholder)
    copies.update(contexts.enter(graph))

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in part.nodes:
        copied(node)
        contexts.note(node)
    if not is_last:
        contexts.leave(graph, copies)
    graph.output(tuple(copies[node] for node in part.outputs))
