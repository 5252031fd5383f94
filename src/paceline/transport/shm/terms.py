"""``Terms``: how a collective runs, whichever carrier runs it."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """How a collective runs."""

    timeout_s: float
    inline: bool
    """Whether it runs on the calling thread, if it is its turn. This is for callers that would wait at once anyway."""
