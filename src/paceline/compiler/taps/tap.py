"""Parameters whose gradients a compiled backward reports together.

[Note: taps are not buckets]
A graph knows taps, and the reducer knows buckets. A tap is a few parameters that are next to each other in the plan's
order: as many as make up a 32nd of all bytes, or ``MAX_TAP_BYTES`` if that is less. A tap reports when its last
gradient exists, and the reducer then counts what is left of each bucket, as it does with gradients that autograd
brings. So a graph depends neither on the bucket size nor on later plans: nothing is compiled again when the plan is
rebuilt, and caches hit for any bucket size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from paceline.compiler.taps import parameter_binding as bindings
from paceline.gradients.plan import MB
from paceline.reduction import ownership
from paceline.reduction.early_gradients import Early, Strides, in_layout
from paceline.reduction.reducer import Reducer

# Each report costs compile time, and one call of Python code in each backward. With this number of taps at most 3% of
# the bytes wait for the gradient that completes their tap.
TAPS = 32
# The gradients of a tap are in memory until the last of them exists.
MAX_TAP_BYTES = 8 * MB


def owner_of(param: Tensor) -> Reducer | None:
    """The live reducer that reduces ``param``, or None. If several wrappers have it, this is the one in use."""
    return next((reducer for reducer in ownership.live() if reducer.slots.owns(param)), None)


def group(reducer: Reducer, params: Iterable[Tensor]) -> list[list[Tensor]]:
    """``params`` of ``reducer`` in groups that are reported together, in the order of the plan."""
    index_of = {id(param): n for n, param in enumerate(reducer.roster.params)}
    position = {index: n for n, index in enumerate(reducer.plan.order)}
    inside = [param for param in params if index_of[id(param)] in position]
    inside.sort(key=lambda param: position[index_of[id(param)]])
    groups: list[list[Tensor]] = []
    limit_bytes = min(MAX_TAP_BYTES, reducer.plan.size_bytes // TAPS)
    size_bytes = limit_bytes
    for param in inside:
        # A large parameter joins the small ones before it, such as its bias, since every tap costs compile time.
        if size_bytes >= limit_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(param)
        size_bytes += param.numel() * param.element_size()
    return groups


def report(number: int, entries: Sequence[int], grads: Sequence[Tensor], strides: Sequence[Strides]) -> list[Tensor]:
    """Take the ``grads`` that a compiled backward has made for the parameters of these entries of a binding.

    Returns what the graph hands to autograd in their stead.
    """
    binding = bindings.find(number)
    params = binding.params(entries) if binding is not None else None
    reducer = owner_of(params[0]) if params else None
    # If the parameters were frozen or replaced since, or belong to several wrappers, autograd deals with them.
    if params is not None and reducer is not None and reducer.active and all(map(reducer.slots.has, params)):
        come = zip(params, grads, strides, strict=True)
        return reducer.gradients_early([Early(*each) for each in come])
    return [in_layout(grad, stride) for grad, stride in zip(grads, strides, strict=True)]
