"""``Messages``: send and recv between the ranks of a group that spans hosts.

They go over a gloo group of all ranks, those inside a host too: who receives from anybody has to look in one place.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

_TAG_OF_NOTHING = (1 << 31) - 1


class Message:
    """One under way: what a work is made of. ``explain`` turns gloo's error into ours, once."""

    def __init__(self, work: Any, explain: Callable[[Exception], Exception]) -> None:
        self._work = work
        self._explain = explain
        self._lock = threading.Lock()
        self._ended = False
        self._error: Exception | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise if it failed. A wait that runs out of time ends the group, as with gloo."""
        with self._lock:
            if not self._ended:
                try:
                    # To gloo, no time is the time-out of the group.
                    self._work.wait(timedelta(seconds=timeout_s or 0.0))
                except RuntimeError as error:
                    self._error = self._explain(error)
                self._ended = True
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended or bool(self._work.is_completed())

    @property
    def source(self) -> int:
        """Where it came from."""
        return int(self._work._source_rank())


class Messages:
    """This rank's end of the gloo group."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._lock = threading.Lock()
        self._from_anybody: weakref.WeakSet[_FromAnybody] = weakref.WeakSet()
        self._has_hung_up = False

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """gloo's work."""
        return self._gloo.send([tensor], to, tag)

    def recv(self, tensor: Tensor, frm: int | None, tag: int) -> Any:
        """gloo's work; from anybody if ``frm`` is None."""
        if frm is not None:
            return self._gloo.recv([tensor], frm, tag)
        work = _FromAnybody(self._gloo.recv_anysource([tensor], tag))
        with self._lock:
            self._from_anybody.add(work)
            is_late = self._has_hung_up
        if is_late:
            work.give_up()
        return work

    def hang_up(self) -> None:
        """Have whoever waits for a message, here or on another rank, notice that it will not come."""
        with self._lock:
            has_hung_up, self._has_hung_up = self._has_hung_up, True
            waiting = list(self._from_anybody)
        if not has_hung_up:
            close_connections(self._gloo)
            for work in waiting:
                work.give_up()


class _FromAnybody:
    """gloo's work of a receive from anybody, which gloo ends neither when a rank is lost nor when we hang up."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._ended = threading.Event()
        self._error: Exception | None = None
        # Left behind if we hang up, until gloo's time-out.
        threading.Thread(target=self._wait, name="paceline-anybody", daemon=True).start()

    def wait(self, timeout: timedelta) -> None:
        if not self._ended.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"nothing has come within {timeout.total_seconds():.3f} s")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    def give_up(self) -> None:
        if not self._ended.is_set():
            self._error = RuntimeError("this rank has hung up")
            self._ended.set()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = self._error or error
        self._ended.set()


def close_connections(gloo: Any) -> None:
    """End what waits on a gloo backend, here and on its other ranks.

    gloo has no call for it: ``abort()`` and ``shutdown()`` leave the connections open. A receive that runs out of time
    closes them, if it is from a rank that is still there.
    """
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _TAG_OF_NOTHING).wait(timedelta(milliseconds=1))
