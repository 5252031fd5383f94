"""Heralds: the threads of a group that look after works whose end has to be noticed.

The kernel finishes jobs on its own thread, without Python. Where Python has something left to do at that moment (set a
future, copy a result back to a strided tensor, end a profiler's event), a herald does it; the first one starts with the
first such work, and nobody pays for it otherwise.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol

# One that waits for jobs, and one that can take over while it runs callbacks.
_KEPT = 2


class Attended(Protocol):
    """A work, as a herald sees it."""

    def attend(self) -> None:
        """Return when it has ended; errors stay with it."""

    def announce(self) -> None:
        """Tell who wants to know, which may run anybody's code."""


class Herald:
    """Attends works in the order in which they came, which is the order in which collectives end.

    Callbacks of a future are the user's. One may wait for another collective of the group, so somebody else has to
    attend that one: whoever is about to run callbacks sees to it that a thread is left that does not.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[Attended | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._free = 0
        """Threads that run nobody's callbacks."""
        self._is_closed = False

    def watch(self, work: Attended) -> None:
        """Notice the end of ``work``."""
        self._works.put(work)
        with self._lock:
            self._see_that_one_is_free()

    def close(self) -> None:
        """End the threads, once what they watch has ended."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
        for _ in threads:
            self._works.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _see_that_one_is_free(self) -> None:
        if self._free == 0 and not self._is_closed:
            self._free = 1
            thread = threading.Thread(target=self._run, name="paceline-herald", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.attend()
            with self._lock:
                self._free -= 1
                self._see_that_one_is_free()
            work.announce()
            # Not to keep its tensors alive until the next one comes.
            del work
            with self._lock:
                if self._free >= _KEPT and threading.current_thread() in self._threads:
                    self._threads.remove(threading.current_thread())
                    return
                self._free += 1
