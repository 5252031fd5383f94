"""Cutting graphs where buckets end, for who needs graphs that are cut: docs/compiler.md says who that may be."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline import _torch, ownership
from paceline.compiler.chain import Chain, compile_parts
from paceline.compiler.crossing import value_of
from paceline.compiler.cut import Body, Bucket, Cut, Params, cut_by_plan, cut_by_size, first_uses
from paceline.compiler.part import make_parts
from paceline.compiler.preparation import bring_to_use
from paceline.compiler.run import outdate
from paceline.errors import BadArgumentError
from paceline.plan import DEFAULT_FIRST_CAP_BYTES
from paceline.reducer import Reducer

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
        self.buckets: list[Bucket] = []
        """Of the graph that was compiled last, in the order of forward: one for each part."""
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
    """A graph that is cut where the buckets of its wrappers' plans end, as they are when it is compiled.

    A plan changes after the first step, when the order of gradients is known. If the graph would now be cut elsewhere,
    the wrapper's graphs are compiled anew when they run next.
    """

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        self._reducers = {
            weakref.ref(reducer): reducer.plan
            for reducer in ownership.live()
            if any(isinstance(value, Tensor) and reducer.slots.has(value) for value in example_inputs)
            # Without gradients there is no backward, and nothing to cut for.
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
        """The gradients of a part come all at once, and in what order autograd brings them says nothing."""
        uses = [
            (self._first_use[id(param)], index)
            for index, param in enumerate(reducer.roster.params)
            if id(param) in self._first_use
        ]
        order = [index for _, index in sorted(uses, reverse=True)]
        reducer.planner.known_orders[frozenset(order)] = order

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any], inner: CompileFunction) -> None:
        self._run = split(gm, example_inputs, self._body, self.cuts, inner)

    def _cut(self) -> tuple[list[Bucket], list[Cut]]:
        return cut_by_plan(self._body, self._first_use, map(_planned, self.reducers))

    def __call__(self, *args: Any) -> Any:
        for ref, plan in self._reducers.items():
            reducer = ref()
            if reducer is not None and reducer.plan is not plan:
                self._reducers[ref] = reducer.plan
                if [cut.position for cut in self._cut()[1]] != [cut.position for cut in self.cuts]:
                    outdate(reducer)
        return self._run(*args)


def _planned(reducer: Reducer) -> list[Bucket]:
    """The buckets of the plan, in the order in which they leave."""
    buckets = []
    for spec in reducer.plan.buckets:
        buckets.append(Bucket())
        for index in spec.params:
            buckets[-1].add(reducer.plan.specs[index].name, reducer.roster.params[index])
    return buckets


def _is_reduced() -> Callable[[Tensor], bool]:
    """Whether wrappers synchronise a parameter: all, but those they were told to ignore."""
    ignored = {id(param) for reducer in ownership.live() for param in reducer.roster.ignored}
    reduced = {key for reducer in ownership.live() for key in reducer.slots.by_id}

    def is_reduced(param: Tensor) -> bool:
        # The mark is that of torch's own class.
        is_ignored = id(param) in ignored - reduced or getattr(param, "_ddp_ignored", False)
        return isinstance(param, nn.Parameter) and not is_ignored

    return is_reduced


def split(
    gm: fx.GraphModule, example_inputs: Sequence[Any], body: Body, cuts: Sequence[Cut], inner: CompileFunction
) -> Callable[..., Any]:
    """``gm`` as a chain of parts that ``inner`` has compiled; compiled whole if there is no cut."""
    for cut in cuts:
        logger.info("%s", cut)
    if not cuts:
        return inner(gm, example_inputs)
    parts = make_parts(gm.graph, body, [cut.position for cut in cuts])
    compiled = compile_parts(gm, example_inputs, parts, cuts, stand_ins=_torch.StandIns(), compile_function=inner)
    return Chain(gm, parts, compiled)


def used_params(gm: fx.GraphModule, example_inputs: Sequence[Any], is_ours: Callable[[Tensor], bool]) -> Params:
    """The trainable parameters that each operator uses: inputs of the graph, attributes, or those of a module."""
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
