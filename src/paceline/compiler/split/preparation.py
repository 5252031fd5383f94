"""Moves operators that prepare a parameter, such as a cast, to where their result is used.

Mixed precision casts all parameters before the module runs. If that were their first use, no bucket would be complete
before backward has ended.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from paceline import _torch
from paceline.compiler.graph_values import grad_modes

_PREPARING = frozenset(["to", "type", "float", "double", "half", "bfloat16", "t"])


def bring_to_use(graph: fx.Graph, params: Collection[fx.Node]) -> None:
    """Move operators that only prepare one of ``params``, inputs of the graph, to the first operator that needs them.

    A parameter that something else uses is left alone, since that might change it. Nothing moves into or out of a
    context.
    """
    order = {node: float(n) for n, node in enumerate(graph.nodes)}
    state, depth = {}, 0
    for node, is_recording in grad_modes(graph):
        depth += _torch.region_step(node)
        state[node] = is_recording, depth
    prepared = {node for node in params if all(map(_prepares, node.users))}
    for node in graph.nodes:
        if _prepares(node) and node.all_input_nodes[0] in prepared:
            prepared.add(node)
    for node in reversed(list(graph.nodes)):
        if node not in prepared or node.op == "placeholder" or not node.users:
            continue
        user = min(node.users, key=order.__getitem__)
        if user.op != "output" and state[user] == state[node]:
            user.prepend(node)
            order[node] = order[user] - 1e-6


def _prepares(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in _PREPARING and len(node.all_input_nodes) == 1
