"""Dynamo's entry points, backends and Inductor: what torch has no public name for.

Nothing here imports the compiler by itself: the functions are called when somebody else has imported it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def skipped_by_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function as it is, and compiles what it calls.

    ``torch.compiler.disable(recursive=False)`` does the same, but imports the whole compiler at once: more than
    a second for everybody who imports Paceline.
    """
    _skip(function.__code__)
    return function


def hidden_from_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function, and all it calls, as it is: ``torch.compiler.disable`` on first use."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    _skip(cast(Any, run).__code__)
    return cast(AnyFunction, run)


def _skip(code: CodeType) -> None:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(code, strategy)


COMPILER = "torch._dynamo"
"""The module that ``torch.compile`` imports when it is first called. ``paceline.tracing`` waits for it."""


INDUCTOR = "torch._inductor.lowering"
"""Where Inductor looks up what to do with an operator."""


INDUCTOR_GRAPH = "torch._inductor.graph"
"""Where Inductor decides whether to look an operator up at all."""


def lower_as_collectives(packets: Sequence[Any], *, dropped: Sequence[Any]) -> None:
    """Tell Inductor that operators of ours are collectives, so that it keeps their order; ``dropped`` have no code.

    Inductor treats an unknown operator as a pure function. It has no public way to say otherwise.
    """
    from torch._inductor import ir, lowering

    def lower(packet: Any) -> None:
        lowering.add_layout_constraint(packet, lowering.constrain_to_fx_strides)

        @lowering.register_lowering(packet, type_promotion_kind=None)
        def collective(*args: Any) -> Any:
            outputs: Any = ir._CollectiveKernel.create_out_of_place(packet.default, *args)
            return [ir.TensorBox.create(output) for output in outputs]

    for packet in packets:
        lower(packet)
    for packet in dropped:
        lowering.register_lowering(packet, type_promotion_kind=None)(lambda *args: None)


def lower_slices() -> None:
    """Let Inductor return a slice of a mesh: torch's graph names the operator without its overload, and that fails."""
    from torch._inductor import lowering
    from torch.distributed._ops import device_mesh  # noqa: F401 (defines it)

    packet = torch.ops.device_mesh._get_submesh
    if packet not in lowering.lowerings:
        lowering.lowerings[packet] = lowering.fallback_handler(packet.default, add_to_fallback_set=False)


def keep_in_backward(operator: str, library: Any) -> None:
    """Let an operator that was traced in a backward be part of the backward only.

    AOTAutograd puts into the forward what does not depend on incoming gradients. A gradient may turn out to be a
    constant (``0 * loss``). An operator that has an effect would then run in forward, and again in backward. torch has
    a mark for nodes that stay, and no public way to set it.
    """
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    mark = "partitioner_tag"

    def trace(mode: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = mode.__torch_dispatch__(function, types, args, kwargs)
        nodes = mode.tracer.graph.nodes
        # torch marks all nodes when forward has been traced. If the first input has a mark, this is the backward.
        if mark in next(iter(nodes)).meta:
            traced = next(node for node in reversed(nodes) if node.target is function)
            traced.meta[mark] = "must_be_in_backward"
        return result

    torch.library.register_torch_dispatch(operator, ProxyTorchDispatchMode, trace, lib=library)


# What stands in a captured graph where gradients are switched off and on.
set_grad_enabled = torch._C._set_grad_enabled


def at_compile_time(function: Callable[[Any], None], key: str) -> None:
    """Traced by Dynamo: call ``function`` with Dynamo's context now, and leave nothing of it in the graph."""
    from torch._dynamo.comptime import comptime

    comptime(function)


def key_of(context: Any) -> str:
    """In a function of :func:`at_compile_time`: the key that it was given."""
    return str(context.get_local("key").as_python_constant())


class _Compilation(threading.local):
    """The compilation that runs now in this thread."""

    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[str, BaseException], None]] = {}
        self.whole = False
        """Whether a graph break is an error."""
        self.handled: BaseException | None = None
        """The exception that the program was handling when it began. Compiling in an ``except`` block is no failure."""


_compilation = _Compilation()


def _compilation_ended(_: Any) -> None:
    from torch._dynamo import config, exc

    error = sys.exc_info()[1]
    listeners, _compilation.listeners = _compilation.listeners, {}
    handled, _compilation.handled = _compilation.handled, None
    if error is None or error is handled or config.suppress_errors:
        return
    # For these errors Dynamo runs the function uncompiled.
    is_soft = isinstance(error, (exc.Unsupported, exc.UserError, exc.SkipFrame))
    if is_soft and not _compilation.whole and not isinstance(error, exc.UncapturedHigherOrderOpError):
        return
    for key, function in listeners.items():
        function(key, error)


def tell_of_failure(context: Any, function: Callable[[str, BaseException], None]) -> None:
    """In a function of :func:`at_compile_time`: have ``function`` called with the key and the exception, if this
    compilation ends in an exception that the user sees. It is not called if the function then runs uncompiled.

    This uses Dynamo's callback for the end of a compilation (``torch._dynamo.callback``), which Dynamo runs while the
    exception is on its way. Our callback stays registered, since it can't be taken out while callbacks are run.
    """
    from torch._dynamo import callback_handler

    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    _compilation.whole = bool(tracer.one_graph or tracer.error_on_graph_break)
    if not _compilation.listeners:
        _compilation.handled = sys.exc_info()[1]
    # Listeners are kept by key, since tracing may start over and come here again.
    _compilation.listeners[key_of(context)] = function
    if _compilation_ended not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_compilation_ended)


def wrap_backend(context: Any, wrap: Callable[[Any], Any]) -> None:
    """In a function of :func:`at_compile_time`: put ``wrap`` around the backend of the graph that is being made."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    output.compiler_fn = wrap(output.compiler_fn)


def find_backend(name: Any, *, mode: str | None = None, options: Any = None, dynamic: bool | None = None) -> Any:
    """The backend that ``torch.compile(backend=name, ...)`` would call."""
    if name == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    return torch._TorchCompileWrapper(name, mode, options, dynamic)


def original_backend(backend: Any) -> Any:
    """What the user named as the backend, without what torch.compile and Dynamo's debugging tools put around it."""
    backend = getattr(backend, "_torchdynamo_orig_backend", backend)
    return backend.compiler_fn if isinstance(backend, torch._TorchCompileWrapper) else backend


def compiled_call(module: Any) -> Any:
    """What ``m.compile()`` has put in the place of the module's call; None if it was not used."""
    return module._compiled_call_impl


def optimized_module(module: Any) -> Any:
    """The module inside, if ``module`` is what ``torch.compile(m)`` returns; None otherwise."""
    if "torch._dynamo" not in sys.modules:
        return None
    from torch._dynamo import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else None


def compile_like(compiled: Any, function: Callable[..., Any]) -> Any:
    """``function`` compiled with the backend and options of ``compiled``, a compiled function; None if unknown.

    They are only in the closure that torch.compile makes.
    """
    from torch._dynamo.eval_frame import OptimizeContext

    for cell in getattr(compiled, "__closure__", None) or ():
        if isinstance(cell.cell_contents, OptimizeContext):
            return cell.cell_contents(function)
    return None


def call_with_hooks(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of the module that does not go to what ``m.compile()`` made of it."""
    return module._call_impl(*args, **kwargs)


def options_that_keep_order(backend: Any) -> dict[str, Any]:
    """Arguments with which inductor leaves operators in the order of the graph; none for another backend.

    To save memory, inductor moves what nothing waits for to the end of backward. That includes the gradients of
    weights, and at the end there is nothing left for their communication to overlap with. The setting is an argument,
    since the backward is compiled later, when it first runs.
    """
    inner = original_backend(backend)
    if not isinstance(inner, torch._TorchCompileInductorWrapper) or "reorder_for_peak_memory" in inner.config:
        return {}
    return {"config_patches": {"reorder_for_peak_memory": False}}


def graph_breaks() -> list[tuple[str, str, int]]:
    """Dynamo's graph breaks so far in this process: why, in which file, and at which line.

    ``torch._dynamo.utils.counters`` has no places, and leaves out branches that depend on a tensor.
    """
    from torch._dynamo.utils import graph_break_reasons

    found = []
    for told in graph_break_reasons:
        place = told.user_stack[-1] if told.user_stack else None
        reason = _BRANCH if told.reason.startswith("generic_jump") else told.reason
        found.append((reason, place.filename if place else "", (place.lineno or 0) if place else 0))
    return found


_BRANCH = "A branch depends on the value of a tensor"


def unseen_by_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function, and all it calls, as it is.

    Its calls cost nothing, unlike those of :func:`hidden_from_compiler`. It is for hooks, which autograd calls from
    inside a compiled function that runs a backward.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def keep_lowerings(namespace: str) -> None:
    """Let Inductor's lite mode (``fallback_by_default``) look up collectives, ours and torch's, and keep their order.

    Otherwise it treats them as pure functions. torch 2.14 and 2.15 then put a collective of ours before one of torch's
    on the rank that has more to compute, and the ranks wait for each other for ever.
    """
    from torch._inductor import graph, lowering

    torchs = graph.should_fallback_by_default
    collectives = (namespace, "_c10d_functional")

    def should_fall_back(node: Any) -> bool:
        is_collective = getattr(node.target, "namespace", "") in collectives and node.target in lowering.lowerings
        return not is_collective and torchs(node)

    cast(Any, graph).should_fallback_by_default = should_fall_back
