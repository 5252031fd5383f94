"""Whether ranks hold the same tensors: digests, compared in one exchange; words only if they differ.

Each rank brings its digests and their complements to one maximum: a digest that all ranks share is then the complement
of its complement's maximum. A rank that has no opinion on a tensor brings the least number, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.control.channel import Channel

NO_OPINION = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Item:
    """One tensor, or what belongs together, by the name that people know."""

    part: str
    """``parameter``, ``buffer``, ``gradient``, ...; `Difference` speaks of the first part that differs."""
    name: str

    def __str__(self) -> str:
        return f"{self.part} {self.name!r}"


@dataclass(frozen=True)
class Difference:
    """What differs, and between whom."""

    items: tuple[Item, ...]
    """All of them, in the order in which they were brought."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks that hold the same of the first item; most of them first."""

    def parts(self) -> set[str]:
        return {item.part for item in self.items}

    def __str__(self) -> str:
        first = self.items[0]
        ranks = "; ".join(f"rank {', '.join(map(str, group))}" for group in self.groups)
        counts = [f"{sum(i.part == part for i in self.items)} of kind {part}" for part in sorted(self.parts())]
        return f"{first} differs between {ranks} ({', '.join(counts)} in all)"


def compare(channel: Channel, items: Sequence[Item], digests: Tensor) -> Difference | None:
    """Compare ``digests``, one an item, with the other ranks: a collective. None if they are the same."""
    if channel.size == 1 or not items:
        return None
    both = torch.cat([digests, torch.where(digests == NO_OPINION, digests, ~digests)])
    channel.progress.start("all-reduce", "the digests of replicas", both)
    work = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=channel.group, async_op=True)
    assert work is not None
    channel.wait(work, "the comparison of replicas")
    most, least = both[: len(items)], ~both[len(items) :]
    differs = ((most != least) & (most != NO_OPINION)).tolist()
    if not any(differs):
        return None
    found = tuple(item for item, differ in zip(items, differs, strict=True) if differ)
    mine = int(digests[differs.index(True)])
    values = channel.agree("replicas", mine).values
    held: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        if value != NO_OPINION:
            held.setdefault(value, []).append(rank)
    return Difference(found, tuple(tuple(group) for group in sorted(held.values(), key=lambda g: (-len(g), g))))
