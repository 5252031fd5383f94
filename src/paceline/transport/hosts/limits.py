"""``Limits``: how long each stage of a collective may take in a group that spans hosts."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.transport.hosts.giving_up import CAUSE_S
from paceline.transport.shm.terms import Terms


@dataclass(frozen=True)
class Limits:
    """The limits of one collective. A host notices after ``inside_s`` that one of its own ranks is stopped. Leaders of
    other hosts wait a little longer, and ranks that wait for their leader longer still. So they are told the cause, and
    do not suspect their leader."""

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
