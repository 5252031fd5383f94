"""How calls are timed: see [Note: one turn].

Nothing of torch is used here, because MPI's processes time their calls in the same way.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable


def timed(call: Callable[[], object], prepare: Callable[[], object], calls: int) -> float:
    """Seconds of one call on this rank; `prepare` goes before each and is not counted."""
    prepare()
    call()
    total = 0.0
    for _ in range(calls):
        prepare()
        start = time.perf_counter()
        call()
        total += time.perf_counter() - start
    return total / calls


class Gate:
    """Lets all ranks pass within a microsecond of each other. (A barrier over a process group takes longer than what is
    measured.) Each rank counts up a word of its own in memory that all have mapped."""

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int) -> None:
        # Each word has a cache line of its own.
        self._words = memoryview(memory)[: world_size * 64].cast("Q")
        self._mine = rank * 8
        self._theirs = [other * 8 for other in range(world_size) if other != rank]
        self._passed = 0

    def __call__(self) -> None:
        self._passed += 1
        words, passed = self._words, self._passed
        words[self._mine] = passed
        for word in self._theirs:
            while words[word] < passed:
                os.sched_yield()
