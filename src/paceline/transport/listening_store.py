"""``ListeningStore``: who waits in it for another rank's address hears if that rank is gone.

gloo asks the store for the addresses of the others, in C++ and for as long as the group's time-out, half an hour say.
A rank whose process has ended never puts up its own.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import Store

from paceline.transport.lines import Lines

# Nearly always all are there at once, and nobody has to be asked.
_PATIENCE_S = 0.3
_PAUSE_S = 2e-3
_LONGEST = timedelta(minutes=30)


class ListeningStore(Store):
    """``store``, as far as gloo uses it. Must be kept for as long as the backend: C++ does not keep what is Python."""

    def __init__(self, store: Store, lines: Lines) -> None:
        super().__init__()
        self._store = store
        self._lines = lines

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _LONGEST) -> None:
        limit_s = timeout.total_seconds()
        began = time.monotonic()
        while not self._store.check(keys):
            waited_s = time.monotonic() - began
            if waited_s > limit_s:
                # Which raises, in its own words.
                self._store.wait(keys, timedelta(milliseconds=1))
                return
            found = self._lines.find(0) if waited_s > _PATIENCE_S else None
            if found is not None:
                raise found.error()
            time.sleep(_PAUSE_S)
