"""What a collective hands back: a ``Work`` as c10d knows it, over what a carrier has begun."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from paceline import _torch
from paceline.errors import RankLostError, StateError
from paceline.transport.c10d.carrier import Pending
from paceline.transport.c10d.herald import Herald


class ShmWork(_torch.Work):
    """An asynchronous collective, or a message."""

    def __init__(
        self,
        jobs: Sequence[Pending],
        outputs: list[Tensor],
        *,
        herald: Herald | None,
        after: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """``after`` runs once, when all jobs have ended well; ``on_end`` runs once, however they ended.

        A message has no herald, and therefore no future.
        """
        super().__init__()
        self._jobs = jobs
        self._outputs = outputs
        self._herald = herald
        self._after = after
        self._on_end = on_end
        self._lock = threading.Lock()
        self._settled = False
        self._error: Exception | None = None
        self._ended: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._fulfilled = False

    # -- what c10d calls --------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there. A wait that runs out of time after ``timeout`` may be repeated.

        C++ callers pass a time-out of zero where they mean none, as torch's own ``Work`` does.
        """
        if not self._settled or self._future is not None:
            self._end(timeout.total_seconds() if timeout else None)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait; this is c10d's other name for it."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait: CPU tensors have no stream to block, only this thread."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._settled and all(job.done() for job in self._jobs):
            self._settle()
            self.announce()
        return self._settled

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Why it failed, if it has."""
        self.is_completed()
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result, once it has ended."""
        return self._outputs

    def source_rank(self) -> int:
        """Where a message came from."""
        if self._herald is not None:
            raise StateError("only a work that receives a message has a source rank")
        return self._jobs[0].source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the result tensors. Its callbacks run on the group's herald."""
        if self._herald is None:
            raise StateError("messages have no future, as with gloo: wait() for the work")
        with self._lock:
            new = self._future is None
            if self._future is None:
                # set_exception() would set a value that only Python knows to raise; C++ callers (torch's reducer) would
                # take it for tensors. What a callback raises is an error to both.
                self._ended = torch.futures.Future()
                self._future = self._ended.then(self._outcome)
        if new and not self.is_completed():
            self._herald.watch(self)
        elif new:
            self.announce()
        return self._future

    def _outcome(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._outputs

    # -- the end ----------------------------------------------------------------------------------------------

    def attend(self) -> None:
        """Wait, and do what is to be done at the end; errors stay with the work."""
        for job in self._jobs:
            # Each has an error of its own, or none; settling finds the first. All must have ended by then.
            with contextlib.suppress(Exception):
                job.wait()
        self._settle()

    def _end(self, limit_s: float | None) -> None:
        self._wait(limit_s)
        self._settle()
        self.announce()

    def _wait(self, limit_s: float | None) -> None:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        for job in self._jobs:
            try:
                job.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except Exception as error:
                if isinstance(error, RankLostError) and not job.done() and limit_s is not None:
                    # These are gloo's words, by which callers know that they may wait again.
                    raise RankLostError(
                        f"Operation timed out! It is still under way after {limit_s:.3f} s, and may be waited for again"
                    ) from None
                if not all(other.done() for other in self._jobs):
                    raise
                break

    def _settle(self) -> None:
        """Do what remains when all jobs have ended. The herald and waiting threads may come here at the same moment."""
        with self._lock:
            if not self._settled:
                try:
                    for job in self._jobs:
                        job.wait()
                    if self._after is not None:
                        self._after()
                except Exception as error:
                    self._error = error
                if self._on_end is not None:
                    self._on_end()
                self._after = self._on_end = None
                self._settled = True

    def announce(self) -> None:
        """Set the future, if there is one. The lock is not held, since this runs the future's callbacks."""
        if self._future is None or self._ended is None:
            return
        with self._lock:
            mine, self._fulfilled = not self._fulfilled, True
        if mine:
            self._ended.set_result(None)
        while not self._future.done():
            # Another thread is setting it. A caller that has waited must find the future set.
            time.sleep(0)


class EndedWork(_torch.Work):
    """What a synchronous call hands back: it has ended, or the call would have raised."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return []

    def get_future(self) -> Any:
        raise StateError("a synchronous call has no future: pass options with asyncOp=True, or async_op=True")


ENDED = EndedWork()
"""One object for all synchronous calls: a call of a few microseconds has no time to make one."""
