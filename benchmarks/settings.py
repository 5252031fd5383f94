"""What a run was asked to do: one frozen value, handed to every rank as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TypeVar

S = TypeVar("S", bound="Sent")


@dataclasses.dataclass(frozen=True)
class Sent:
    """Settings on their way to the ranks. Values are numbers, texts and tuples of those."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls: type[S], text: str) -> S:
        fields = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


@dataclasses.dataclass(frozen=True)
class Settings(Sent):
    suites: tuple[str, ...]
    """Names from `suites.SUITES`, in the order they run."""
    models: tuple[str, ...] | None
    """Names from `models.CASES`; None lets each suite use its own."""
    modes: tuple[str, ...] | None
    """Names from `modes.MODES`; None lets each suite use its own."""
    rounds: int | None
    """How often each mode gets its turn in a launch: paired samples. None: as many as `budget_s` allows."""
    steps: int
    """Steps of one turn; a turn counts as the median of them."""
    warmup: int
    """Steps of each mode before the first round (torch rebuilds its buckets in the second)."""
    budget_s: float = 45.0
    """About how long the rounds of one suite and model may take in all launches, when `rounds` is not given."""
    world_size: int = 2
    threads: int = 1
    """Compute threads of a rank."""
    seed: int = 0
    launches: int = 1
    """How often the ranks are started anew. See [Note: why launches] in stats.py."""
    launch: int = 0
    """Which of them this is."""
