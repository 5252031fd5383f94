"""``Messages``: send and recv between the ranks of a group that spans hosts.

They go over a gloo group of all ranks, even inside a host: a rank that receives from anybody has to look in one place.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from paceline import _torch, threads

_TAG_OF_NOTHING = (1 << 31) - 1


class Message:
    """A message under way. ``explain`` turns gloo's error into ours, once."""

    def __init__(self, work: Any, explain: Callable[[Exception], Exception]) -> None:
        self._work = work
        self._explain = explain
        self._lock = threading.Lock()
        self._ended = False
        self._error: Exception | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise if it failed. A wait that runs out of time ends the group, as gloo's does."""
        with self._lock:
            if not self._ended:
                try:
                    # gloo takes a time-out of zero to mean the time-out of the group.
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
        return _torch.source_rank(self._work)


class Messages:
    """This rank's end of the gloo group."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._lock = threading.Lock()
        self._from_anybody: weakref.WeakSet[_FromAnybody] = weakref.WeakSet()
        self._has_hung_up = False

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Begin to send; returns gloo's work."""
        return self._gloo.send([tensor], to, tag)

    def recv(self, tensor: Tensor, frm: int | None, tag: int) -> Any:
        """Begin to receive, from anybody if ``frm`` is None; returns gloo's work."""
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
        """Have those who wait for a message, here or on another rank, notice that it will not come."""
        with self._lock:
            has_hung_up, self._has_hung_up = self._has_hung_up, True
            waiting = list(self._from_anybody)
        if not has_hung_up:
            close_connections(self._gloo)
            for work in waiting:
                work.give_up()


class _FromAnybody:
    """A receive from anybody. gloo's own work for it ends neither when a rank is lost nor when we hang up."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._outcome: futures.Future[None] = futures.Future()
        # If we hang up, the thread is left behind until gloo's time-out.
        threads.start(self._wait, name="anybody", stop=self.give_up, within_s=0)

    def wait(self, timeout: timedelta) -> None:
        if not futures.wait([self._outcome], timeout.total_seconds() or None).done:
            raise RuntimeError(f"nothing has come within {timeout.total_seconds():.3f} s")
        self._outcome.result()

    def is_completed(self) -> bool:
        return self._outcome.done()

    def _source_rank(self) -> int:
        return _torch.source_rank(self._work)

    def give_up(self) -> None:
        self._end(RuntimeError("this rank has hung up"))

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: RuntimeError | None) -> None:
        # The message and our hanging up may come at the same moment; the first one counts.
        with contextlib.suppress(futures.InvalidStateError):
            if error is None:
                self._outcome.set_result(None)
            else:
                self._outcome.set_exception(error)


def close_connections(gloo: Any) -> None:
    """End what waits on a gloo backend, here and on its other ranks.

    gloo has no call for it: ``abort()`` and ``shutdown()`` leave the connections open. A receive that runs out of time
    closes them, if it is from a rank that is still there.
    """
    for peer in range(gloo.size()):
        if peer != gloo.rank():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _TAG_OF_NOTHING).wait(timedelta(milliseconds=1))
