"""The plan of the buckets, made from specs of the parameters. Plans and specs are pure values without tensors.

Only a plan says which gradients share a bucket: the reducer launches by it, and whatever predicts or shows what the
reducer does reads it. Ranks that agree on the parameters and options make the same plan, with the same fingerprint.

>>> from paceline.gradients.plan import ParameterSpec, make_plan
>>> layers = [ParameterSpec(f"layers.{i}.weight", (512, 512), (512, 1), "float32", 4, "cpu") for i in range(8)]
>>> [bucket.params for bucket in make_plan(layers, caps_bytes=(3 << 20,)).buckets]
[(7, 6), (5, 4, 3), (2, 1, 0)]
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from paceline.gradients.plan_table import plan_lines

MB = 1 << 20
DEFAULT_CAP_BYTES = 25 * MB
# The first bucket is small so that communication starts while most of backward is still to come.
DEFAULT_FIRST_CAP_BYTES = 1 * MB
# The last bucket overlaps with nothing, so no bucket should be a large part of the whole; but each costs a collective.
# This was measured over gloo, as a ratio to the time with torch's 1 and 25 MiB. A step of a 64 MB GPT takes 0.98 with
# quarters and 1.01 with eighths. That of a 16 MB BERT takes 0.98 in one piece and 1.07 with buckets of 4 MB.
PARTS = 4
DEFAULT_LEAST_CAP_BYTES = 8 * MB


class ParameterSpec(NamedTuple):
    """What ranks must agree on about one parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str
    requires_grad: bool = True
    sparse: bool = False
    """The gradient is a sparse tensor (``nn.Embedding(sparse=True)``)."""
    delayed: bool = False
    """Reduced after all others (``delay_all_reduce_named_params``)."""
    placement: str = ""
    """Which part of which whole the shape is ([Note: portions] in portion.py). It is empty for a whole parameter."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize

    def row(self) -> tuple[object, ...]:
        """The fields that ranks compare. The index of the device is not one of them, as each rank has its own."""
        return (
            self.name,
            self.shape,
            self.stride,
            self.dtype,
            self.device.partition(":")[0],
            self.requires_grad,
            self.sparse,
            self.delayed,
            self.placement,
        )


@dataclass(frozen=True)
class BucketSpec:
    """Gradients that travel together: the indices of their parameters, and where each starts in the flat buffer."""

    index: int
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    itemsize: int
    dtype: str
    device: str
    sparse: bool = False
    delayed: bool = False

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a module, in launch order. ``print`` shows them as a table."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[BucketSpec, ...]
    caps_bytes: tuple[int, ...]
    order: tuple[int, ...] = field(repr=False)

    @cached_property
    def fingerprint(self) -> str:
        """A text that is equal on two ranks exactly if they would launch the same collectives in the same order."""
        rows = [spec.row() for spec in self.specs]
        buckets = [[list(b.params), list(b.offsets), b.sparse, b.delayed] for b in self.buckets]
        text = json.dumps([rows, buckets], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(b.size_bytes for b in self.buckets)

    def names(self, params: Iterable[int]) -> list[str]:
        """The names of the parameters with these indices, such as ``bucket.params``."""
        return [self.specs[i].name for i in params]

    def __str__(self) -> str:
        return "\n".join(plan_lines(self))


def default_caps_bytes(total_bytes: int) -> tuple[int, ...]:
    """The capacities for gradients of ``total_bytes`` in all, if the user names none."""
    if total_bytes <= DEFAULT_CAP_BYTES:
        return (DEFAULT_CAP_BYTES,)
    cap_bytes = min(DEFAULT_CAP_BYTES, max(DEFAULT_LEAST_CAP_BYTES, total_bytes // PARTS))
    return DEFAULT_FIRST_CAP_BYTES, cap_bytes


class _OpenBucket:
    """A bucket that still has room."""

    def __init__(self, room_bytes: float) -> None:
        self.room_bytes = room_bytes
        self.members: list[int] = []


def make_plan(
    specs: Sequence[ParameterSpec],
    *,
    caps_bytes: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    leave_out: frozenset[int] = frozenset(),
) -> BucketPlan:
    """Put the trainable ``specs`` into buckets.

    ``caps_bytes`` are the capacities of the first, second, ... bucket of each kind (dtype and device); the last one
    repeats. A bucket is closed as soon as it has reached its capacity, so a single parameter may be larger than the
    capacity. Without ``caps_bytes`` the capacities are :func:`default_caps_bytes`, and a parameter that fills a bucket
    by itself does not join one that is at least a quarter full. ``order`` is the order in which gradients become
    ready, by default the reverse of registration. ``leave_out`` holds the indices of parameters that are not reduced.
    """
    is_ours_to_choose = caps_bytes is None
    numel_of = [spec.numel for spec in specs]
    size_of = [numel * spec.itemsize for numel, spec in zip(numel_of, specs, strict=True)]
    if caps_bytes is None:
        caps_bytes = default_caps_bytes(sum(size_of[i] for i, spec in enumerate(specs) if spec.requires_grad))
    chosen = [i for i, spec in enumerate(specs) if spec.requires_grad and i not in leave_out]
    # With one capacity for all and no order seen yet, buckets are filled from the front of the module, as torch does.
    # The same capacity then gives the same buckets.
    from_front = order is None and len(caps_bytes) == 1
    if order is None:
        order = list(reversed(chosen))
    else:
        kept = set(chosen)
        order = [i for i in order if i in kept]
        assert sorted(order) == chosen, "an order names each trainable parameter once"

    closed = _fill(chosen if from_front else order, specs, size_of, caps_bytes, keep_whole=is_ours_to_choose)
    # A bucket is ready with its last gradient, so buckets are launched in the order of their last gradients.
    turn = {i: n for n, i in enumerate(order)}
    if from_front:
        closed = [members[::-1] for members in closed]
    closed.sort(key=lambda members: (specs[members[0]].delayed, max(turn[i] for i in members)))
    buckets = tuple(_bucket(index, members, specs, numel_of) for index, members in enumerate(closed))
    return BucketPlan(tuple(specs), buckets, tuple(caps_bytes), tuple(order))


def _fill(
    order: Sequence[int],
    specs: Sequence[ParameterSpec],
    size_of: Sequence[int],
    caps_bytes: Sequence[int],
    *,
    keep_whole: bool,
) -> list[list[int]]:
    """The members of each bucket, filled in ``order``.

    With ``keep_whole``, a parameter that fills a bucket by itself does not join one that is at least a quarter full.
    """
    closed: list[list[int]] = []
    open_buckets: dict[tuple[object, ...], _OpenBucket] = {}
    closed_of_kind: dict[tuple[object, ...], int] = {}
    for i in order:
        spec = specs[i]
        if spec.sparse:
            # A sparse gradient has no fixed size, so it cannot share a flat buffer.
            closed.append([i])
            continue
        kind = (spec.dtype, spec.device, spec.delayed)
        bucket = open_buckets.get(kind)
        fills_one = keep_whole and size_of[i] >= caps_bytes[-1]
        if fills_one and bucket is not None and bucket.room_bytes <= 0.75 * caps_bytes[-1]:
            closed.append(open_buckets.pop(kind).members)
            bucket = None
        if bucket is None:
            n_closed = closed_of_kind.get(kind, 0)
            # Delayed parameters go in one exchange at the end, when there is nothing left to overlap with.
            cap = math.inf if spec.delayed else caps_bytes[min(n_closed, len(caps_bytes) - 1)]
            bucket = open_buckets[kind] = _OpenBucket(cap)
        bucket.members.append(i)
        bucket.room_bytes -= size_of[i]
        if bucket.room_bytes <= 0:
            closed.append(open_buckets.pop(kind).members)
            closed_of_kind[kind] = closed_of_kind.get(kind, 0) + 1
    closed.extend(bucket.members for bucket in open_buckets.values())
    return closed


def arranged(order: Sequence[int], groups: Iterable[Sequence[int]]) -> list[int]:
    """``order`` with the members of each group sorted as in that group, at the positions where members stood.

    >>> arranged([5, 1, 2, 9, 3], [(3, 2, 1)])
    [5, 3, 2, 9, 1]
    """
    result = list(order)
    present = set(order)
    for group in groups:
        members = [index for index in group if index in present]
        positions = [position for position, index in enumerate(result) if index in set(members)]
        for position, index in zip(positions, members, strict=True):
            result[position] = index
    return result


def _bucket(index: int, members: list[int], specs: Sequence[ParameterSpec], numel_of: Sequence[int]) -> BucketSpec:
    offsets, end = [], 0
    for i in members:
        offsets.append(end)
        end += numel_of[i]
    first = specs[members[0]]
    return BucketSpec(
        index,
        tuple(members),
        tuple(offsets),
        0 if first.sparse else end,
        first.itemsize,
        first.dtype,
        first.device,
        first.sparse,
        first.delayed,
    )
