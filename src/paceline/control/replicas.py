"""Whether ranks hold the same tensors. They compare digests in one exchange, and tell more only if these differ.

One all-reduce takes the maximum of the digests, and that of their bitwise complements. The complement of the latter is
the minimum of the digests, and all ranks share a digest if its maximum equals its minimum. A rank that has no opinion
on a tensor brings the least number in both places.
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
class Held:
    """One tensor, or several that belong together, by the name that people know."""

    part: str
    """``parameter``, ``buffer``, ``gradient``, ...; `Difference` speaks of the first part that differs."""
    name: str

    def __str__(self) -> str:
        return f"{self.part} {self.name!r}"


@dataclass(frozen=True)
class Difference:
    """What differs, and between whom."""

    items: tuple[Held, ...]
    """All items that differ, in the order in which they were brought."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks that hold the same value of the first item; the largest group comes first."""

    def parts(self) -> set[str]:
        return {item.part for item in self.items}

    def __str__(self) -> str:
        first = self.items[0]
        ranks = "; ".join(f"rank {', '.join(map(str, group))}" for group in self.groups)
        counts = [f"{sum(i.part == part for i in self.items)} of kind {part}" for part in sorted(self.parts())]
        return f"{first} differs between {ranks} ({', '.join(counts)} in all)"


def compare(channel: Channel, items: Sequence[Held], digests: Tensor) -> Difference | None:
    """Compare ``digests``, one per item, with those of the other ranks, by a collective. None if they are the same."""
    if channel.size == 1 or not items:
        return None
    both = torch.cat([digests, torch.where(digests == NO_OPINION, digests, ~digests)])
    channel.start_all_reduce(both, "the digests of replicas", op=dist.ReduceOp.MAX)()
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
