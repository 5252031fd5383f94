"""Splits graphs where buckets end, for backends that need small graphs (docs/compiler.md says which)."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline import _torch
from paceline.compiler.graph_values import value_of
from paceline.compiler.split.chain import Chain, compile_subgraphs
from paceline.compiler.split.cut import Body, Cut, GraphBucket, Params, cut_by_plan, cut_by_size, first_uses
from paceline.compiler.split.preparation import bring_to_use
from paceline.compiler.split.subgraph import make_subgraphs
from paceline.compiler.taps.graph_run import outdate
from paceline.errors import BadArgumentError
from paceline.gradients.plan import DEFAULT_FIRST_CAP_BYTES
from paceline.reduction import ownership
from paceline.reduction.reducer import Reducer

CompileFunction = Callable[..., Callable[..., Any]]
logger = logging.getLogger("paceline.compiler")


class DDPOptimizer:
    """Cuts graphs into parts of about ``bucket_bytes_cap`` bytes of parameters, and lets a backend compile each.

    ``compile_fn`` is a backend of torch.compile. Buckets are filled from the end of the graph, where backward begins;
    the first may be smaller (``first_bucket_cap``: 1 MiB, or the other cap if that is less). Both are in bytes.

    >>> import torch
    >>> from paceline.compiler import DDPOptimizer
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(4)])
    >>> optimizer = DDPOptimizer(512, lambda graph, inputs: graph)
    >>> output = torch.compile(model, backend=optimizer.compile_fn)(torch.ones(2, 8))
    >>> [bucket.size for bucket in optimizer.buckets]
    [512, 512]
    """

    def __init__(
        self, bucket_bytes_cap: int, backend_compile_fn: CompileFunction, first_bucket_cap: int | None = None
    ) -> None:
        if first_bucket_cap is None:
            first_bucket_cap = min(DEFAULT_FIRST_CAP_BYTES, bucket_bytes_cap)
        for name, cap in (("bucket_bytes_cap", bucket_bytes_cap), ("first_bucket_cap", first_bucket_cap)):
            if not cap > 0:
                raise BadArgumentError(f"{name} is {cap}; a bucket holds a number of bytes above 0.")
        self.bucket_bytes_cap = bucket_bytes_cap
        self.first_bucket_cap = first_bucket_cap
        self.backend_compile_fn = backend_compile_fn
        self.buckets: list[GraphBucket] = []
        """The buckets of the graph that was compiled last, one for each part, in the order of forward."""
        self.cuts: list[Cut] = []
        """Where that graph was cut; ``print`` one to see why."""

    def compile_fn(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if any(value_of(node) is None for node in gm.graph.find_nodes(op="placeholder")):
            _torch.simulate(gm, example_inputs)
        params = used_params(gm, example_inputs, _is_reduced())
        body = Body(gm.graph)
        self.buckets, self.cuts = cut_by_size(
            body, params, first_cap_bytes=self.first_bucket_cap, cap_bytes=self.bucket_bytes_cap
        )
        return split(gm, example_inputs, body, self.cuts, self.backend_compile_fn)


class PlanSplit:
    """A graph that is cut where the buckets of its wrappers' plans end.

    A plan changes after the first step, when the order of gradients is known. If the graph would then be cut elsewhere,
    the wrapper's graphs are compiled anew when they run next.
    """

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self._reducers = {
            weakref.ref(reducer): reducer.plan
            for reducer in ownership.live()
            if any(isinstance(value, Tensor) and reducer.slots.has(value) for value in example_inputs)
            # Without gradients there is no backward to cut for.
            and torch.is_grad_enabled()
        }
        reducers = self.reducers
        inputs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)

        def is_reduced(value: Tensor) -> bool:
            return any(reducer.slots.has(value) for reducer in reducers)

        bring_to_use(gm.graph, [node for node, value in inputs if is_reduced(value)])
        self._body = Body(gm.graph)
        params = used_params(gm, example_inputs, is_reduced)
        self._first_use = first_uses(self._body, params)
        self.buckets, self.cuts = self._cut()
        for reducer in reducers:
            self._tell_order(reducer)
        self._run: Callable[..., Any]

    @property
    def reducers(self) -> list[Reducer]:
        return [reducer for ref in self._reducers if (reducer := ref()) is not None]

    def _tell_order(self, reducer: Reducer) -> None:
        """Tell the planner the order of the graph: autograd brings all gradients of a part at once, in any order."""
        uses = [
            (self._first_use[id(param)], index)
            for index, param in enumerate(reducer.roster.params)
            if id(param) in self._first_use
        ]
        order = [index for _, index in sorted(uses, reverse=True)]
        reducer.planner.known_orders[frozenset(order)] = order

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], inner: CompileFunction) -> None:
        self._run = split(gm, example_inputs, self._body, self.cuts, inner)

    def _cut(self) -> tuple[list[GraphBucket], list[Cut]]:
        return cut_by_plan(self._body, self._first_use, map(_planned, self.reducers))

    def __call__(self, *args: Any) -> Any:
        for ref, plan in self._reducers.items():
            reducer = ref()
            if reducer is not None and reducer.plan is not plan:
                self._reducers[ref] = reducer.plan
                if [cut.position for cut in self._cut()[1]] != [cut.position for cut in self.cuts]:
                    outdate(reducer)
        return self._run(*args)


def _planned(reducer: Reducer) -> list[GraphBucket]:
    """The buckets of the plan, in the order in which they leave."""
    buckets = []
    for spec in reducer.plan.buckets:
        buckets.append(GraphBucket())
        for index in spec.params:
            buckets[-1].add(reducer.plan.specs[index].name, reducer.roster.params[index])
    return buckets


def _is_reduced() -> Callable[[Tensor], bool]:
    """A function that tells whether a parameter is synchronised. All are, except those that are to be ignored.

    A parameter that one wrapper ignores may be reduced by another; then it is synchronised.
    """
    ignored = {id(param) for reducer in ownership.live() for param in reducer.roster.ignored}
    reduced = {key for reducer in ownership.live() for key in reducer.slots.by_id}

    def is_reduced(param: Tensor) -> bool:
        if not isinstance(param, nn.Parameter):
            return False
        return id(param) in reduced or not (id(param) in ignored or _torch.is_marked_ignored(param))

    return is_reduced


def split(
    gm: fx.GraphModule, example_inputs: Sequence[Any], body: Body, cuts: Sequence[Cut], inner: CompileFunction
) -> Callable[..., Any]:
    """Have ``inner`` compile ``gm`` as a chain of parts, or whole if there is no cut."""
    for cut in cuts:
        logger.info("%s", cut)
    if not cuts:
        return inner(gm, example_inputs)
    parts = make_subgraphs(gm.graph, body, [cut.position for cut in cuts])
    compiled = compile_subgraphs(
        gm, example_inputs, parts, cuts, fake_inputs=_torch.FakeInputs(), compile_function=inner
    )
    return Chain(gm, parts, compiled)


def used_params(gm: fx.GraphModule, example_inputs: Sequence[Any], is_ours: Callable[[Tensor], bool]) -> Params:
    """The trainable parameters that each operator uses as inputs of the graph, as attributes, or in a module."""
    held: dict[fx.Node, list[tuple[str, Tensor]]] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        held[node] = [(str(node.target), value)]
    for node in gm.graph.find_nodes(op="get_attr"):
        held[node] = [(str(node.target), operator.attrgetter(str(node.target))(gm))]

    def of(node: fx.Node) -> Iterator[tuple[str, Tensor]]:
        if node.op == "call_module":
            prefix = str(node.target)
            yield from ((f"{prefix}.{name}", param) for name, param in gm.get_submodule(prefix).named_parameters())
        for source in node.all_input_nodes:
            yield from held.get(source, ())

    return {
        node: [
            (name, param)
            for name, param in of(node)
            if isinstance(param, Tensor) and param.requires_grad and param.is_leaf and is_ours(param)
        ]
        for node in gm.graph.nodes
    }
