"""Parameters whose gradients a compiled backward reports together.

[Note: taps are not buckets]
A tap is what a graph knows: some parameters that are next to each other in the plan's order, up to a part of the
whole (at most ``MAX_TAP_BYTES``), or one that is larger. A bucket is what the reducer knows. A tap reports when its
last gradient exists, and the reducer counts what is left of each bucket, as with gradients that autograd brings.
So a graph is the same whatever the bucket size is, and whatever becomes of the plan later: nothing has to be
compiled again when the plan is rebuilt, and caches hit for any bucket size.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from paceline import ownership
from paceline.early import Early, Strides, in_layout
from paceline.edition import edition
from paceline.plan import MB
from paceline.reducer import Reducer

# Each report is a call of Python code: many small parameters share one. Larger taps would only report later.
MAX_TAP_BYTES = MB
# Small modules have this many all the same.
TAPS = 32
# Stands in each graph: compiled code that torch's caches keep from a version of ours whose operators meant something
# else must not be found again.
FORM = edition("compiler/ops.py", "compiler/tap.py", "bucket.py", "early.py", "outputs.py")


class Tap(NamedTuple):
    """A reducer's parameters that are reported together; weak, as graphs outlive wrappers."""

    reducer: weakref.ref[Reducer]
    params: tuple[weakref.ref[Tensor], ...]

    def holds(self, reducer: Reducer, params: Sequence[Tensor]) -> bool:
        return self.reducer() is reducer and [ref() for ref in self.params] == list(map(_Same, params))

    def is_dead(self) -> bool:
        return self.reducer() is None or any(ref() is None for ref in self.params)


class _Same:
    """Compares by identity: tensors compare by their elements."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return other is self._tensor

    __hash__ = None  # type: ignore[assignment]


_taps: dict[str, Tap] = {}
_numbers: weakref.WeakKeyDictionary[Reducer, int] = weakref.WeakKeyDictionary()


def owner_of(param: Tensor) -> Reducer | None:
    """The live reducer that reduces ``param``, if there is one: of several, the one in use."""
    return next((reducer for reducer in ownership.live() if reducer.slots.owns(param)), None)


def group(reducer: Reducer, params: Iterable[Tensor]) -> list[list[Tensor]]:
    """``params`` of ``reducer`` in groups that are reported together, in the order of the plan."""
    index_of = {id(param): n for n, param in enumerate(reducer.roster.params)}
    place = {index: n for n, index in enumerate(reducer.plan.order)}
    inside = [param for param in params if index_of[id(param)] in place]
    inside.sort(key=lambda param: place[index_of[id(param)]])
    groups: list[list[Tensor]] = []
    size_bytes = 0
    limit_bytes = min(MAX_TAP_BYTES, reducer.plan.size_bytes // TAPS)
    for param in inside:
        own_bytes = param.numel() * param.element_size()
        if not groups or size_bytes + own_bytes > limit_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(param)
        size_bytes += own_bytes
    return groups


def register_tap(reducer: Reducer, params: Sequence[Tensor]) -> str:
    """A key for these parameters: the same in every run that makes the same wrappers, so that caches hit.

    The key stands in the graph; no rank and no world size is in it.
    """
    number = _numbers.get(reducer)
    if number is None:
        taken = set(_numbers.values())
        number = _numbers[reducer] = next(n for n in itertools.count() if n not in taken)
    index_of = {id(param): n for n, param in enumerate(reducer.roster.params)}
    stem = f"{FORM}/{number}:" + ",".join(str(index_of[id(param)]) for param in params)
    for attempt in itertools.count():
        # Another one after the module's parameters have changed: graphs made before keep the old meaning.
        key = f"{stem}#{attempt}" if attempt else stem
        known = _taps.get(key)
        if known is None or known.is_dead():
            _taps[key] = Tap(weakref.ref(reducer), tuple(weakref.ref(param) for param in params))
            return key
        if known.holds(reducer, params):
            return key
    raise AssertionError


def report(key: str, members: Sequence[int], grads: Sequence[Tensor], strides: Sequence[Strides]) -> list[Tensor]:
    """A compiled backward has made ``grads`` for these ``members`` of the tap; what it hands to autograd for them."""
    tap = _taps.get(key)
    reducer = tap.reducer() if tap is not None else None
    if tap is not None and reducer is not None:
        params = [tap.params[member]() for member in members]
        # Else frozen since, or replaced: autograd knows what to do with them.
        if all(param is not None and reducer.slots.has(param) for param in params):
            come = zip(cast("list[Tensor]", params), grads, strides, strict=True)
            return reducer.gradients_early([Early(*each) for each in come])
    return [in_layout(grad, stride) for grad, stride in zip(grads, strides, strict=True)]
