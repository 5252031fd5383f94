"""Parameters whose gradients a compiled backward reports together.

[Note: taps are not buckets]
A tap is what a graph knows: some parameters that are next to each other in the plan's order, as many as it takes to
make a 32nd of the whole (at most ``MAX_TAP_BYTES``, and what the last of them has in excess). A bucket is what the
reducer knows. A tap reports when its last gradient exists, and the reducer counts what is left of each bucket, as with
gradients that autograd brings. So a graph is the same whatever the bucket size is, and whatever becomes of the plan
later: nothing has to be compiled again when the plan is rebuilt, and caches hit for any bucket size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from paceline import ownership
from paceline.compiler import binding as bindings
from paceline.early import Early, Strides, in_layout
from paceline.edition import edition
from paceline.plan import MB
from paceline.reducer import Reducer

# Each report costs compile time, and is a call of Python code in each backward. This many leave at most 3% of the bytes
# waiting for the gradient that completes their tap.
TAPS = 32
# The gradients of a tap are in memory until the last of them exists.
MAX_TAP_BYTES = 8 * MB
# Stands in each graph: compiled code that torch's caches keep from a version of ours whose operators meant something
# else must not be found again.
FORM = edition("compiler/ops.py", "compiler/tap.py", "compiler/binding.py", "bucket.py", "early.py", "outputs.py")


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
    limit_bytes = min(MAX_TAP_BYTES, reducer.plan.size_bytes // TAPS)
    size_bytes = limit_bytes
    for param in inside:
        # A large one comes into the same tap as the small ones before it, its bias say: taps cost compile time.
        if size_bytes >= limit_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append(param)
        size_bytes += param.numel() * param.element_size()
    return groups


def report(number: int, places: Sequence[int], grads: Sequence[Tensor], strides: Sequence[Strides]) -> list[Tensor]:
    """A compiled backward has made ``grads`` for the parameters in these places of a binding; what it hands to autograd
    for them."""
    binding = bindings.find(number)
    params = binding.params(places) if binding is not None else None
    reducer = owner_of(params[0]) if params else None
    # Else frozen since, replaced, or of several wrappers: autograd knows what to do with them.
    if params is not None and reducer is not None and reducer.active and all(map(reducer.slots.has, params)):
        come = zip(params, grads, strides, strict=True)
        return reducer.gradients_early([Early(*each) for each in come])
    return [in_layout(grad, stride) for grad, stride in zip(grads, strides, strict=True)]
