"""Somebody who waits for other ranks: what a line over the store needs, and the plainest way to do it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import StoreSilentError

T = TypeVar("T")

LONGEST_PAUSE_S = 20e-3
"""How long a wait pauses between two looks, at most."""


class Waiter(ABC):
    """Somebody who waits for other ranks until a deadline, and for a store that is silent."""

    @abstractmethod
    def keep(self, attempt: Callable[[float], bool]) -> bool:
        """Repeat ``attempt(seconds)``, which may take that long, until it succeeds; return False at the deadline."""

    def insist(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns. It asks the store, and is called again as long as the store is silent."""
        results: list[T] = []

        def attempt(_: float) -> bool:
            results.append(call())
            return True

        while not self.keep(attempt):
            pass
        return results[0]


class Patience(Waiter):
    """A waiter that only looks at the clock, for ranks that have no channel yet over which they could hear news."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s

    def keep(self, attempt: Callable[[float], bool]) -> bool:
        while True:
            is_over = time.monotonic() > self._deadline
            try:
                if attempt(LONGEST_PAUSE_S):
                    return True
            except StoreSilentError:
                if is_over:
                    raise
                time.sleep(LONGEST_PAUSE_S)
            if is_over:
                return False
