"""Collectives of several stages (inside hosts, between hosts, inside hosts): run one after another, on a thread.

The kernel has a queue of its own; what alternates between it and another backend needs one here. A ``Task`` is to it
what a ``Job`` is to the kernel, so the same ``Work`` serves both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from paceline.errors import PeerFailedError, RankLostError, StateError


class Task:
    """Stages that are run in one go."""

    __slots__ = ("_ended", "_error", "_stages")

    def __init__(self, stages: Callable[[], None]) -> None:
        self._stages: Callable[[], None] | None = stages
        self._ended = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Errors stay with the task."""
        assert self._stages is not None, "a task runs once"
        try:
            self._stages()
        except Exception as error:
            self._error = error
        except BaseException as error:
            # Ctrl-C is for the thread it came to, here and now; whoever waits for the task gets an error of ours.
            self._error = PeerFailedError(f"a collective of this rank was interrupted ({type(error).__name__})")
            raise
        finally:
            self._stages = None
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise if it failed, or if ``timeout_s`` pass first."""
        if not self._ended.wait(timeout_s):
            raise RankLostError(f"still waiting for the other ranks after {timeout_s:.3f} s")
        if self._error is not None:
            raise self._error

    @property
    def source(self) -> int:
        """Only messages have one."""
        return -1


class Conductor:
    """Runs tasks in the order in which they were given."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._pending = 0
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, stages: Callable[[], None], *, inline: bool) -> Task:
        """Run ``stages`` after what was given before; on the calling thread, if it is its turn and ``inline``."""
        task = Task(stages)
        with self._count_lock:
            if self._closed:
                raise StateError("this rank has closed the group")
            alone = inline and self._pending == 0
            self._pending += 1
            if not alone:
                if self._thread is None:
                    # It refers to us, and we refer to no group: a group that is dropped can end it.
                    self._thread = threading.Thread(target=self._serve, name="paceline-conductor", daemon=True)
                    self._thread.start()
                self._tasks.put(task)
        if alone:
            self._run(task)
        return task

    def close(self) -> None:
        """Finish what was given, then end the thread."""
        with self._count_lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, task: Task) -> None:
        try:
            with self._turn:
                task.run()
        finally:
            with self._count_lock:
                self._pending -= 1

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._run(task)
            del task
