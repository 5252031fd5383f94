"""Whether the collectives in the graphs of ranks fit each other.

Ranks of different subgroups have different groups at the same place of their graphs, and that is right: each rank talks
to the others of its own subgroup. So two ranks are compared only in the collectives that both take part in. Those have
to be the same, and in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Collective(NamedTuple):
    """One collective of a rank's graph."""

    node: int
    """Its number in the graph."""
    ranks: tuple[int, ...]
    """The ranks that take part in it, as numbers in the default group; empty if it is not known, which means all."""


class RankCollectives(NamedTuple):
    """What one rank has said about its graph."""

    rank: int
    """Its number in the default group."""
    nodes: Sequence[str]
    """A digest of each node."""
    collectives: Sequence[Collective]

    def shared_with(self, rank: int) -> list[_Shared]:
        """The collectives that ``rank`` takes part in as well."""
        shared = [each for each in self.collectives if not each.ranks or rank in each.ranks]
        return [_Shared(each.node, self.nodes[each.node], each.ranks) for each in shared]


class _Shared(NamedTuple):
    node: int
    digest: str
    ranks: tuple[int, ...]

    def fits(self, other: _Shared) -> bool:
        return (self.digest, self.ranks) == (other.digest, other.ranks)


def first_misfit(told: Sequence[RankCollectives]) -> int | None:
    """The first node at which some rank begins another collective than a rank that takes part in it."""
    by_rank = {each.rank: each for each in told}
    found = []
    for one, other in _pairs(told):
        ours, theirs = by_rank[one].shared_with(other), by_rank[other].shared_with(one)
        pairs = zip(ours, theirs, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if not a.fits(b)), min(len(ours), len(theirs)))
        found += [each[same].node for each in (ours, theirs) if same < len(each)]
    return min(found, default=None)


def _pairs(told: Sequence[RankCollectives]) -> set[tuple[int, int]]:
    """For each group, its first rank with each of the others: if these fit, all of them do."""
    present = [each.rank for each in told]
    groups = {each.ranks for rank in told for each in rank.collectives}
    members = [[rank for rank in present if not group or rank in group] for group in groups]
    return {(ranks[0], other) for ranks in members for other in ranks[1:]}
