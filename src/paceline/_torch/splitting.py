"""What it takes from Dynamo and AOTAutograd to cut a captured graph into parts, without public names in torch."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

# What stands in a captured graph where autocast begins and ends.
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast

# Words in the names of functions that begin and end a state in a captured graph. Such a state cannot be left and taken
# up again: levels of functorch, recorded functions, inference mode, hooks of saved tensors.
_OPENING = ("increment_nesting", "record_function_enter", "enter_inference_mode", "saved_tensors_hooks_disable")
_CLOSING = ("decrement_nesting", "record_function_exit", "exit_inference_mode", "saved_tensors_hooks_enable")


def region_step(node: fx.Node) -> int:
    """1 if a state begins at ``node`` that a cut must not interrupt, -1 if one ends there, else 0."""
    if node.op != "call_function":
        return 0
    name = str(getattr(node.target, "__name__", node.target))
    if any(word in name for word in _OPENING):
        return 1
    return -1 if any(word in name for word in _CLOSING) else 0


def make_graph_module(root: fx.GraphModule, graph: fx.Graph, *, name: str) -> fx.GraphModule:
    """A module of the kind that Dynamo makes. Its code is written when it runs, and not after each pass."""
    from torch.fx._lazy_graph_module import _make_graph_module

    return _make_graph_module(root, graph, class_name=name)


def copy_what_dynamo_says(source: fx.GraphModule, part: fx.GraphModule, *, reason: str | None) -> None:
    """Mark ``part`` of ``source`` as a graph of Dynamo's, which AOTAutograd treats differently.

    ``reason`` says why it ends where it ends; None if it ends where ``source`` ends. ``torch._dynamo.explain``
    shows it.
    """
    part.meta.update(source.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(source, name):
            setattr(part, name, getattr(source, name))
    if reason is not None:
        from torch._dynamo.output_graph import GraphCompileReason

        frame = traceback.FrameSummary(__file__, 0, "split", lookup_line=False)
        cast(Any, part).compile_subgraph_reason = GraphCompileReason(reason, [frame])


def copy_source(node: fx.Node, placeholder: fx.Node) -> None:
    """Say where ``placeholder`` of a part comes from: from the same place as ``node``, or from another part."""
    set_source(placeholder, getattr(node, "_dynamo_source", None))


def set_source(placeholder: fx.Node, source: object) -> None:
    """Tell AOTAutograd where an input of a graph of Dynamo's comes from; None if it does not come from the user."""
    cast(Any, placeholder)._dynamo_source = source


class _Simulation(fx.Interpreter):
    """Runs a graph on tensors without memory, and leaves its results where Dynamo leaves them."""

    def __init__(self, gm: fx.GraphModule, mode: Any) -> None:
        super().__init__(gm)
        self._mode = mode

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op == "get_attr" and isinstance(result, Tensor):
            # As with an input, what was done to it before does not count.
            result = self._mode.from_tensor(result, static_shapes=True)
        node.meta["example_value"] = result
        return result


def simulate(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Note in each node of a graph what it makes, as Dynamo does in the graphs that it captures."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Parameters that modules of the graph hold are not replaced by fake ones.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = [mode.from_tensor(value, static_shapes=True) if isinstance(value, Tensor) else value for value in inputs]
    with mode:
        _Simulation(gm, mode).run(*given)


class FakeInputs:
    """Tensors without memory that stand for the inputs of parts while those are compiled.

    Each node has one of Dynamo's own, but compilers must use others, which were not changed by what comes later in the
    graph. Symbols are the same in both.
    """

    def __init__(self) -> None:
        from torch._guards import TracingContext
        from torch._subclasses.fake_tensor import FakeTensorMode

        whole = TracingContext.try_get()
        self._contexts: Any = {} if whole is None else whole.tensor_to_context
        self.mode: Any = None if whole is None else whole.fake_mode
        if self.mode is None:
            # Parameters that modules of the graph hold are not replaced by fake ones.
            self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def of(self, value: Any) -> Any:
        """The tensor for an input of the whole graph. Inputs that share memory do so here, too."""
        if not isinstance(value, Tensor) or is_fake(value):
            return self.like(value)
        context = self._contexts.get(value)
        if context is None:
            return self.mode.from_tensor(value, static_shapes=True)
        return self.mode.from_tensor(value, symbolic_context=context, source=context.tensor_source, trace=False)

    def like(self, value: Any, strides: Sequence[Any] | None = None) -> Any:
        """The tensor for a value that one part hands to another, which looks as Dynamo says."""
        if not is_fake(value) or (value.fake_mode is self.mode and strides is None):
            return value
        strides = value.stride() if strides is None else strides
        with self.mode, torch.set_grad_enabled(value.requires_grad):
            # It is not a leaf, as no result of a part is: a change in place means something else for leaves.
            source = torch.empty((), device=value.device, requires_grad=value.requires_grad)
            return _Made.apply(source, value.size(), strides, value.dtype)


class _Made(torch.autograd.Function):
    """A tensor that looks like the result of something."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, size: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, strides, dtype=dtype, device=source.device)


class SubgraphContext:
    """What AOTAutograd notes about one part, kept apart from all others.

    AOTAutograd keeps one set of notes for each graph that Dynamo has captured. Parts of one graph would overwrite each
    other's notes, and the backward of a part is compiled long after its forward. Guards still go to Dynamo.
    """

    def __init__(self, fake_inputs: FakeInputs) -> None:
        from torch._guards import TracingContext

        whole = TracingContext.try_get()
        self._context = TracingContext(fake_inputs.mode) if whole is None else copy.copy(whole)
        self._context.fw_metadata = None

    def compile(
        self, compile_function: Callable[..., Any], part: fx.GraphModule, inputs: Sequence[Any], *, show_outputs: bool
    ) -> Any:
        """The compiled part. With ``show_outputs``, :meth:`outputs` must be called before the part is run."""
        self._context.fakify_first_call = show_outputs
        try:
            with self._active():
                return compile_function(part, inputs)
        finally:
            # The context is kept for the backward, which is compiled when it first runs.
            self._context.fakify_first_call = False

    def outputs(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Fake tensors for what the part returns, with the strides that its code was made for.

        None if the backend does not use AOTAutograd: then only the graph itself says what it returns.
        """
        if self._context.fw_metadata is None:
            return None
        with self._active():
            return compiled(*inputs)

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        from torch._guards import tracing

        with tracing(self._context):
            yield


def is_fake(value: Any) -> bool:
    """Whether ``value`` stands for a tensor, and has no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def memory_of(tensor: Tensor) -> int | None:
    """A number that is equal for tensors that share memory; None if there is no memory, or it cannot be changed.

    Fake tensors have no address. So this is the address of the storage object, which only a private attribute has.
    """
    if tensor.is_inference():
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or of another kind that has no storage
        return None


def n_changes(tensor: Tensor) -> int:
    """How often ``tensor`` was changed in place, which autograd counts in a private attribute."""
    return tensor._version


# The names below are public, but importing them takes half a second, which only programs that compile should pay.


def free_symbols(value: Any) -> set[Any]:
    """The symbols in the shape and strides of a tensor, or in a number."""
    from torch.fx.experimental import symbolic_shapes

    return set(symbolic_shapes.free_symbols(value))
