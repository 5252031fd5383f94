"""Backward hooks of modules and tensors inside a graph, without compiled autograd.

A hook is the user's Python: it may print, append to a list, change gradients or call a collective. It is not traced.
The graph has an identity around the module (or on the tensor) whose backward is the operator
``paceline::backward_hooks``; that calls the hooks when backward runs, with real gradients. A graph can hold only
numbers, so each place where hooks are called is a *point* in a table, and the graph holds its index.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from paceline import _torch
from paceline.errors import BadArgumentError, StateError
from paceline.tracing.operator_namespace import operators
from paceline.tracing.registry import OverrideRow, SpecialRow

Grads = tuple[Tensor | None, ...]


class ModulePoint:
    """One call of a module that has hooks, in one graph."""

    def __init__(self, module: nn.Module) -> None:
        # The reference is weak: the graph is guarded on the module, and a strong one would keep it alive for good.
        self._module = weakref.ref(module)
        self._name = type(module).__name__
        self._hooks, self._pre_hooks = _torch.backward_hook_ids(module)
        self._grad_outputs: Grads = ()

    def at_output(self, grads: Grads, inputs: int) -> Grads:
        """Hear that the output has gradients. If no input gets any, ``inputs`` is how many there are, else -1."""
        module = self._owner()
        for hook in _torch.backward_hooks(module, self._pre_hooks, before=True):
            grads = self._changed(grads, hook(module, grads), "pre hook")
        self._grad_outputs = grads
        if inputs >= 0:
            self.at_input((None,) * inputs)
        return grads

    def at_input(self, grads: Grads) -> Grads:
        """Hear that gradients have come to the module's input."""
        module = self._owner()
        outputs = self._grad_outputs
        for hook in _torch.backward_hooks(module, self._hooks, before=False):
            grads = self._changed(grads, hook(module, grads, outputs), "hook")
        self._grad_outputs = ()
        return grads

    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise StateError(f"a {self._name} with backward hooks was freed before the backward that should call them")
        return module

    def _changed(self, grads: Grads, answer: Any, kind: str) -> Grads:
        if answer is None:
            return grads
        answer = answer if isinstance(answer, tuple) else (answer,)
        # The messages are torch's.
        if len(answer) != len(grads):
            name = "grad_output" if kind == "pre hook" else "grad_input"
            raise StateError(
                f"Backward {kind} returned an invalid number of {name}, got {len(answer)}, but expected {len(grads)}"
                f" (of a {self._name})"
            )
        if all(grad is None for grad in grads) and any(grad is not None for grad in answer):
            raise StateError(
                "Backward hook for Modules where no input requires gradient should always return None or None for all"
                f" gradients. (of a {self._name})"
            )
        return answer


class TensorPoint:
    """A hook that was put on a tensor inside the graph."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def at_output(self, grads: Grads, inputs: int) -> Grads:
        answer = self._hook(grads[0])  # type: ignore[arg-type]
        return grads if answer is None else (answer,)


points: list[Any] = []
"""What the numbers in graphs mean. They follow the order of tracing, so that the next run has the same numbers."""


def module_point(module: nn.Module) -> int:
    """The number of a new point for ``module``. It is called while tracing, with the real module."""
    points.append(ModulePoint(module))
    return len(points) - 1


def tensor_point(hook: Callable[[Tensor], Tensor | None]) -> int:
    points.append(TensorPoint(hook))
    return len(points) - 1


# --- at run time -------------------------------------------------------------------------------------------


def call_hooks(
    grads: list[Tensor], point: int, at_output: bool, positions: list[int], count: int, inputs: int
) -> list[Tensor]:
    """The operator. ``positions`` says where among the ``count`` arguments or results the gradients belong."""
    # These are copies, which hooks may keep: the compiler may use the memory again once the operator has returned.
    given: list[Tensor] = [grad.clone() for grad in grads]
    packed: list[Tensor | None] = [None] * count
    for position, grad in zip(positions, given, strict=True):
        packed[position] = grad
    hooks = points[point]
    answer = hooks.at_output(tuple(packed), inputs) if at_output else hooks.at_input(tuple(packed))
    packed.clear()
    return [_returned(answer[position], like) for position, like in zip(positions, grads, strict=True)]


def _returned(value: Tensor | None, like: Tensor) -> Tensor:
    """A tensor of our own, laid out as the compiler expects it."""
    if value is None:
        return torch.zeros_like(like)
    if value.shape != like.shape:
        raise BadArgumentError(
            f"a backward hook returned a gradient of shape {tuple(value.shape)}, not {tuple(like.shape)}"
        )
    return torch.empty_like(like).copy_(value)


def describe(
    grads: list[Tensor], point: int, at_output: bool, positions: list[int], count: int, inputs: int
) -> list[Tensor]:
    return [torch.empty_like(grad) for grad in grads]


SCHEMA = "(Tensor[] grads, int point, bool at_output, int[] positions, int count, int inputs) -> Tensor[]"


# --- while tracing -----------------------------------------------------------------------------------------


class Boundary(torch.autograd.Function):
    """An identity whose backward calls hooks."""

    @staticmethod
    def forward(ctx, point, at_output, positions, count, inputs, *tensors):  # type: ignore[no-untyped-def]
        ctx.call = (point, at_output, positions, count, inputs)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        point, at_output, positions, count, inputs = ctx.call
        changed = operators.backward_hooks(list(grads), point, at_output, list(positions), count, inputs)
        return None, None, None, None, None, *changed


class TracedBackwardHook:
    """Takes the place of ``torch.utils.hooks.BackwardHook`` in the code of ``nn.Module`` that calls hooks."""

    def __init__(self, point: int) -> None:
        self._point = point
        self._inputs = 0
        self._is_input_watched = False

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._inputs = len(args)
        passed, self._is_input_watched = self._pass(args, at_output=False, inputs=-1)
        return passed

    def setup_output_hook(self, result: Any) -> Any:
        inputs = -1 if self._is_input_watched else self._inputs
        if isinstance(result, tuple):
            return self._pass(result, at_output=True, inputs=inputs)[0]
        return self._pass((result,), at_output=True, inputs=inputs)[0][0]

    def _pass(self, values: tuple[Any, ...], *, at_output: bool, inputs: int) -> tuple[tuple[Any, ...], bool]:
        """Pass those of ``values`` that require grad through a boundary; also return whether there were any."""
        if not torch.is_grad_enabled():
            return values, False
        positions = tuple(
            index for index, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad
        )
        if not positions:
            return values, False
        tensors = [values[position] for position in positions]
        passed = Boundary.apply(self._point, at_output, positions, len(values), inputs, *tensors)
        result = list(values)
        for position, tensor in zip(positions, passed, strict=True):
            result[position] = tensor
        return tuple(result), True


def backward_hook(module, user_hooks, user_pre_hooks):  # type: ignore[no-untyped-def]
    return TracedBackwardHook(module_point(module))


def with_hook(tensor: Tensor, point: int) -> Tensor:
    return Boundary.apply(point, True, (0,), 1, -1, tensor)[0]


ROWS = (
    SpecialRow("hooks that come and go", "a graph depends on a module's hooks", _torch.guard_hooks_of_modules),
    SpecialRow(
        "(the place of a module's hooks)",
        "a number; the graph serves that module only",
        functools.partial(_torch.answer_about_modules, module_point),
    ),
    OverrideRow(
        "module.register_full_backward_hook, register_full_backward_pre_hook",
        "an identity whose backward calls the hooks as they are",
        BackwardHook,
        backward_hook,
    ),
    SpecialRow(
        "tensor.register_hook inside the function",
        "torch's, if the hook can be traced; else an identity whose backward calls it as it is",
        functools.partial(_torch.call_untraceable_hooks, tensor_point, with_hook),
    ),
)
