"""Calls that may never come back, made by a thread so that nobody waits for them for ever.

A store's answer is awaited in C++, without a time-out: while its host is stopped, or cut off without a word, who asks
waits. Here a thread asks, one call at a time, and the caller waits for the thread, for a few seconds at most. Then it
gets a ``StoreSilentError``, and so does everybody at once until the call that is under way has come back. What such a
call was to do may still be done later: who asks again asks for something that can be done twice.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.errors import StoreSilentError

T = TypeVar("T")

ANSWER_S = 3.0
"""How long an answer is awaited."""
END_S = 1.0
"""How long the end of the program waits for a call that is under way."""


class _Errand:
    """One call, and where its outcome is put."""

    __slots__ = ("_args", "_call", "outcome")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._call, self._args = call, args
        self.outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            self.outcome.put((self._call(*self._args), None))
        except BaseException as error:
            self.outcome.put((None, error))

    def is_under_way(self) -> bool:
        return self.outcome.empty()


class Errands:
    """The thread, which starts with the first call and ends with this object."""

    def __init__(self) -> None:
        self._pid = 0
        self._thread = 0
        self._starting = threading.Lock()
        self._turn = threading.Lock()
        self._asked: queue.SimpleQueue[_Errand | None] = queue.SimpleQueue()
        self._overdue: _Errand | None = None
        """A call that nobody waits for any more."""

    def run(self, call: Callable[..., T], *args: Any, within_s: float | None = None) -> T:
        """What ``call`` returns or raises; or ``StoreSilentError``, after ``within_s`` (by default `ANSWER_S`).

        A call may itself run others, which then need no hand-over.
        """
        if threading.get_ident() == self._thread and self._pid == os.getpid():
            return call(*args)
        within_s = ANSWER_S if within_s is None else within_s
        deadline = time.monotonic() + within_s
        if self._pid != os.getpid():
            self._start()
        self._raise_if_silent()
        if not self._turn.acquire(timeout=within_s):
            raise _silent(within_s)
        try:
            self._raise_if_silent()
            errand = _Errand(call, args)
            self._asked.put(errand)
            try:
                value, error = errand.outcome.get(timeout=max(0.0, deadline - time.monotonic()))
            except BaseException as gave_up:
                # Ctrl-C, too: what comes back is not the answer to what is asked next.
                self._overdue = errand
                _overdue[:] = [each for each in _overdue if each.is_under_way()] + [errand]
                if isinstance(gave_up, queue.Empty):
                    raise _silent(within_s) from None
                raise
        finally:
            self._turn.release()
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback holds this frame.
                del error
        result: T = value
        return result

    def is_silent(self) -> bool:
        """Whether a call is under way that nobody waits for any more."""
        return self._overdue is not None and self._overdue.is_under_way()

    def _raise_if_silent(self) -> None:
        if self.is_silent():
            raise _silent(0)
        self._overdue = None

    def _start(self) -> None:
        with self._starting:
            if self._pid == os.getpid():
                return
            # After a fork the thread is the parent's, and so is what was asked.
            self._turn, self._asked, self._overdue = threading.Lock(), queue.SimpleQueue(), None
            thread = threading.Thread(target=_serve, args=(self._asked,), name="paceline-errands", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise StoreSilentError(f"No thread could be started to ask the store ({error}).") from error
            weakref.finalize(self, self._asked.put, None).atexit = False
            assert thread.ident is not None
            self._thread = thread.ident
            self._pid = os.getpid()


def _silent(waited_s: float) -> StoreSilentError:
    lasted = f"within {waited_s:.0f} s" if waited_s else "for some time"
    return StoreSilentError(
        f"The process group's store has not answered {lasted}: its host is stopped, cut off, or overloaded."
    )


def _serve(asked: queue.SimpleQueue[_Errand | None]) -> None:
    while (errand := asked.get()) is not None:
        errand.run()
        # What was asked, and of whom, must not live until the next call.
        del errand


@dataclass(frozen=True)
class Lines:
    """How this process asks the store of a group."""

    own: Errands
    """For the threads that train."""
    of_watch: Errands


_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, Lines] = weakref.WeakKeyDictionary()


def lines_of(group: dist.ProcessGroup) -> Lines:
    """The same for all channels of ``group``: who finds its store silent finds that for all."""
    return _lines.setdefault(group, Lines(Errands(), Errands()))


_overdue: list[_Errand] = []
"""All that nobody waits for any more: whoever asked may be gone before the answer comes."""


@atexit.register
def _await_calls() -> None:
    """A thread that is in C++ and comes back while the interpreter ends would take the process down with it."""
    deadline = time.monotonic() + END_S
    while any(errand.is_under_way() for errand in _overdue) and time.monotonic() < deadline:
        time.sleep(0.01)
