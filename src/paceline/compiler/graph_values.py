"""What the nodes of a captured graph stand for: values, the memory they share, and whether gradients are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from paceline import _torch


def value_of(node: fx.Node) -> Any:
    """What stands for the result of ``node`` while it is compiled: a tensor without memory, or a symbolic number."""
    return node.meta.get("example_value", node.meta.get("val"))


def tensors_of(node: fx.Node) -> list[tuple[int, Tensor]]:
    """The tensors that stand for the result of ``node``, each with the number of its memory."""
    value = value_of(node)
    found = [each for each in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(each, Tensor)]
    return [(memory, each) for each in found if (memory := _torch.memory_of(each)) is not None]


def changed_memory(graph: fx.Graph) -> set[int]:
    """The numbers of the memory that the graph changes in place.

    Dynamo has made the same changes to the tensors without memory, and each tensor counts its changes.
    """
    return {memory for node in graph.nodes for memory, tensor in tensors_of(node) if _torch.n_changes(tensor)}


def grad_modes(graph: fx.Graph) -> Iterator[tuple[fx.Node, bool]]:
    """Each node, and whether gradients are recorded there."""
    recording = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is _torch.set_grad_enabled:
            recording = bool(node.args[0])
        yield node, recording
