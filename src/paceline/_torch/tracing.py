"""How Dynamo sees an object: what the rows of ``paceline.tracing`` stand on.

Nothing here imports the compiler by itself: the functions are called when somebody else has imported it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from paceline._torch.renamed import found_in, name_in

# What stands for a group, mesh or placement while code is traced. torch 2.15 has other names for its class and methods.
_READ = ("tp_getattro_impl", "var_getattr")
_COMPARE = ("tp_richcompare_impl", "richcompare_impl")


def _object_variable() -> Any:
    from torch._dynamo.variables import script_object

    return found_in(script_object, "CustomClassObjectVariable", "TorchScriptObjectVariable")


def traced_forms() -> dict[str, Callable[..., Any]]:
    """What the compiler traces instead of an in-place collective, by the collective's name.

    We replace the same functions, and pass on the calls that torch handles, so that its graphs stay as they are.
    """
    from torch.distributed import _functional_collectives as functional

    return {original.__name__: traced for original, traced in functional.traceable_collective_remaps.items()}


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


def refuse_to_enter(kind: type, *, name: str, explanation: str, hints: list[str]) -> None:
    """Break the graph at a ``with`` of an object of ``kind``. torch does so, too, but asks people for a bug report."""
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    torchs: Any = InstructionTranslatorBase.unsupported_ctx_graph_break
    objects = _object_variable()

    def refuse(self: Any, manager: Any) -> Any:
        manager = manager.realize()
        if isinstance(manager, objects):
            value = objects.as_python_constant(manager)
            if isinstance(value, kind):
                unimplemented(gb_type=f"{name} in a graph", context=str(value), explanation=explanation, hints=hints)
        return torchs(self, manager)

    cast(Any, InstructionTranslatorBase).unsupported_ctx_graph_break = refuse


def trace_instead(original: Any, traced: Callable[..., Any]) -> None:
    """``torch.compiler.substitute_in_graph`` for what it refuses: classes, and functions that torch has a rule for."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.functions import UserFunctionVariable

    def wrap(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.CLASS_MATCH if isinstance(value, type) else GuardBuilder.CLOSURE_MATCH)
        # Without a source of its own, ``traced`` would get the original's, and its defaults would be looked for there.
        source = AttrSource(builder.tx.import_source(traced.__module__), traced.__name__)
        return UserFunctionVariable(cast(Any, traced), source=source)

    VariableBuilder._id_dispatch()[id(original)] = wrap


def class_instead(original: type, traced: type) -> None:
    """Let traced code that names ``original`` see ``traced``, an abstract class to which more classes belong."""
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
    """Let a call of ``alias`` be traced as torch traces ``original``, which a row of ours replaces."""
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

    objects = _object_variable()

    def answer(variable: Any) -> Any:
        return ConstantVariable.create(function(objects.as_python_constant(variable.realize())))

    VariableBuilder._id_dispatch()[id(function)] = lambda builder, value: LambdaVariable(answer, source=builder.source)


def guard_value_of(kind: type, attribute: str) -> None:
    """Let graphs depend on which member of an enumeration an argument is, by its ``attribute``.

    torch guards a member only where it first meets it, and does not guard the same member from another place. If a
    default or a table brought ``ReduceOp.SUM`` first, ``op`` could later be any other member.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    class Member(UserDefinedObjectVariable):
        """A variable of another type than the one whose objects torch remembers by their identity."""

    def wrap(builder: Any, value: Any) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        install_guard(AttrSource(builder.source, attribute).make_guard(GuardBuilder.EQUALS_MATCH))
        return Member(value, source=builder.source)

    VariableBuilder._type_dispatch()[kind] = wrap


def allow_members(kind: type, *, constant: frozenset[str], traced: frozenset[str]) -> None:
    """Let the compiler read more of an object of ``kind``; ``register_opaque_type`` takes that only once.

    ``constant`` members are evaluated while tracing, and their results are constants of the graph. The code of
    ``traced`` members is traced.
    """
    from torch._library.opaque_object import MemberType

    for names, member_type in ((constant, MemberType.USE_REAL), (traced, MemberType.INLINED)):
        for name in names:
            _opaque(kind).members.setdefault(name, member_type)


def set_opaque_guard(kind: type, facts: Callable[[Any], list[Any]]) -> None:
    """Set what must be equal for a graph to serve another object of ``kind``; torch gives groups no guard at all."""
    _opaque(kind).guard_fn = facts


def _opaque(kind: type) -> Any:
    from torch._library.opaque_object import _resolve_opaque_type_info
    from torch.distributed.device_mesh import _register_distributed_opaque_types

    _register_distributed_opaque_types()
    return _resolve_opaque_type_info(kind)


def guard_what_is_read(kind: type, *, attributes: frozenset[str], methods: frozenset[str], identity: str) -> None:
    """Let graphs depend on what was read of an object of ``kind``, and on nothing else of it.

    An opaque type has one guard for all its objects, whatever was read of them, and torch gives groups none: a graph
    that was made for one group then serves every other. ``attributes`` and the results of ``methods`` (which take no
    arguments) are guarded where they are read; any other use guards ``identity``, an attribute that no two share.
    """
    from torch._dynamo.variables.builder import VariableBuilder

    objects = _object_variable()
    guarded = _guarded_variable(objects, attributes, methods, identity)
    dispatch = VariableBuilder._type_dispatch()

    def wrap(builder: Any, value: Any) -> Any:
        guarded.asked = None
        del dispatch[kind]
        try:
            variable = builder._wrap(value)
        finally:
            dispatch[kind] = wrap
        if type(variable) is objects:
            variable.__class__ = guarded
        return variable

    dispatch[kind] = wrap


def _guarded_variable(objects: Any, attributes: frozenset[str], methods: frozenset[str], identity: str) -> Any:
    """The class of the compiler's stand-ins for objects that :func:`guard_what_is_read` is about."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import LambdaVariable

    read = name_in(objects, *_READ)

    class Guarded(objects):  # type: ignore[misc]
        # `a is b` asks each for its object, but tells neither of the other. So we remember which was asked last.
        asked: Any = None

        def real(self) -> Any:
            return objects.as_python_constant(self)

        def guard(self, name: str) -> Any:
            source: Any = AttrSource(cast(Any, self.source), name)
            if name in methods:
                source = CallFunctionNoArgsSource(source)
            install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
            value = getattr(self.real(), name)
            return ConstantVariable.create(value() if name in methods else value)

        def read(self, tx: Any, name: str) -> Any:
            if name in attributes:
                return self.guard(name)
            if name in methods:
                return LambdaVariable(lambda *args, **kwargs: self.call_method(tx, name, args, kwargs))
            self.guard(identity)
            return getattr(objects, read)(self, tx, name)

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

    setattr(Guarded, read, Guarded.read)
    return Guarded


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


def call_untraceable_hooks(number: Callable[[Any], int], with_hook: Callable[[Tensor, int], Tensor]) -> None:
    """Let tensor hooks that cannot be traced be called by way of ``with_hook``, and let all be removed in the graph.

    There is no public way to replace a tensor's method in a graph.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.user_defined import RemovableHandleVariable

    torchs = TensorVariable._method_register_hook

    class Handle(RemovableHandleVariable):
        """The handle of a hook on a tensor that is made in the graph."""

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


def compare_opaque_classes() -> None:
    """Make ``type(placement) == Shard`` work: torch's stand-in for such classes knows ``is``, and fails on ``==``."""
    from torch._dynamo.variables import script_object
    from torch._dynamo.variables.constant import ConstantVariable

    def compare(self: Any, tx: Any, other: Any, op: str) -> Any:
        other = other.realize()
        same = getattr(other, "value", None) is self.value
        return ConstantVariable.create({"__eq__": same, "__ne__": not same}.get(op, NotImplemented))

    classes = found_in(script_object, "CustomClassVariable", "OpaqueObjectClassVariable")
    setattr(classes, name_in(classes, *_COMPARE), compare)


def guard_hooks_of_modules() -> None:
    """Let graphs depend on whether a module has backward hooks.

    torch leaves that out for speed (``config.skip_nnmodule_hook_guards``, which also covers forward hooks and is not
    ours to change): a graph that was made without hooks would serve a module that has got one, and drop its gradients.
    A graph for ``torch.no_grad()`` has no backward, and is not slowed down by this.
    """
    from torch._dynamo.guards import GuardBuilder

    torchs = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT

    @functools.wraps(torchs)
    def guard_empty(self: Any, guard: Any) -> None:
        if "_backward_" in guard.name and torch.is_grad_enabled():
            self.SEQUENCE_LENGTH(guard)
        else:
            torchs(self, guard)

    cast(Any, GuardBuilder).EMPTY_NN_MODULE_HOOKS_DICT = guard_empty


def say_what_objects_say() -> None:
    """Let what a group, mesh or placement raises while it is traced be the program's own exception.

    Otherwise it ends as an internal error of the compiler, and so does reading a member that has no row.
    """
    from torch._dynamo import exc
    from torch._dynamo.variables.constant import ConstantVariable

    objects = _object_variable()

    def softened(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, tx: Any, name: str, *args: Any) -> Any:
            try:
                return method(self, tx, name, *args)
            except exc.UnsafeScriptObjectError as error:
                kind = type(objects.as_python_constant(self)).__name__
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

    for name in (name_in(objects, *_READ), "call_method"):
        setattr(objects, name, softened(getattr(objects, name)))
