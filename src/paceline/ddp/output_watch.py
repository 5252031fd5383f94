"""Noticing a backward that begins at forward's output, even at an output that leads to no parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.profiler import record_function

from paceline import _torch
from paceline.ddp.arguments import Switches
from paceline.gradients.outputs import find_tensors, first_leaf_node, first_param_node, tie_to_graph, unreachable_params
from paceline.reduction.phase import ForwardToken
from paceline.reduction.reducer import Reducer


class Probe(NamedTuple):
    """A tensor of an output that a backward can start from, and a leaf by which that backward is known."""

    output: Tensor
    tensor: Tensor
    """It is ``output`` itself. Inside a transform of ``torch.func`` it is the tensor that the transform has wrapped."""
    leaf: Node | None


class OutputWatch:
    """Tells ``reducer`` of backwards that begin at what forward returned."""

    def __init__(self, reducer: Reducer, switches: Switches, *, device: torch.device) -> None:
        self._reducer = reducer
        self._switches = switches
        self._device = device
        # It is made on first use, as most wrappers do not need one.
        self._anchor: Tensor | None = None

    def watch(self, output: Any, *, every: bool) -> Any:
        """Watch ``output``, and return what the caller is to return in its place.

        With ``every``, tensors that lead to no parameter are watched too.
        """
        probes = self._probe(output)
        if every:
            leads = [probe.leaf for probe in probes if probe.leaf is not None]
            if len(leads) < len(probes) or not leads:
                # Some output, or all of them, leads to no parameter: this rank does not use any, or a reentrant
                # checkpoint hides it. A backward of that output must be noticed all the same.
                stray = {id(probe.output) for probe in probes if probe.leaf is None}
                anchor = self._anchor_tensor()
                output = tie_to_graph(output, anchor, lambda tensor: not leads or id(tensor) in stray)
                probes = self._probe(output)
        self._notice(probes)
        return output

    def watch_graph(self, outputs: Sequence[Tensor], *, own: Sequence[Tensor]) -> None:
        """Watch what a compiled graph returned: what leads to a parameter, and all of the wrapper's ``own`` outputs."""
        # These can no longer be tied to the anchor, so any leaf that they lead to has to do.
        strays = {id(tensor) for tensor in own}
        probes = [
            probe._replace(leaf=first_leaf_node(probe.tensor))
            if probe.leaf is None and id(probe.output) in strays
            else probe
            for probe in self._probe(outputs)
        ]
        self._notice([probe for probe in probes if probe.leaf is not None])

    def _notice(self, probes: Sequence[Probe]) -> None:
        reducer, switches = self._reducer, self._switches
        token = ForwardToken()
        for _, tensor, leaf in probes:
            if tensor.grad_fn is not None and leaf is not None:
                reducer.forwards.add(token)
                tensor.grad_fn.register_prehook(_backward_notice(weakref.ref(reducer), token, leaf))
        if switches.find_unused_parameters and not switches.static_graph and reducer.enabled:
            with record_function("search_unused_parameters"):
                reducer.expect_unused(unreachable_params([probe.tensor for probe in probes], reducer.roster.params))

    def _probe(self, output: Any) -> list[Probe]:
        is_reduced = self._reducer.slots.has
        anchor = self._anchor
        return [
            Probe(given, tensor, first_param_node(tensor, lambda leaf: leaf is anchor or is_reduced(leaf)))
            for given in find_tensors(output)
            if (tensor := _torch.below_transforms(given)).requires_grad
        ]

    def _anchor_tensor(self) -> Tensor:
        if self._anchor is None:
            self._anchor = torch.zeros((), device=self._device, requires_grad=True)
        return self._anchor


def _backward_notice(ref: weakref.ref[Reducer], token: ForwardToken, leaf: Node) -> Callable[[Any], None]:
    """Make a hook for an output's node that reports a backward which will reach ``leaf``. It keeps ``token`` alive."""

    @_torch.unseen_by_compiler
    def noticed(grads: Any) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.output_needed(token, leaf)

    return noticed
