"""The smallest program that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .program import Backward, Net, Op, Options, Program

Fails = Callable[[Program], bool]
_KEPT = ("net", "data", "kind", "what", "to", "phase", "place", "layer", "backend")
"""Arguments that say what an op is: there is no smaller value of them."""


def shrink(program: Program, fails: Fails, *, most: int = 150) -> Program:
    """Cut ``program`` as long as it ``fails``, in at most so many runs."""
    runs = 0
    cut = True
    while cut:
        cut = False
        for smaller in _smaller(program):
            if runs >= most:
                return program
            runs += 1
            if fails(smaller):
                program, cut = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are one cut smaller, the largest cuts first."""
    ops = program.ops
    half = len(ops) // 2
    while half >= 1:
        for start in range(len(ops) - half, -1, -half):
            yield replace(program, ops=ops[:start] + ops[start + half :])
        half //= 2
    if len(program.nets) > 1 and _last_is_unused(program):
        yield replace(program, nets=program.nets[:-1])
    for index, net in enumerate(program.nets):
        for less in _plainer(net, Net()):
            if _fits(program, index, less):
                nets = (*program.nets[:index], less, *program.nets[index + 1 :])
                yield replace(program, nets=nets)
    for less in _plainer(program.options, Options()):
        yield replace(program, options=less)
    if program.backend != "gloo":
        yield replace(program, backend="gloo")
    for index, op in enumerate(ops):
        for plainer in _plainer_op(op):
            yield replace(program, ops=(*ops[:index], plainer, *ops[index + 1 :]))


def _last_is_unused(program: Program) -> bool:
    last = len(program.nets) - 1
    return all(op.net != last and getattr(op, "through", None) != last for op in program.ops)


def _fits(program: Program, index: int, net: Net) -> bool:
    """Whether no op names a layer that the smaller net does not have, and nets that share a layer still can."""
    ops: list[Any] = [op for op in program.ops if op.net == index]
    layers = [getattr(op, "layer", None) or 0 for op in (*ops, *net.hooks)]
    backwards = [op for op in program.ops if isinstance(op, Backward)]
    uses = [use for op in backwards if op.net == index for use in op.use]
    uses += [use for op in backwards if op.through == index for use in op.through_use]
    used = [layer for use in uses for layer in use or ()]
    shared = any(each.shares is not None for each in program.nets)
    return all(layer < net.layers for layer in layers + used) and (not shared or net.width == program.nets[index].width)


def _plainer(value: Any, default: Any) -> Iterator[Any]:
    """``value`` with one field as it is by default."""
    for field in fields(value):
        plain = getattr(default, field.name)
        if getattr(value, field.name) != plain:
            yield replace(value, **{field.name: plain})


def _plainer_op(op: Op) -> Iterator[Op]:
    for field in fields(op):
        if field.name not in _KEPT and getattr(op, field.name) != field.default:
            yield replace(op, **{field.name: field.default})
    if isinstance(op, Backward):
        if op.fault is not None and op.fault.retry:
            yield replace(op, fault=replace(op.fault, retry=False))
        if max(op.repeat) > 2:
            yield replace(op, repeat=tuple(min(each, 2) for each in op.repeat))
