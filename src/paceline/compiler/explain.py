"""Shows a compiled step: its graphs, breaks and their reasons, and when in backward each bucket leaves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline import _torch
from paceline.compiler.backend import Backend, CompileFunction
from paceline.compiler.placement import Departure, departures, table
from paceline.compiler.record import GraphRecord, records_of
from paceline.errors import BadTypeError
from paceline.gradients.outputs import find_tensors
from paceline.reduction.reducer import Reducer


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo ended a graph and began another one. ``str()`` of it is a line."""

    reason: str
    file: str
    line: int
    count: int
    """How often Dynamo met it. It tries each of the functions around a break, and so meets it several times."""

    def __str__(self) -> str:
        place = f" at {self.file}:{self.line}" if self.file else ""
        return f"break{place} ({self.count}x): {self.reason.splitlines()[0]}"


@dataclass(frozen=True)
class Explanation:
    """What one step of a compiled wrapper is made of. ``str()`` of it is a table."""

    graphs: tuple[GraphRecord, ...]
    """The graphs that report gradients."""
    breaks: tuple[GraphBreak, ...]
    """Why Dynamo made more than one graph, and where."""
    departures: tuple[Departure, ...]
    untapped: dict[str, str]
    """Parameters that no graph reports, and why. Autograd brings their gradients when their graph's backward ends."""

    @property
    def total_bytes(self) -> int:
        return sum(departure.size_bytes for departure in self.departures)

    def started_bytes(self, fraction: float = 1.0) -> int:
        """The bytes that had started to move when this much of backward was done."""
        return sum(departure.size_bytes for departure in self.departures if departure.fraction < fraction)

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} graph(s) report gradients, {len(self.breaks)} graph break(s)"]
        for number, graph in enumerate(self.graphs):
            n_params = sum(map(len, graph.taps))
            lines.append(f"  graph {number}: {graph.n_nodes} nodes, {n_params} parameters in {len(graph.taps)} reports")
            lines += [f"    {reason}" for reason in graph.cuts]
        lines += [f"  {found}" for found in self.breaks]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.untapped.items():
            by_reason.setdefault(reason, []).append(name)
        lines += [f"  reported by no graph, as {reason}: {_some(names)}" for reason, names in by_reason.items()]
        lines += table(self.departures)
        return "\n".join(lines)


def explain(
    model: nn.Module,
    *inputs: Any,
    backend: str | CompileFunction = "aot_eager",
    split: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Compile ``model``, a wrapper, and run two steps of it on ``inputs``; on every rank of its group.

    Afterwards gradients are as they were before, but buffers are not (a BatchNorm counts the batches). Graphs that were
    compiled before stay. The loss is the sum of all outputs, so what does not reach the outputs counts as unused.

    With ``split`` graphs are cut where buckets end, as ``paceline.compile(..., split=True)`` does.

    >>> print(paceline.explain(ddp, inputs))  # doctest: +SKIP
    """
    wrapper = _torch.optimized_module(model) or model
    reducer = getattr(wrapper, "_reducer", None)
    if not isinstance(reducer, Reducer):
        raise BadTypeError(
            f"explain() takes a paceline.DistributedDataParallel, compiled or not, and not a {type(wrapper).__name__}."
        )
    known = len(records_of(reducer))
    breaks_before = len(_torch.graph_breaks())

    def forward(*inputs: Any, **kwargs: Any) -> Any:
        return wrapper(*inputs, **kwargs)

    # It gets a code object of its own, so that Dynamo does not count its compilations with others.
    forward.__code__ = forward.__code__.replace()
    run = torch.compile(forward, backend=Backend(_torch.find_backend(backend), split=split))
    kept = [(param, None if param.grad is None else param.grad.clone()) for param in wrapper.parameters()]
    for _ in range(2):
        # The first step compiles and learns the order of the buckets; the second is the one that is shown.
        with torch.enable_grad():
            _loss(run(*inputs, **kwargs)).backward()
    for param, grad in kept:
        param.grad = grad
    graphs = tuple(records_of(reducer)[known:])
    tapped = {name for graph in graphs for names in graph.taps for name in names}
    reasons = {name: reason for graph in graphs for name, reason in graph.untapped.items()}
    untapped = [slot.name for slot in reducer.trainable() if slot.name not in tapped]
    return Explanation(
        graphs=graphs,
        breaks=tuple(
            GraphBreak(*found, count) for found, count in Counter(_torch.graph_breaks()[breaks_before:]).items()
        ),
        departures=departures(reducer),
        untapped={name: reasons.get(name, "no compiled graph uses it with gradients") for name in untapped},
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _loss(output: Any) -> Tensor:
    parts = [tensor.sum() for tensor in find_tensors(output) if tensor.requires_grad]
    return cast(Tensor, sum(parts))
