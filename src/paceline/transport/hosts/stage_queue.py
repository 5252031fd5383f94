"""``StageQueue``: runs collectives of several stages one after another, on the calling thread or one of its own.

The kernel has a queue of its own, but collectives that alternate between it and another backend need one here. A
``Task`` is to this queue what a ``Job`` is to the kernel, so the same ``Work`` serves both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from queue import SimpleQueue

from paceline import threads
from paceline.errors import PeerFailedError, RankLostError, StateError

_CLOSED = "this rank has closed the group"


class Task:
    """Stages that are run in one go."""

    __slots__ = ("_outcome", "_stages")
    source = -1
    """A collective has no source. Only messages have one."""

    def __init__(self, stages: Callable[[], None]) -> None:
        self._stages: Callable[[], None] | None = stages
        self._outcome: futures.Future[None] = futures.Future()

    def run(self) -> None:
        """Run the stages; their errors stay with the task."""
        assert self._stages is not None, "a task runs once"
        stages, self._stages = self._stages, None
        try:
            stages()
        except Exception as error:
            self._outcome.set_exception(error)
        except BaseException as error:
            # Ctrl-C is raised here, on the thread that it came to. Those who wait for the task get an error of ours.
            interrupted = f"a collective of this rank was interrupted ({type(error).__name__})"
            self._outcome.set_exception(PeerFailedError(interrupted))
            raise
        else:
            self._outcome.set_result(None)

    def give_up(self, reason: str) -> None:
        """End the task without running it."""
        self._stages = None
        self._outcome.set_exception(StateError(reason))

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._outcome.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise if it failed, or if ``timeout_s`` pass first."""
        if not futures.wait([self._outcome], timeout_s).done:
            raise RankLostError(f"still waiting for the other ranks after {timeout_s:.3f} s")
        self._outcome.result()


class StageQueue:
    """Runs tasks in the order in which they were given."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._pending = 0
        self._count_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._is_told_to_stop = False

    def submit(self, stages: Callable[[], None], *, inline: bool) -> Task:
        """Run ``stages`` after what was given before; on the calling thread, if it is its turn and ``inline``."""
        task = Task(stages)
        with self._count_lock:
            if self._closed:
                raise StateError(_CLOSED)
            alone = inline and self._pending == 0
            self._pending += 1
            if not alone:
                if self._thread is None:
                    # The thread refers to the queue, which refers to no group. So a group that is dropped can end it.
                    self._thread = threads.start(self._serve, name="stages", stop=self._stop, within_s=threads.MOMENT_S)
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

    def _stop(self) -> None:
        """End the thread after its current task. The other tasks are given up, and no more are taken."""
        with self._count_lock:
            self._closed = self._is_told_to_stop = True
        self._tasks.put(None)

    def _run(self, task: Task) -> None:
        try:
            with self._turn:
                task.run()
        finally:
            with self._count_lock:
                self._pending -= 1

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._is_told_to_stop:
                task.give_up(_CLOSED)
            else:
                self._run(task)
            del task
