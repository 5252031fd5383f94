"""This module owns all threads of the package. Whoever starts a thread gives it a name and an end.

An end is a call that tells the thread to stop, together with the time that the thread may take to do so. `end_all` ends
all threads: ``paceline.shutdown`` calls it, and so does the interpreter when it exits.

[Note: threads at the end of the interpreter] Python runs its ``atexit`` functions first and marks itself as finalising
afterwards. From then on, a thread that comes back from C++ into Python is ended by ``pthread_exit``. That unwinds the
frames of C++ below it, and the process aborts with "terminate called without an active exception". So no thread of ours
may come back by then, and ``atexit`` is the last moment to see to it. Most threads end when they are told to. One that
waits inside a call of torch for another rank, or for a store whose host is stopped, cannot be told anything: torch has
no call that interrupts it. If it is still there when its time is over, it is *parked*: it gets a signal whose handler
never returns, which holds it where it is until the process has ended. Only a thread that has slept for a while is
parked, because a thread that runs may hold a lock that the end of the interpreter needs.

Threads of torch are not ours to end. A gloo worker stays busy with a ``Work`` for a little longer than whoever waits
for it: it still releases tensors and callbacks, and takes Python's lock to do so. So the end of the interpreter waits
until all threads are at rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PREFIX = "paceline-"
"""What the name of every thread begins with."""

MOMENT_S = 0.2
"""How long a thread may take to end if it has next to nothing to do, or if nothing can be done to end it."""

# A thread that sleeps for this long holds no lock that others need. A wait in the shm kernel naps for longer than this.
_STILL_S = 0.01
# The end waits at most this long until all threads sleep, because one may run for ever.
_REST_S = 2.0
# A thread that runs for less than this meanwhile is at rest. That of gloo's connections runs for 20 us every 10 ms.
_REST_NS = 500_000
# Nobody else uses this signal. It is 0 where there are no real-time signals, and then nothing is parked.
_PARKING_SIGNAL = int(signal.SIGRTMIN) + 10 if hasattr(signal, "SIGRTMIN") else 0


class Thread(threading.Thread):
    """A thread with an end; made by `start`."""

    def __init__(
        self, target: Callable[..., object], args: tuple[Any, ...], *, name: str, stop: Callable[[], object]
    ) -> None:
        # It is a daemon. Python waits for other threads before it runs ``atexit`` functions, which tell ours to stop.
        super().__init__(target=target, args=args, name=f"{PREFIX}{name}", daemon=True)
        self._tell: Callable[[], object] | None = stop
        self.within_s = 0.0
        """How long it may take to end. The thread may change this as it goes on to something else."""

    def run(self) -> None:
        try:
            super().run()
        finally:
            # What the call refers to should not live as long as this object does.
            self._tell = None

    def tell_to_stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        tell = self._tell
        if tell is not None:
            with contextlib.suppress(Exception):
                tell()

    def end(self) -> bool:
        """Tell the thread to stop and wait for as long as that may take; returns whether it has ended."""
        self.tell_to_stop()
        return self.ends_by(time.monotonic() + self.within_s)

    def ends_by(self, deadline: float) -> bool:
        """Wait for the thread until ``deadline`` on the monotonic clock; returns whether it has ended."""
        if self is not threading.current_thread():
            self.join(max(0.0, deadline - time.monotonic()))
        return not self.is_alive()


_threads: weakref.WeakSet[Thread] = weakref.WeakSet()
# A signal handler may call ``paceline.shutdown`` while the same thread is in `start`, so it must be reentrant.
_lock = threading.RLock()
_interpreter_ends = False
# A program that uses nothing of the package should not wait for its own threads at its end.
_has_started = False


def start(target: Callable[..., object], *args: Any, name: str, stop: Callable[[], object], within_s: float) -> Thread:
    """Run ``target(*args)`` on a thread called ``paceline-<name>``, which ends at most ``within_s`` after ``stop()``.

    Raises ``RuntimeError`` if there can be no thread: there are too many, or the interpreter is about to end.
    """
    global _has_started
    thread = Thread(target, args, name=name, stop=stop)
    thread.within_s = within_s
    with _lock:
        if _interpreter_ends:
            raise RuntimeError(f"the interpreter is ending, so the thread {thread.name} cannot be started")
        thread.start()
        _threads.add(thread)
        _has_started = True
    return thread


def outcome_of(make: Callable[[], T], *, name: str, within_s: float) -> Future[T]:
    """What ``make`` will have returned or raised on a thread of its own, which cannot be told to stop."""
    outcome: Future[T] = Future()
    start(_run, make, outcome, name=name, stop=lambda: None, within_s=within_s)
    return outcome


def _run(make: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(make())
    except BaseException as error:
        outcome.set_exception(error)


def end_all() -> list[Thread]:
    """End all threads of the package but the calling one; returns those that did not end in their time."""
    left: list[Thread] = []
    # This repeats, because a thread may start another one before it hears that it should stop. The watch, for example,
    # asks the store, and starts a new thread for that if the old one has ended already.
    while found := _alive_but(left):
        for thread in found:
            thread.tell_to_stop()
        told_at = time.monotonic()
        left += [thread for thread in found if not thread.ends_by(told_at + thread.within_s)]
    return left


def _alive_but(known: Sequence[Thread]) -> list[Thread]:
    with _lock:
        others = [thread for thread in _threads if thread is not threading.current_thread()]
    return [thread for thread in others if thread.is_alive() and thread not in known]


def _forget() -> None:
    """Begin anew in a forked process. The threads are the parent's, and one of them may have held the lock."""
    global _lock
    _lock = threading.RLock()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def _end_with_interpreter() -> None:
    global _interpreter_ends
    with _lock:
        _interpreter_ends = True
    left = end_all()
    # Without this file nobody can tell whether a thread sleeps.
    if _has_started and Path("/proc/thread-self/schedstat").exists():
        _park(left)
        _let_others_rest()


def _park(threads: Sequence[Thread]) -> None:
    """Hold threads that wait in C++ where they are ([Note: threads at the end of the interpreter])."""
    if not threads or not _PARKING_SIGNAL:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    # ``pause`` is the handler: it returns only after another signal was handled, and these threads get no other.
    libc.signal(_PARKING_SIGNAL, ctypes.cast(libc.pause, ctypes.c_void_p))
    left, deadline = {thread: _ran_ns(thread.native_id) for thread in threads}, time.monotonic() + _REST_S
    # A thread that is running may end, or begin to wait, in the time that it is given.
    while left and time.monotonic() < deadline:
        time.sleep(_STILL_S)
        seen, left = left, {thread: _ran_ns(thread.native_id) for thread in left if thread.is_alive()}
        for thread in [thread for thread, now in left.items() if now is not None and now == seen[thread]]:
            del left[thread]
            if thread.ident is not None:
                with contextlib.suppress(OSError):
                    signal.pthread_kill(thread.ident, _PARKING_SIGNAL)


def _let_others_rest() -> None:
    """Wait until all other threads of the process sleep, for ``_REST_S`` at most.

    A backend's threads may be finishing a ``Work``: they release tensors and callbacks, and need Python for that.
    """
    deadline = time.monotonic() + _REST_S
    before: dict[int, int | None] = {}
    while time.monotonic() < deadline:
        found = {int(task): _ran_ns(int(task)) for task in os.listdir("/proc/self/task")}
        found.pop(threading.get_native_id(), None)
        if all(_is_at_rest(now, before.get(task)) for task, now in found.items()):
            return
        before = found
        time.sleep(_STILL_S)


def _is_at_rest(now_ns: int | None, before_ns: int | None) -> bool:
    return now_ns is not None and before_ns is not None and now_ns - before_ns < _REST_NS


def _ran_ns(thread: int | None) -> int | None:
    """How long the thread has been on a core in all; None if it is not asleep, or gone."""
    try:
        task = Path(f"/proc/self/task/{thread}")
        status = (task / "status").read_text(encoding="utf-8", errors="replace")
        ran = (task / "schedstat").read_text(encoding="ascii").split()[0]
    except OSError:
        return None
    # On a busy machine, a thread that has not run for a while may only be waiting for a core.
    return int(ran) if "State:\tS" in status else None
