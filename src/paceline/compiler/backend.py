"""A backend of torch.compile in front of another one, which gets the graphs with taps in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

from paceline import _torch
from paceline.compiler.consensus.compile_agreement import AgreedCall
from paceline.compiler.placement import announcement
from paceline.compiler.record import GraphRecord, note
from paceline.compiler.split.graph_split import PlanSplit
from paceline.compiler.taps import tapped_graph as graphs
from paceline.compiler.taps.graph_run import GraphMark, Run
from paceline.compiler.taps.parameter_binding import Bindings
from paceline.errors import BadArgumentError

CompileFunction = Callable[..., Callable[..., Any]]
# What torch.compile returns has the attributes of what it was given, so type checkers may take it for that.
Model = TypeVar("Model", bound=Callable[..., Any])


class Backend:
    """Calls ``inner``, the real backend, with graphs that report their gradients while backward runs.

    With ``split`` the real backend gets subgraphs instead. They report nothing: autograd brings the gradients of a
    subgraph when its backward ends.
    """

    def __init__(self, inner: CompileFunction, *, split: bool = False) -> None:
        self.inner = inner
        self.split = split
        self.__name__ = getattr(inner, "__name__", type(inner).__name__)

    def __eq__(self, other: object) -> bool:
        """Whether graphs can be shared: Dynamo asks this for blocks that are alike and have backends of their own."""
        return isinstance(other, Backend) and (self.inner, self.split) == (other.inner, other.split)

    def __hash__(self) -> int:
        # `inner` is left out, because torch's own backends have no hash.
        return hash((self.__name__, self.split))

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        if graphs.is_tapped(gm.graph):
            # The backend was named explicitly and the graph was caught, too. The first of the two has put the taps in.
            return self.inner(gm, example_inputs, **(options or _torch.options_that_keep_order(self.inner)))
        marks = graphs.take_marks(gm.graph)
        gm.recompile()
        if marks and graphs.is_empty(gm.graph):
            # There was nothing but marks in it, before a graph break or behind one.
            return Run(gm.forward, marks=marks)
        if self.split:
            return self._split(gm, example_inputs, marks, **options)
        tapped = graphs.put_taps(gm, example_inputs)
        bindings = Bindings(tapped.positions) if tapped.positions else None
        if bindings is not None:
            example_inputs = [*example_inputs, bindings.number(example_inputs)]
        record = GraphRecord(
            backend=self.__name__,
            n_nodes=len(tapped.gm.graph.nodes),
            taps=tapped.groups,
            untapped=tapped.untapped,
            starts=any(not mark.leaves for mark in marks),
        )
        for reducer in tapped.reducers:
            note(reducer, record)
        if tapped.positions and not options:
            options = _torch.options_that_keep_order(self.inner)
        try:
            compiled = self.inner(tapped.gm, example_inputs, **options)
        except Exception as error:
            # Other ranks may wait for this one in a collective of a step that it cannot take part in.
            for reducer in tapped.reducers:
                if reducer.channel.size > 1:
                    reducer.channel.report("compiling", error)
            raise
        if not marks and bindings is None:
            return compiled
        return Run(compiled, marks=marks, bindings=bindings, announcement=announcement(tapped.reducers))

    def _split(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], marks: list[GraphMark], **options: Any
    ) -> Callable[..., Any]:
        parts = PlanSplit(gm, example_inputs)
        record = GraphRecord(
            backend=self.__name__,
            n_nodes=len(gm.graph.nodes),
            starts=any(not mark.leaves for mark in marks),
            cuts=list(map(str, parts.cuts)),
            untapped={name: "graphs are split" for bucket in parts.buckets for name in bucket.params},
        )
        for reducer in parts.reducers:
            note(reducer, record)
        parts.compile(gm, example_inputs, functools.partial(self.inner, **options))
        return Run(parts, marks=marks)


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(m, backend="paceline")``: inductor, with gradients reported while backward runs.

    ``mode`` and ``options`` are those of inductor. The option ``inner`` names another backend, which gets the rest.
    """
    others = dict(options or {})
    inner = others.pop("inner", "inductor")
    return Backend(_torch.find_backend(inner, mode=mode, options=others or None))(gm, example_inputs)


def compile_module(
    model: Model,
    *,
    inner: str | CompileFunction = "inductor",
    split: bool = False,
    agreement: bool = False,
    once: bool = False,
    **options: Any,
) -> Model:
    """Compile with ``inner`` as the backend, and let every graph report its gradients, even if breaks make several
    graphs of one forward. The other arguments are those of ``torch.compile``.

    ``split=True`` cuts graphs where buckets end instead, and ``inner`` gets one graph for each bucket.

    With ``agreement`` all ranks compile the same graphs at the same time; with ``once`` one rank does it for all
    (``paceline.compiler.agreement``).
    """
    if split and once:
        raise BadArgumentError(
            "split=True and once=True do not go together: torch keeps no artifacts of the parts, so that one rank has "
            "nothing to give to the others. Leave one of them out."
        )
    chosen = _torch.find_backend(inner, mode=options.pop("mode", None), options=options.pop("options", None))
    compiled = torch.compile(model, backend=Backend(chosen, split=split), **options)
    if agreement or once:
        if isinstance(compiled, nn.Module):
            compiled.forward = AgreedCall(compiled.forward, once=once)
        else:
            compiled = functools.wraps(compiled)(AgreedCall(compiled, once=once))
    return cast(Model, compiled)
