"""Where a wrapper is in its step."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """What a reducer is doing. Each value says when the phase is entered and left."""

    IDLE = "no backward is running"
    BACKWARD = "entered with the first gradient (or output) of a backward, left when it has ended"
    INTERRUPTED = "entered when a backward raised; left by the next one if nothing was under way"
    BROKEN = "entered when communication failed; never left"


class ForwardToken:
    """Lives as long as the autograd graph of one forward."""
