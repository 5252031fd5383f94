"""``Limits``: how long each stage of a collective may take in a group that spans hosts."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.transport.hosts.giving_up import CAUSE_S
from paceline.transport.shm.terms import Terms


@dataclass(frozen=True)
class Limits:
    """A rank that is stopped is noticed by its own host, after ``inside_s``. Leaders of other hosts wait a little
    longer, and ranks that wait for their leader longer still: they should be told the cause, and not suspect their
    leader."""

    inside_s: float

    @property
    def inside(self) -> Terms:
        return Terms(self.inside_s, inline=True)

    @property
    def between_s(self) -> float:
        return self.inside_s + CAUSE_S

    @property
    def after(self) -> Terms:
        return Terms(self.inside_s + 3 * CAUSE_S, inline=True)
