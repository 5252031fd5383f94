"""Every private torch name that Paceline uses, in one place, each with its reason.

Nothing else imports a private torch module (tests/test_layers.py holds this), so a new torch release is
checked by reading this file.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd import profiler as _profiler
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

# torch.autograd has no public "call me when this backward is over"; FSDP2 and others use this one too.
_engine = torch.autograd.Variable._execution_engine


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now (the innermost one) has ended."""
    _engine.queue_callback(callback)


def current_node() -> Node | None:
    """The node that autograd evaluates in this thread, if any.

    In a callback of :func:`queue_callback` it is not None exactly when that backward ran inside another
    one (reentrant checkpointing): then it is the outer backward's node. No public equivalent.
    """
    return cast("Node | None", torch._C._current_autograd_node())


def will_execute(node: Node) -> bool:
    """Whether the running backward will reach ``node``: tells ``backward()`` from ``autograd.grad()``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch refuses the question for leaves inside autograd.grad(): nothing is accumulated there.
        return False


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` for each pair in one call: a third of the cost of a Python loop."""
    torch._foreach_copy_(list(targets), list(sources))


def flatten_dense(tensors: Sequence[Tensor]) -> Tensor:
    """Copies of tensors of one dtype, end to end, in one call; ``torch.cat`` wants each flattened first."""
    if len(tensors) == 1:
        # torch would hand out a view of it.
        return tensors[0].reshape(-1).clone()
    return torch._utils._flatten_dense_tensors(list(tensors))


def unflatten_dense(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The reverse: views of ``flat`` shaped as ``like``."""
    return torch._utils._unflatten_dense_tensors(flat, list(like))


def storage_users(tensor: Tensor) -> int:
    """How many tensors (and storages) share this tensor's memory. No public equivalent."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def group_store(group: ProcessGroup) -> Store:
    """The key-value store the group was made with: our control channel must not open a port of its own."""
    return c10d._get_process_group_store(group)


def default_group() -> ProcessGroup:
    """The default group as an object; ``dist.group.WORLD`` is its public name and is None before init."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group "
            "(or paceline.init())."
        )
    return group


def is_not_a_member(group: object) -> bool:
    """``new_group`` hands ranks outside of it a marker instead of a group."""
    return group is None or group == dist.GroupMember.NON_GROUP_MEMBER


def group_is_alive(group: ProcessGroup) -> bool:
    """Whether the group is still registered (not destroyed). ``is_initialized`` knows the default one only."""
    return group in c10d._world.pg_map


def group_timeout_s(group: ProcessGroup) -> float:
    """The group's own time-out; torch shows it only on the backend's options."""
    try:
        backend = c10d._world.pg_map[group][0].split(",")[0].split(":")[-1]
        device = torch.device("cpu") if backend in ("gloo", "mpi", "shm") else torch.accelerator.current_accelerator()
        options = group._get_backend(device or torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (AttributeError, KeyError, RuntimeError):
        return float(c10d.default_pg_timeout.total_seconds())


def is_joining(joinable: Any) -> bool:
    """Whether torch's ``Join`` is in force for it; ``Join`` says so only in this attribute."""
    return bool(joinable._join_config.enable)


def leave_join(joinable: Any) -> None:
    """``Join`` leaves itself in force after its end, at the price of a collective in every later forward."""
    joinable._join_config = type(joinable._join_config).construct_disabled_join_config()


def overlapped_optimizer(optimizer_class: type, params: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's overlapped optimizer, which registers itself on a DDP as a comm hook (``_register_fused_optim``)."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optimizer_class, params, *args, **kwargs)


def optimizers_in_backward() -> int:
    """How many parameters torch's ``_apply_optimizer_in_backward`` holds; 0 if it was never used."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return 0 if module is None else len(module.param_to_optim_hook_handle_map)


def take_optimizers_in_backward(param: Tensor) -> bool:
    """Keep torch from stepping ``param`` on its local gradient; True if it has optimizers that now wait for us."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if module is None or not hasattr(param, "_in_backward_optimizers"):
        return False
    for handle in module.param_to_optim_hook_handle_map.get(param, []):
        handle.remove()
    return True


def optimizers_of(param: Tensor) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that ``_apply_optimizer_in_backward`` put on the parameter."""
    return param._in_backward_optimizers  # type: ignore[attr-defined]


def pytree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """``torch.utils.pytree`` is public only for its optree flavour; the tree's spec object is private."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def pytree_unflatten(leaves: list[Any], spec: Any) -> Any:
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def accumulate_grad_node(param: Tensor) -> Node:
    """The node that adds to ``param.grad`` (public since torch 2.4 as ``get_gradient_edge``)."""
    return torch.autograd.graph.get_gradient_edge(param).node


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def skipped_by_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function as it is, and compiles what it calls.

    ``torch.compiler.disable(recursive=False)`` does the same, but imports the whole compiler at once: more than
    a second for everybody who imports us.
    """
    _skip(function.__code__)
    return function


def hidden_from_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function, and all it calls, as it is; ``torch.compiler.disable``, but on first use."""
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


# What a c10d backend written in Python derives from. torch's stubs give their methods signatures that no
# implementation in Python can have (overloads on the options), hence Any.
PythonProcessGroup: Any = ProcessGroup
Work = c10d.Work


def is_profiling() -> bool:
    """Whether a profiler is running: the flag it sets in Python, at the price of a look."""
    return _profiler._is_profiler_enabled


def start_profiler_range(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event as backends record theirs, with the shapes of ``tensors``; call what is returned to end it.

    ``torch.profiler.record_function`` knows no shapes, and must end on the thread it began on.
    """
    recorded = torch._C._profiler._RecordFunctionFast(name, list(tensors), {})
    recorded.__enter__()
    return functools.partial(recorded.__exit__, None, None, None)


def new_gloo(store: Store, *, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo backend that is not registered anywhere: what the shared-memory transport uses between hosts."""
    gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    return gloo


def new_backend(name: str, store: Store, *, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend by its name, not registered anywhere: gloo, or one that was added to c10d by its own package."""
    if name == dist.Backend.GLOO:
        return new_gloo(store, rank=rank, size=size, timeout=timeout)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        raise ValueError(
            f"backend {name!r} cannot be used between hosts: it is neither gloo nor registered with "
            "torch.distributed.Backend.register_backend (without extended_api)"
        )
    return plugin.creator_fn(store, rank, size, timeout)


def adopt_backend(group: ProcessGroup, backend: Any) -> None:
    """Have ``group`` use ``backend`` for CPU tensors wherever it does not override something itself."""
    kind = ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)


def settle_async_tensor(tensor: Tensor) -> Tensor:
    """The tensor behind the result of a functional collective that was not waited for yet; others as they are."""
    wait = getattr(tensor, "trigger_wait", None)
    return cast(Tensor, wait()) if wait is not None else tensor


# --- tracing: what the rows of paceline.tracing stand on ---------------------------------------------------
# Nothing below imports the compiler by itself: the functions are called when somebody else has imported it.


COMPILER = "torch._dynamo"
"""What ``torch.compile`` imports when it is first called, and we wait for."""

INDUCTOR = "torch._inductor.lowering"
"""Where Inductor looks up what to do with an operator."""

INDUCTOR_GRAPH = "torch._inductor.graph"
"""Where it decides whether to look."""


def group_named(name: str) -> ProcessGroup:
    """The group a graph knows by its name; graphs hold names, since a group is not a value. No public equivalent."""
    try:
        return c10d._resolve_process_group(cast(Any, name))
    except RuntimeError:
        pass
    if dist.group.WORLD is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    raise ValueError(
        f"Process group {name!r} is not initialized in the world group map: it was destroyed after this code was "
        "compiled. Please initialize the group first."
    )


def register_work(tensor: Tensor, work: dist.Work) -> None:
    """Let ``wait_tensor`` on ``tensor`` wait for ``work``: how torch's own functional collectives do it."""
    torch._C._distributed_c10d._register_work(tensor, work)


wait_tensor = torch.ops._c10d_functional.wait_tensor
"""The operator that waits for a tensor of a functional collective; Inductor knows it by this name only."""

functional_collectives = torch.ops._c10d_functional
"""torch's functional collectives. The public face of them does not exist yet; Inductor lowers and overlaps these."""


def warn_not_a_member(function: str) -> None:
    """What torch says to a rank that calls a collective of a group it is not in."""
    c10d._warn_not_in_group(function)


def traced_forms() -> dict[str, Callable[..., Any]]:
    """What the compiler traces instead of an in-place collective, by the collective's name.

    We stand in for the same functions, and pass on what torch handles, so that its graphs stay as they are.
    """
    from torch.distributed import _functional_collectives as functional

    return {original.__name__: traced for original, traced in functional.traceable_collective_remaps.items()}


def reduction_names() -> dict[Any, str]:
    """Reductions by the names that functional collectives have for them."""
    from torch.distributed import _functional_collectives as functional

    return dict(functional.REDUCE_OP_TO_STR)


def refuse_in_graph(function: Any, *, name: str, explanation: str, hints: list[str]) -> None:
    """Break the graph at a call of ``function``, for a reason of ours.

    ``torch.compiler.disable(reason=...)`` has no place for hints, and changes what eager calls.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.misc import LambdaVariable

    def refuse(*args: Any, **kwargs: Any) -> Any:
        unimplemented(
            gb_type=f"{name} in a graph",
            context=f"{name}(args={args}, kwargs={kwargs})",
            explanation=explanation,
            hints=hints,
        )

    VariableBuilder._id_dispatch()[id(function)] = lambda builder, value: LambdaVariable(refuse, source=builder.source)


def trace_instead(original: Any, traced: Callable[..., Any]) -> None:
    """As ``torch.compiler.substitute_in_graph``, for what that refuses: classes, and functions torch has a rule for."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.functions import UserFunctionVariable

    def wrap(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.CLASS_MATCH if isinstance(value, type) else GuardBuilder.CLOSURE_MATCH)
        # Without a source of its own it would be given the original's, and its defaults be looked for there.
        source = AttrSource(builder.tx.import_source(traced.__module__), traced.__name__)
        return UserFunctionVariable(cast(Any, traced), source=source)

    VariableBuilder._id_dispatch()[id(original)] = wrap


def class_instead(original: type, traced: type) -> None:
    """Let traced code that names ``original`` see ``traced``: an abstract class that has more members."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    def wrap(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.CLASS_MATCH)
        source = AttrSource(builder.tx.import_source(traced.__module__), traced.__name__)
        return UserDefinedClassVariable(traced, source=source)

    VariableBuilder._id_dispatch()[id(original)] = wrap


def trace_as(alias: Callable[..., Any], original: Any) -> None:
    """Let traced code of ours call ``original`` as torch traces it, by the name of ``alias``, past a row of ours."""
    from torch._dynamo.variables.builder import VariableBuilder

    dispatch = VariableBuilder._id_dispatch()

    def wrap(builder: Any, value: Any) -> Any:
        ours = dispatch.pop(id(original))
        try:
            return builder._wrap(original)
        finally:
            dispatch[id(original)] = ours

    dispatch[id(alias)] = wrap


def answer_while_tracing(function: Callable[[Any], Any]) -> None:
    """Call ``function`` on the real object while tracing; what it says must be part of the object's own guard.

    ``torch.compiler.assume_constant_result`` does so too, but then the graph depends on which object it was.
    """
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import LambdaVariable
    from torch._dynamo.variables.script_object import TorchScriptObjectVariable

    def answer(variable: Any) -> Any:
        return ConstantVariable.create(function(TorchScriptObjectVariable.as_python_constant(variable.realize())))

    VariableBuilder._id_dispatch()[id(function)] = lambda builder, value: LambdaVariable(answer, source=builder.source)


def guard_value_of(kind: type, attribute: str) -> None:
    """Let graphs depend on which member of an enumeration an argument is, by its ``attribute``.

    torch guards a member where it meets it first, and takes the same member from another place for granted: after
    ``op == ReduceOp.SUM`` has been answered by a default or a table, ``op`` may become any.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    class Member(UserDefinedObjectVariable):
        """Not of the type whose objects torch remembers by their identity."""

    def wrap(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        install_guard(AttrSource(builder.source, attribute).make_guard(GuardBuilder.EQUALS_MATCH))
        return Member(value, source=builder.source)

    VariableBuilder._type_dispatch()[kind] = wrap


def opaque_members(kind: type) -> dict[str, Any]:
    """What the compiler may read of an object of ``kind``, by name. ``register_opaque_type`` takes it only once."""
    return _opaque(kind).members


def set_opaque_guard(kind: type, facts: Callable[[Any], list[Any]]) -> None:
    """What must be equal for a graph to serve another object of ``kind``; torch gives groups no guard at all."""
    _opaque(kind).guard_fn = facts


def _opaque(kind: type) -> Any:
    from torch._library.opaque_object import _resolve_opaque_type_info
    from torch.distributed.device_mesh import _register_distributed_opaque_types

    _register_distributed_opaque_types()
    return _resolve_opaque_type_info(kind)


def read_at_trace_time() -> Any:
    """The mark of a member that is evaluated while tracing, its result being a constant of the graph."""
    from torch._library.opaque_object import MemberType

    return MemberType.USE_REAL


def traced_into() -> Any:
    """The mark of a member whose code is traced."""
    from torch._library.opaque_object import MemberType

    return MemberType.INLINED


def lower_as_collectives(names: Sequence[str], *, dropped: Sequence[str]) -> None:
    """Tell Inductor that operators of ours are collectives, so that it keeps their order; others have no code.

    Inductor treats an unknown operator as a pure function. It has no public way to say otherwise.
    """
    from torch._inductor import ir, lowering

    def lower(name: str) -> None:
        packet = getattr(torch.ops.paceline, name)
        lowering.add_layout_constraint(packet, lowering.constrain_to_fx_strides)

        @lowering.register_lowering(packet, type_promotion_kind=None)
        def collective(*args: Any) -> Any:
            outputs: Any = ir._CollectiveKernel.create_out_of_place(packet.default, *args)
            return [ir.TensorBox.create(output) for output in outputs]

    for name in names:
        lower(name)
    for name in dropped:
        lowering.register_lowering(getattr(torch.ops.paceline, name), type_promotion_kind=None)(lambda *args: None)


def guard_what_is_read(kind: type, *, attributes: frozenset[str], methods: frozenset[str], identity: str) -> None:
    """Let graphs depend on what was read of an object of ``kind``, and on nothing else of it.

    An opaque type has one guard for all its objects, the same whatever was read, and torch gives groups none: a graph
    that was made for one group then serves every other. ``attributes`` and the results of ``methods`` (which take no
    arguments) are guarded where they are read; any other use guards ``identity``, an attribute that no two share.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import LambdaVariable
    from torch._dynamo.variables.script_object import TorchScriptObjectVariable

    class Guarded(TorchScriptObjectVariable):
        """The compiler's stand-in for an object of that kind."""

        # `a is b` asks both for what they stand for, and neither about the other: so remember who was asked last.
        asked: Any = None

        def real(self) -> Any:
            return TorchScriptObjectVariable.as_python_constant(self)

        def guard(self, name: str) -> Any:
            source: Any = AttrSource(cast(Any, self.source), name)
            if name in methods:
                source = CallFunctionNoArgsSource(source)
            install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
            value = getattr(self.real(), name)
            return ConstantVariable.create(value() if name in methods else value)

        def var_getattr(self, tx: Any, name: str) -> Any:
            if name in attributes:
                return self.guard(name)
            if name in methods:
                return LambdaVariable(lambda *args, **kwargs: self.call_method(tx, name, args, kwargs))
            self.guard(identity)
            return super().var_getattr(tx, name)

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in methods and not args and not kwargs:
                return self.guard(name)
            self.guard(identity)
            return super().call_method(tx, name, args, kwargs)

        def is_python_constant(self) -> bool:
            return True

        def as_python_constant(self) -> Any:
            self.guard(identity)
            return self.real()

        def as_proxy(self) -> Any:
            self.guard(identity)
            return super().as_proxy()

        def get_real_python_backed_value(self) -> Any:
            other, Guarded.asked = Guarded.asked, self
            if other is not None and other is not self:
                other.guard(identity)
                self.guard(identity)
                Guarded.asked = None
            return self.real()

    dispatch = VariableBuilder._type_dispatch()

    def wrap(builder: Any, value: Any) -> Any:
        Guarded.asked = None
        del dispatch[kind]
        try:
            variable = builder._wrap(value)
        finally:
            dispatch[kind] = wrap
        if type(variable) is TorchScriptObjectVariable:
            variable.__class__ = Guarded
        return variable

    dispatch[kind] = wrap


# -- the compiler ------------------------------------------------------------------------------------------

# What stands in a captured graph where gradients are switched off and on.
set_grad_enabled = torch._C._set_grad_enabled


def run_as_soon_as_ready(node: Node) -> None:
    """Let the engine run ``node`` before all others that are ready, as it does with those that accumulate."""
    node._set_sequence_nr(2**63 - 1)  # type: ignore[attr-defined]


def at_compile_time(function: Callable[[Any], None]) -> None:
    """Traced by Dynamo: call ``function`` with Dynamo's context now, and leave nothing of it in the graph."""
    from torch._dynamo.comptime import comptime

    comptime(function)


def wrap_backend(context: Any, wrap: Callable[[Any], Any]) -> None:
    """In a function of :func:`at_compile_time`: put ``wrap`` around the backend of the graph that is being made."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    output.compiler_fn = wrap(output.compiler_fn)


def find_backend(name: Any, *, mode: str | None = None, options: Any = None, dynamic: bool | None = None) -> Any:
    """The backend that ``torch.compile(backend=name, ...)`` would call."""
    if name == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    return torch._TorchCompileWrapper(name, mode, options, dynamic)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether ``register_hook`` was used on it; the hooks are only in this attribute."""
    return bool(tensor._backward_hooks)


@functools.cache
def _stray_node() -> Node:
    return accumulate_grad_node(torch.zeros((), requires_grad=True))


def reaches_everything() -> bool:
    """Whether the running backward is a plain ``backward()``: then it would run any node, even one it has not got."""
    return will_execute(_stray_node())


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

    They are nowhere but in the closure that torch.compile makes.
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

    To save memory it moves what nothing waits for, gradients of weights that is, to the end of backward, where
    there is nothing left to overlap with. As an argument, since the backward is compiled later, when it first runs.
    """
    inner = getattr(backend, "_torchdynamo_orig_backend", backend)
    if not isinstance(inner, torch._TorchCompileInductorWrapper) or "reorder_for_peak_memory" in inner.config:
        return {}
    return {"config_patches": {"reorder_for_peak_memory": False}}


def graph_breaks() -> dict[str, int]:
    """The reasons of Dynamo's graph breaks so far in this process, with how often each came up."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def unseen_by_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function, and all it calls, as it is.

    :func:`hidden_from_compiler` without its price a call: for hooks, which autograd calls from inside a compiled
    function that runs a backward.
    """
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


# -- end of the compiler ------------------------------------------------------------------------------------


def backward_hook_ids(module: torch.nn.Module) -> tuple[list[int], list[int]]:
    """The numbers of a module's full backward hooks and pre-hooks, global ones first, in the order they are called."""
    shared = torch.nn.modules.module
    hooks = [*shared._global_backward_hooks, *module._backward_hooks]
    return hooks, [*shared._global_backward_pre_hooks, *module._backward_pre_hooks]


def backward_hooks(module: torch.nn.Module, ids: list[int], *, before: bool) -> list[Callable[..., Any]]:
    """The hooks with these numbers that were not removed since."""
    shared = torch.nn.modules.module
    if before:
        known = {**shared._global_backward_pre_hooks, **module._backward_pre_hooks}
    else:
        known = {**shared._global_backward_hooks, **module._backward_hooks}
    return [known[number] for number in ids if number in known]


def answer_about_modules(function: Callable[[Any], Any]) -> None:
    """Call ``function`` on the real module while tracing, and let the graph serve that module only."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import LambdaVariable

    def answer(variable: Any) -> Any:
        variable = variable.realize()
        if variable.source is not None:
            install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        return ConstantVariable.create(function(variable.get_real_python_backed_value()))

    VariableBuilder._id_dispatch()[id(function)] = lambda builder, value: LambdaVariable(answer, source=builder.source)


coalescing_manager = c10d._coalescing_manager
"""What people coalesce with; it has no public name yet."""

traced_default_group = c10d._get_default_group
"""The default group, or torch's error if there is none; torch has a rule for tracing it."""

private_group_members = frozenset({"_device_types"})
"""What torch's own Python code reads of a group."""


def call_untraceable_hooks(number: Callable[[Any], int], with_hook: Callable[[Tensor, int], Tensor]) -> None:
    """Let tensor hooks that cannot be traced be called by way of ``with_hook``, and let all be removed in the graph.

    There is no public way to stand in for a tensor's method.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.user_defined import RemovableHandleVariable

    torchs = TensorVariable._method_register_hook

    class Handle(RemovableHandleVariable):
        """Of a hook on a tensor that is made in the graph."""

        tensor: Any
        plain: Any
        hooked: Any

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name == "remove" and self.idx is None:
                self.idx = self.REMOVED
                after, before = self.hooked.node, self.plain.node
                after.replace_all_uses_with(before)
                if self.tensor.proxy is self.hooked:
                    self.tensor.proxy = self.plain
                after.graph.erase_node(after)
                return ConstantVariable.create(None)
            return super().call_method(tx, name, args, kwargs)

    def register(self: Any, tx: Any, name: str, hook: Any) -> Any:
        if self.source:
            return torchs(self, tx, name, hook)
        plain = self.proxy
        try:
            handle: Any = torchs(self, tx, name, hook)
        except Unsupported:
            hook = hook.realize()
            if name != "register_hook" or hook.source is None:
                raise
            function = hook.get_function() if hasattr(hook, "get_function") else hook.as_python_constant()
            point = ConstantVariable.create(number(function))
            caller: Any = UserFunctionVariable(cast(Any, with_hook))
            self.proxy = caller.call_function(tx, [self, point], {}).proxy
            self.synchronize_attributes(tx)
            handle = RemovableHandleVariable(mutation_type=None)
        if type(handle) is RemovableHandleVariable and self.proxy is not plain:
            cast(Any, handle).__class__ = Handle
            ours = cast(Handle, handle)
            ours.tensor, ours.plain, ours.hooked = self, plain, self.proxy
        return handle

    cast(Any, TensorVariable)._method_register_hook = register


def dtype_number(dtype: torch.dtype) -> int:
    """A number that stands for a dtype, the same on all ranks."""
    return sorted(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)).index(str(dtype))


def compare_opaque_classes() -> None:
    """``type(placement) == Shard``: torch's stand-in for such classes knows ``is``, and fails on ``==``."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.script_object import OpaqueObjectClassVariable

    def compare(self: Any, tx: Any, other: Any, op: str) -> Any:
        other = other.realize()
        same = getattr(other, "value", None) is self.value
        return ConstantVariable.create({"__eq__": same, "__ne__": not same}.get(op, NotImplemented))

    cast(Any, OpaqueObjectClassVariable).richcompare_impl = compare


resolve_group = c10d._resolve_process_group
"""How code that holds a group's name finds the group."""


def names_of_groups() -> dict[ProcessGroup, Any]:
    """All groups of this process and their names; traced."""
    return c10d._world.pg_names


make_premul_sum = dist._make_nccl_premul_sum
"""The reduction that multiplies first; public only by this name."""


def guard_hooks_of_modules() -> None:
    """Let graphs depend on whether a module has backward hooks.

    torch leaves that out for speed (``config.skip_nnmodule_hook_guards``, which also covers forward hooks and is not
    ours to change): a graph that was made without hooks would serve a module that has got one, and drop its gradients.
    """
    from torch._dynamo.guards import GuardBuilder

    torchs = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT

    @functools.wraps(torchs)
    def guard_empty(self: Any, guard: Any) -> None:
        if "_backward_" in guard.name:
            self.SEQUENCE_LENGTH(guard)
        else:
            torchs(self, guard)

    cast(Any, GuardBuilder).EMPTY_NN_MODULE_HOOKS_DICT = guard_empty


def say_what_objects_say() -> None:
    """Let what a group, mesh or placement raises while it is traced be the program's own exception.

    Otherwise it ends as an internal error of the compiler, and so does reading what has no row.
    """
    from torch._dynamo import exc
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.script_object import TorchScriptObjectVariable

    def softened(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, tx: Any, name: str, *args: Any) -> Any:
            try:
                return method(self, tx, name, *args)
            except exc.UnsafeScriptObjectError as error:
                kind = type(TorchScriptObjectVariable.as_python_constant(self)).__name__
                exc.unimplemented(
                    gb_type=f"a member of a {kind} that has no row",
                    context=f"{kind}.{name}",
                    explanation=f"{name} of a {kind} cannot be read while tracing. ({str(error).splitlines()[0]})",
                    hints=["Read it before compiled code is called, and pass the result as an argument."],
                    from_exc=error,
                )
            except (AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
                if type(error).__module__.startswith("torch."):
                    raise
                words: list[Any] = [
                    ConstantVariable.create(word) if isinstance(word, int) else str(word) for word in error.args
                ]
                exc.raise_observed_exception(type(error), tx, args=words)

        return call

    opaque = cast(Any, TorchScriptObjectVariable)
    opaque.var_getattr = softened(opaque.var_getattr)
    opaque.call_method = softened(opaque.call_method)


def keep_lowerings() -> None:
    """Let Inductor's lite mode (``fallback_by_default``) treat our operators as collectives, too: it would not look."""
    from torch._inductor import graph, lowering

    torchs = graph.should_fallback_by_default

    def should_fall_back(node: Any) -> bool:
        is_ours = getattr(node.target, "namespace", "") == "paceline" and node.target in lowering.lowerings
        return not is_ours and torchs(node)

    cast(Any, graph).should_fallback_by_default = should_fall_back
