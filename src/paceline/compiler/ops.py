"""The operators that stand in graphs.

``tap`` passes parameters through, and its backward calls ``report``. It is a composite operator: Dynamo and its
caches see one operator with a name, and AOTAutograd, or autograd itself under the ``eager`` backend, sees the
autograd function inside.

``report`` hands gradients over to the reducer, and returns what the graph goes on with (see
[Note: early gradients] in early.py). Its results are outputs of the graph, so compilers neither remove it nor move it
behind other uses of them; and it is a function like any other to them: nothing is copied for it.

``enter`` and ``leave`` mark where a wrapper's forward begins and ends, and with which outputs. They are taken out of
the graph before a backend sees it (see ``run``); called as they are, they do the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from paceline import _torch, outputs
from paceline.bucket import dense_stride
from paceline.compiler import run
from paceline.compiler import tap as taps

_library = torch.library.Library("paceline", "FRAGMENT")
# The report runs Python code in every backward: a recorded CUDA graph would not.
_tags = (torch.Tag.cudagraph_unsafe,)


def _define(schema: str, function: Callable[..., Any], key: str) -> None:
    _library.define(schema, tags=_tags)
    _library.impl(schema.partition("(")[0], function, key)


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, binding: Tensor, places: Sequence[int], form: str, *params: Tensor) -> tuple[Tensor, ...]:
        # A parameter that has no gradient is unused, which zeros would hide.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(binding)
        ctx.places, ctx.form = places, form
        # Autograd copies a gradient that is laid out in another way than its parameter.
        ctx.strides = [dense_stride(param) for param in params]
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        members = [n for n, grad in enumerate(grads) if grad is not None]
        # With create_graph=True gradients belong to a graph of their own, which has to come through autograd.
        if not members or torch.is_grad_enabled():
            return (None, None, None, *grads)
        (binding,) = ctx.saved_tensors
        places = [ctx.places[n] for n in members]
        strides = [stride for n in members for stride in ctx.strides[n]]
        going_on = torch.ops.paceline.report([grads[n] for n in members], binding, places, strides, ctx.form)
        result = list(grads)
        for n, grad in zip(members, going_on, strict=True):
            result[n] = grad
        return (None, None, None, *result)


def _tap(params: Sequence[Tensor], binding: Tensor, places: Sequence[int], form: str) -> list[Tensor]:
    outputs = _Tap.apply(binding, places, form, *params)
    node = outputs[0].grad_fn
    if node is not None:
        # The engine runs what was made last first; made at the start of forward, this would wait for all others.
        _torch.run_as_soon_as_ready(node)
    return list(outputs)


@_torch.unseen_by_compiler
def _report(
    grads: Sequence[Tensor], binding: Tensor, places: Sequence[int], strides: Sequence[int], form: str
) -> list[Tensor]:
    return taps.report(int(binding), places, grads, _split(strides, grads))


def _report_fake(
    grads: Sequence[Tensor], binding: Tensor, places: Sequence[int], strides: Sequence[int], form: str
) -> list[Tensor]:
    pairs = zip(grads, _split(strides, grads), strict=True)
    return [grad.new_empty_strided(grad.shape, stride) for grad, stride in pairs]


def _split(strides: Sequence[int], grads: Sequence[Tensor]) -> list[Sequence[int]]:
    """Those of each gradient; an operator takes them all in one list."""
    ends = list(itertools.accumulate(grad.dim() for grad in grads))
    return [strides[end - grad.dim() : end] for grad, end in zip(grads, ends, strict=True)]


def _nothing(*args: Any) -> None:
    """What an operator that returns nothing does to fake tensors."""


_define("tap(Tensor[] params, Tensor binding, int[] places, str form) -> Tensor[]", _tap, "CompositeImplicitAutograd")
_define(
    "report(Tensor[] grads, Tensor binding, int[] places, SymInt[] strides, str form) -> Tensor[]",
    _report,
    "CompositeExplicitAutograd",
)
_library.impl("report", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("paceline::report", _report_fake, lib=_library)


# As an operator, since Dynamo would trace the autograd function otherwise, which it cannot do without warnings.
_define("tie(Tensor tensor, Tensor anchor) -> Tensor", outputs.tie, "CompositeImplicitAutograd")


def _enter(key: str) -> None:
    run.enter(key)


def _leave(outputs: Sequence[Tensor], key: str) -> None:
    run.leave(key, outputs, own=outputs)


for _schema, _function in (("enter(str key) -> ()", _enter), ("leave(Tensor[] outputs, str key) -> ()", _leave)):
    _define(_schema, _function, "CompositeExplicitAutograd")
    _name = _schema.partition("(")[0]
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"paceline::{_name}", _nothing, lib=_library)

enter = torch.ops.paceline.enter.default
leave = torch.ops.paceline.leave.default
# Without this a compiler drops what has no result.
for _mark in (enter, leave):
    has_side_effect(_mark)
tap = torch.ops.paceline.tap.default
tie = torch.ops.paceline.tie.default
