"""Seeing to it that a backward of forward's output is noticed, even of one that leads to no parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.profiler import record_function

from paceline import _torch
from paceline.outputs import find_tensors, first_leaf_node, first_param_node, tie_to_graph, unreachable_params
from paceline.reducer import Reducer
from paceline.step import ForwardToken

Probes = Sequence[tuple[Tensor, Node | None]]
"""Tensors that a backward can start from, each with a leaf by which to know that it does."""


class Lookout:
    """Tells ``reducer`` of backwards that begin at what forward returned."""

    def __init__(self, reducer: Reducer, *, device: torch.device) -> None:
        self._reducer = reducer
        self._device = device
        # Made on first use: a tensor kept for every wrapper would be one too many for most.
        self._anchor: Tensor | None = None

    def watch(self, output: Any, *, every: bool, find_unused: bool) -> Any:
        """Watch ``output``; what to return in its place.

        ``every``: also those of its tensors that lead to no parameter. ``find_unused``: see what none of them leads to.
        """
        probes = self._probe(output)
        if every:
            leads = [probe for _, probe in probes if probe is not None]
            if len(leads) < len(probes) or not leads:
                # Some output, or all of them, leads to no parameter: unused on this rank, or hidden in a reentrant
                # checkpoint. A backward of it must be noticed all the same.
                stray = {id(tensor) for tensor, probe in probes if probe is None}
                anchor = self._anchor_tensor()
                output = tie_to_graph(output, anchor, lambda tensor: not leads or id(tensor) in stray)
                probes = self._probe(output)
        self._notice(probes, find_unused=find_unused)
        return output

    def watch_graph(self, outputs: Sequence[Tensor], *, own: Sequence[Tensor], find_unused: bool) -> None:
        """Watch what a compiled graph returned: what leads to a parameter, and of the wrapper's ``own`` all."""
        # Those cannot be tied to the anchor any more: whatever leaf they lead to has to do.
        strays = {id(tensor) for tensor in own}
        probes = [
            (tensor, first_leaf_node(tensor) if probe is None and id(tensor) in strays else probe)
            for tensor, probe in self._probe(outputs)
        ]
        self._notice([pair for pair in probes if pair[1] is not None], find_unused=find_unused)

    def _notice(self, probes: Probes, *, find_unused: bool) -> None:
        reducer = self._reducer
        token = ForwardToken()
        for tensor, probe in probes:
            if tensor.grad_fn is not None and probe is not None:
                reducer.forwards.add(token)
                tensor.grad_fn.register_prehook(_backward_notice(weakref.ref(reducer), token, probe))
        if find_unused:
            with record_function("search_unused_parameters"):
                reducer.expect_unused(unreachable_params([tensor for tensor, _ in probes], reducer.roster.params))

    def _probe(self, output: Any) -> Probes:
        is_reduced = self._reducer.slots.has
        anchor = self._anchor
        return [
            (tensor, first_param_node(tensor, lambda leaf: leaf is anchor or is_reduced(leaf)))
            for tensor in find_tensors(output)
            if tensor.requires_grad
        ]

    def _anchor_tensor(self) -> Tensor:
        if self._anchor is None:
            self._anchor = torch.zeros((), device=self._device, requires_grad=True)
        return self._anchor


def _backward_notice(ref: weakref.ref[Reducer], token: ForwardToken, probe: Node) -> Callable[[Any], None]:
    """A hook for an output's node, which keeps ``token`` alive: a backward that would reach ``probe`` has begun."""

    @_torch.unseen_by_compiler
    def noticed(grads: Any) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.output_needed(token, probe)

    return noticed
