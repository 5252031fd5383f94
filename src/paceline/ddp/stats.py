"""``ddp.stats()``: what the steps so far have sent, and how long backward waited for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.gradients.plan import BucketPlan
from paceline.gradients.plan_table import plan_lines, size_text


@dataclass(frozen=True)
class Stats(Mapping[str, Any]):
    """Figures of a wrapper's steps. ``print`` shows them as a table; ``stats["steps"]`` is ``stats.steps``."""

    steps: int
    """How many synchronised backwards there were. A rank that is alone synchronises nothing, so it counts none."""
    bytes_per_step: int
    """How many bytes this rank gave to collectives in the last step."""
    exposed_s: float
    """How long the last backward waited for communication after its last gradient, in seconds."""
    exposed_total_s: float
    """The same, summed over all steps."""
    buckets: int
    """How many buckets the plan has."""
    world_size: int
    """How many ranks average their gradients."""
    plan: BucketPlan = field(repr=False)
    """The buckets as they are now."""

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return any(name == known.name for known in fields(self))

    def __iter__(self) -> Iterator[str]:
        return (known.name for known in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __str__(self) -> str:
        rows = {
            "ranks": f"{self.world_size}",
            "synchronised steps": f"{self.steps}",
            "sent in the last step": size_text(self.bytes_per_step),
            "exposed in the last step": f"{1000 * self.exposed_s:.2f} ms",
            "exposed in all steps": f"{1000 * self.exposed_total_s:.2f} ms",
        }
        lines = [f"{name:<25} {value:>12}" for name, value in rows.items()]
        if self.world_size == 1 and not self.steps:
            lines.append("One rank is alone, so nothing is sent.")
        return "\n".join([*lines, *plan_lines(self.plan)])
