"""What a step is made of: its phase, what was promised about it, and the state of the backward that runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torch import Tensor

from paceline.exchange import Finish


class Phase(enum.Enum):
    IDLE = "no backward is running"
    BACKWARD = "entered with the first gradient (or output) of a backward, left when it has ended"
    INTERRUPTED = "entered when a backward raised; left by the next one if nothing was under way"
    BROKEN = "entered when communication failed; never left"


@dataclass(frozen=True)
class ReducerOptions:
    """What the constructor of the wrapper promises and wishes."""

    caps_bytes: tuple[int, ...] | None = None
    """Bucket capacities; None for what suits the module."""
    static_graph: bool = False
    """Every backward uses the same parameters: checked."""
    skip_unused: bool = False
    """Parameters that no rank used in the first step are never used: not reduced, checked."""
    rebuild: bool = True
    """Put the buckets into the order in which gradients were ready in the first step."""
    stable_storage: bool = False
    """The user promised not to keep gradients over a step (``gradient_as_bucket_view=True``)."""
    copy_in_batches: bool = False
    """Copy large gradients, too, in batches instead of as they come."""


@dataclass
class Step:
    """What belongs to the backward that runs now. Lists are by place, or by number of the bucket."""

    syncing: bool = False
    create_graph: bool = False
    observing: bool = False
    telling: bool = True
    """Shows what a backward of this module is like: not on a rank that has run out of inputs, nor while another
    wrapper has some of the parameters. Else there is nothing to learn, and no contract to hold it to."""
    scale: float = 1.0
    factor: Tensor | None = None
    """The scale as a tensor."""
    next_bucket: int = 0
    complaint: str = ""
    fires: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    bucket_left: list[int] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    came_though_left_out: set[str] = field(default_factory=set)


class ForwardToken:
    """Lives as long as the autograd graph of one forward."""
