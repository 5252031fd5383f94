"""The operators that stand in graphs.

``tap`` passes parameters through, and its backward calls ``report``. It is a composite operator: Dynamo and its
caches see one operator with a name; AOTAutograd (or autograd itself, with the ``eager`` backend) sees the autograd
function inside.

``report`` hands gradients to the reducer, and returns what the graph goes on with ([Note: early gradients]). Its
results are outputs of the graph, so compilers do not remove it, nor move it behind whatever else uses these results. To
compilers it is a pure function, so they copy nothing for it.

``enter`` and ``leave`` mark where a wrapper's forward begins and ends, and with which outputs. They are taken out of
the graph before a backend sees it, and ``graph_run`` does their work. Called outside of a graph, they do it themselves.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from paceline import _torch
from paceline.code_version import code_version
from paceline.compiler.taps import graph_run as run
from paceline.compiler.taps import tap as taps
from paceline.gradients import outputs, strides
from paceline.reduction import early_gradients

# This stands in each graph: torch's caches may hold code that was compiled by a version of Paceline whose operators
# meant something else, and such code must not be found again.
VERSION = code_version(sys.modules[__package__], outputs, strides, early_gradients)

_library = torch.library.Library("paceline", "FRAGMENT")
# A report runs Python code in every backward, which a recorded CUDA graph would not do.
_tags = (torch.Tag.cudagraph_unsafe,)


def _define(schema: str, function: Callable[..., Any], key: str) -> None:
    _library.define(schema, tags=_tags)
    _library.impl(schema.partition("(")[0], function, key)


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, binding: Tensor, entries: Sequence[int], version: str, *params: Tensor) -> tuple[Tensor, ...]:
        # A parameter without a gradient is unused. Zeros would hide that.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(binding)
        ctx.entries, ctx.version = entries, version
        # What the graph goes on with gets these: autograd would copy a gradient whose layout is not its parameter's.
        ctx.strides = [strides.dense_stride(param) for param in params]
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        members = [n for n, grad in enumerate(grads) if grad is not None]
        # With create_graph=True the gradients have a graph of their own, which must come through autograd.
        if not members or torch.is_grad_enabled():
            return (None, None, None, *grads)
        (binding,) = ctx.saved_tensors
        entries = [ctx.entries[n] for n in members]
        strides = [stride for n in members for stride in ctx.strides[n]]
        going_on = torch.ops.paceline.report([grads[n] for n in members], binding, entries, strides, ctx.version)
        result = list(grads)
        for n, grad in zip(members, going_on, strict=True):
            result[n] = grad
        return (None, None, None, *result)


def _tap(params: Sequence[Tensor], binding: Tensor, entries: Sequence[int], version: str) -> list[Tensor]:
    outputs = _Tap.apply(binding, entries, version, *params)
    node = outputs[0].grad_fn
    if node is not None:
        # The engine first runs the node that was made last. This one was made first, and would wait for all others.
        _torch.run_as_soon_as_ready(node)
    return list(outputs)


@_torch.unseen_by_compiler
def _report(
    grads: Sequence[Tensor], binding: Tensor, entries: Sequence[int], strides: Sequence[int], version: str
) -> list[Tensor]:
    return taps.report(int(binding), entries, grads, _split(strides, grads))


def _report_fake(
    grads: Sequence[Tensor], binding: Tensor, entries: Sequence[int], strides: Sequence[int], version: str
) -> list[Tensor]:
    pairs = zip(grads, _split(strides, grads), strict=True)
    return [grad.new_empty_strided(grad.shape, stride) for grad, stride in pairs]


def _split(strides: Sequence[int], grads: Sequence[Tensor]) -> list[Sequence[int]]:
    """The strides of each gradient, from the one list in which an operator takes them."""
    ends = list(itertools.accumulate(grad.dim() for grad in grads))
    return [strides[end - grad.dim() : end] for grad, end in zip(grads, ends, strict=True)]


def _nothing(*args: Any) -> None:
    """Stand in for an operator that returns nothing while a graph is traced."""


_define(
    "tap(Tensor[] params, Tensor binding, int[] entries, str version) -> Tensor[]", _tap, "CompositeImplicitAutograd"
)
_define(
    "report(Tensor[] grads, Tensor binding, int[] entries, SymInt[] strides, str version) -> Tensor[]",
    _report,
    "CompositeExplicitAutograd",
)
_library.impl("report", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("paceline::report", _report_fake, lib=_library)


# This is an operator, since Dynamo cannot trace the autograd function inside without warnings.
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
# A compiler drops what has no result, unless it is marked.
for _mark in (enter, leave):
    has_side_effect(_mark)
tap = torch.ops.paceline.tap.default
report = torch.ops.paceline.report.default
tie = torch.ops.paceline.tie.default
