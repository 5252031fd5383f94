"""A group's herald: its threads look after works whose end has to be noticed.

The kernel finishes jobs on its own thread, without Python. Where Python has something left to do at that moment (set a
future, copy a result back to a strided tensor, end a profiler's event), a thread of the herald does it. The first
thread starts with the first such work, so nobody else pays for it.
"""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from paceline import threads

# One thread waits for jobs, and one takes over while that one runs callbacks.
_KEPT = 2
# How long a thread may take to end while it runs callbacks of the user. Nothing ends a thread that waits for a job.
_CALLBACK_S = 5.0


class Attended(Protocol):
    """A work, as a herald sees it."""

    def attend(self) -> None:
        """Return when it has ended; errors stay with it."""

    def announce(self) -> None:
        """Tell those who want to know, which may run anybody's code."""


class Herald:
    """Attends works in the order in which they came, which is the order in which collectives end.

    Callbacks of a future are the user's. One may wait for another collective of the group, which another thread then
    has to attend. So a thread that is about to run callbacks makes sure that there is a free thread.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[Attended | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._free = 0
        """The number of threads that are not running callbacks."""
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
            running, self._threads = self._threads, []
        for _ in running:
            self._works.put(None)
        for thread in running:
            if thread is not threading.current_thread():
                thread.join()

    def _see_that_one_is_free(self) -> None:
        if self._free == 0 and not self._is_closed:
            self._free = 1
            stop = partial(self._works.put, None)
            self._threads.append(threads.start(self._run, name="herald", stop=stop, within_s=threads.MOMENT_S))

    def _run(self) -> None:
        me = threading.current_thread()
        assert isinstance(me, threads.Thread)
        while (work := self._works.get()) is not None:
            work.attend()
            with self._lock:
                self._free -= 1
                self._see_that_one_is_free()
            me.within_s = _CALLBACK_S
            work.announce()
            me.within_s = threads.MOMENT_S
            # Its tensors must not live until the next work comes.
            del work
            with self._lock:
                if self._free >= _KEPT and me in self._threads:
                    self._threads.remove(me)
                    return
                self._free += 1
        with self._lock:
            self._free -= 1
