"""What a random program is: steps drawn from its seed, and the numbers that go into them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from .inputs import GLOO_DTYPES, OPS, supports

WORLD_SIZES = (2, 2, 2, 3, 4)


@dataclass(frozen=True)
class Step:
    """One call that all members make."""

    number: int
    kind: str
    # Which of the groups over these members: two groups of the same ranks must not be mixed up.
    members: tuple[int, ...]
    copy: int
    dtype: torch.dtype
    count: int
    op: str
    # Root of a rooted collective, sender of a message; an index into `members`.
    root: int
    to: int
    tag: int
    asynchronous: bool
    # "plain", "offset" (starts in the middle of a storage), "transposed" (dense, but not in order).
    layout: str
    # After this step every rank waits for some of what it has started.
    waits: bool


REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
MOVING = (
    *("broadcast", "all_gather", "all_gather_single", "gather", "scatter", "all_to_all", "all_to_all_single"),
    *("all_to_all_splits", "barrier", "message", "message_from_any"),
)
# Drawn more often: what training calls.
KINDS = (*REDUCING, *MOVING, "all_reduce", "all_reduce", "reduce_scatter_single", "message")
IN_PLACE = ("all_reduce", "reduce", "broadcast")


def world_size_of(seed: int) -> int:
    """How many ranks a program is for."""
    return random.Random(f"{seed}/ranks").choice(WORLD_SIZES)


def program(seed: int) -> list[Step]:
    """The program of a seed, the same on every rank."""
    rng = random.Random(f"{seed}/program")
    ranks = range(world_size_of(seed))
    return [_step(rng, number, list(ranks)) for number in range(rng.randint(3, 12))]


def _step(rng: random.Random, number: int, ranks: list[int]) -> Step:
    members = tuple(ranks) if rng.random() < 0.6 else tuple(sorted(rng.sample(ranks, rng.randint(2, len(ranks)))))
    kind = rng.choice(KINDS)
    op = rng.choice(OPS) if rng.random() < 0.6 else "SUM"
    dtype = rng.choice(GLOO_DTYPES) if rng.random() < 0.6 else torch.float32
    if kind in REDUCING:
        while not supports(op, dtype):
            op = rng.choice(OPS)
    elif kind == "gather":
        # gloo gathers no complex numbers.
        dtype = torch.float64 if dtype.is_complex else dtype
    largest = rng.choice((0, 1, 9, 70, 1500, 1500, 9000, 40_000, 400_000))
    if kind == "message_from_any":
        # gloo receives nothing at all from a known sender only.
        largest = max(largest, 1)
    count = rng.randint(int(kind == "message_from_any"), largest) if largest > 1 else largest
    root = rng.randrange(len(members))
    return Step(
        number=number,
        kind=kind,
        members=members,
        copy=rng.randrange(2),
        dtype=dtype,
        count=count,
        op=op,
        root=root,
        to=(root + rng.randrange(1, len(members))) % len(members),
        # A receive from anyone must not take another's message: its tag is its own.
        tag=100 + number if kind == "message_from_any" else rng.randrange(3),
        asynchronous=kind.startswith("message") or rng.random() < 0.5,
        layout=rng.choice(("plain", "plain", "offset", "transposed" if kind in IN_PLACE else "plain")),
        waits=rng.random() < 0.3,
    )


def numbers(step: Step, seed: int, *, rank: int, count: int, piece: int = 0) -> torch.Tensor:
    """What ``rank`` puts into a step; any rank can make it."""
    generator = torch.Generator().manual_seed(hash((seed, step.number, rank, piece)) % 2**63)
    dtype = step.dtype
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_complex:
        return torch.complex(*torch.randn(2, count, generator=generator, dtype=torch.float64)).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (count,), generator=generator, dtype=dtype)


def placed(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements, laid out as asked."""
    if layout == "offset":
        storage = torch.zeros(len(values) + 11, dtype=values.dtype)
        storage[5 : 5 + len(values)] = values
        return storage[5 : 5 + len(values)]
    if layout == "transposed" and len(values) >= 6:
        rows = len(values) // 3
        return values[: 3 * rows].view(rows, 3).t().contiguous().t()
    return values.clone()
