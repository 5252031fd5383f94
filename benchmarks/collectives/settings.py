"""What a run was asked to do: one frozen value, handed to every rank as JSON."""

from __future__ import annotations

import dataclasses

from ..settings import Sent

KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 64 * KB, 256 * KB, 1 * MB, 4 * MB, 26_000_000, 67_000_000)
"""The last two are what training exchanges: torch's default bucket, and all gradients of the 17 M-parameter GPT."""
QUICK_SIZES = (4 * KB, 64 * KB, 1 * MB)


def size_name(nbytes: int) -> str:
    if nbytes < MB:
        return f"{nbytes // KB} KB"
    return f"{nbytes // MB} MB" if nbytes % MB == 0 else f"{nbytes / 1e6:.0f} MB"


def calls_of(nbytes: int) -> int:
    """Calls of one turn: enough for the clock, few enough that a turn stays short."""
    return max(2, min(64, 16 * MB // nbytes))


@dataclasses.dataclass(frozen=True)
class Settings(Sent):
    world_size: int
    methods: tuple[str, ...]
    """Names from `methods.METHODS`."""
    sizes: tuple[int, ...] = SIZES
    """Bytes of the tensors, ascending."""
    rounds: int | None = None
    """Turns of each method and size: the number of paired samples. None: as many as `budget_s` allows."""
    budget_s: float = 40.0
    warm: bool = False
    """Whether calls follow each other on warm caches: see [Note: one turn]."""
    threads: int = 1
    """Compute threads of a rank."""
    seed: int = 0
