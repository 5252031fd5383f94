"""A thread that asks the store, so that nobody waits for ever for a store that does not answer.

A store's answer is awaited in C++, without a time-out. While the store's host is stopped, or cut off without a word,
whoever asks is stuck. Here a thread asks, one call at a time, and the caller waits for the thread for a few seconds at
most. Then the caller gets a ``StoreSilentError``, and until the call has come back everybody else gets one at once.
Such a call may still take effect later. So a caller that asks again must ask for something that may happen twice.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from paceline import threads
from paceline.control import forks
from paceline.errors import StoreSilentError

T = TypeVar("T")

ANSWER_S = 3.0
"""How long an answer is awaited."""
END_S = 1.0
"""How long the end of the program waits for a call that is under way."""

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class StoreThread:
    """The thread starts with the first call and ends with this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread: threads.Thread | None = None
        self._starting = threading.Lock()
        self._turn = threading.Lock()
        self._desk = _Desk()
        self._overdue: Future[Any] | None = None
        """A call that nobody waits for any more."""

    def run(self, call: Callable[..., T], *args: Any, within_s: float | None = None) -> T:
        """What ``call`` returns or raises; or ``StoreSilentError``, after ``within_s`` (by default `ANSWER_S`).

        A call may itself run others, which then need no hand-over.
        """
        if threading.current_thread() is self._thread:
            return call(*args)
        within_s = ANSWER_S if within_s is None else within_s
        deadline = time.monotonic() + within_s
        while True:
            try:
                return self._ask(call, args, deadline, within_s)
            except CancelledError:
                # The thread was told to stop just before this call came. Another thread makes it.
                continue

    def _ask(self, call: Callable[..., T], args: tuple[Any, ...], deadline: float, within_s: float) -> T:
        if not self._is_alive():
            self._start()
        self._raise_if_silent()
        # These are kept here, since a thread that is started anew meanwhile has its own.
        turn, desk = self._turn, self._desk
        if not turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _silent(within_s)
        outcome: Future[T] = Future()
        try:
            self._raise_if_silent()
            desk.ask(outcome, call, args)
            return outcome.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            if outcome.done():
                return outcome.result()
            raise _silent(within_s) from None
        finally:
            if not outcome.done():
                # This holds after Ctrl-C, too: a late answer must not be taken for the answer to the next call.
                self._overdue = outcome
            turn.release()
            # An error that the future holds refers to this frame.
            del outcome

    def is_silent(self) -> bool:
        """Whether a call is under way that nobody waits for any more."""
        return self._overdue is not None and not self._overdue.done() and self._is_alive()

    def _raise_if_silent(self) -> None:
        if self.is_silent():
            raise _silent(0)
        self._overdue = None

    def _is_alive(self) -> bool:
        # In a forked process it is not alive, because the thread is the parent's.
        return self._thread is not None and self._thread.is_alive() and not self._desk.is_closed

    def _start(self) -> None:
        # A fork shares the rank's connections: what it asked would mix with what the rank asks. It comes by here before
        # its first call, because it has no thread either.
        if os.getpid() != self._pid:
            raise forks.refusal(f"process {self._pid}, whose store this is")
        with self._starting:
            if self._is_alive():
                return
            # Calls that waited for a thread that has ended are not made again.
            self._turn, self._desk, self._overdue = threading.Lock(), _Desk(), None
            stop = self._desk.close
            try:
                self._thread = threads.start(self._desk.serve, name="store", stop=stop, within_s=END_S)
            except RuntimeError as error:
                raise StoreSilentError(f"No thread could be started to ask the store ({error}).") from error
            weakref.finalize(self, stop).atexit = False


class _Desk:
    """Where calls are handed to the thread. It does not refer to the ``StoreThread``, which can so be dropped."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.is_closed = False

    def ask(self, outcome: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Have the thread make a call. If it does not make it any more, the outcome is cancelled."""
        self._calls.put((outcome, call, args))
        if self.is_closed:
            outcome.cancel()

    def close(self) -> None:
        """End the thread, after the calls that have come."""
        self._calls.put(None)

    def serve(self) -> None:
        """Make calls until the end."""
        while (asked := self._calls.get()) is not None:
            outcome, call, args = asked
            try:
                outcome.set_result(call(*args))
            except BaseException as error:
                outcome.set_exception(error)
            # The call and its arguments must not live until the next call.
            del asked, outcome, call, args
        # The mark comes first: a caller that does not see it has put its call into the queue already.
        self.is_closed = True
        while not self._calls.empty():
            asked = self._calls.get()
            if asked is not None:
                asked[0].cancel()


def _silent(waited_s: float) -> StoreSilentError:
    lasted = f"within {waited_s:.0f} s" if waited_s else "for some time"
    return StoreSilentError(
        f"The process group's store has not answered {lasted}: its host is stopped, cut off, or overloaded."
    )


@dataclass(frozen=True)
class StoreThreads:
    """The threads by which this process asks the store of a group."""

    own: StoreThread
    """It asks on behalf of the threads that train."""
    of_watch: StoreThread
    """It asks on behalf of the hang watch, which must not wait while the others do."""


_threads: weakref.WeakKeyDictionary[dist.ProcessGroup, StoreThreads] = weakref.WeakKeyDictionary()


def store_threads_of(group: dist.ProcessGroup) -> StoreThreads:
    """All channels of ``group`` share these threads: if its store is silent, it is silent for all of them."""
    return _threads.setdefault(group, StoreThreads(StoreThread(), StoreThread()))
