"""``PeerReports``: what the ranks of a group that spans hosts tell each other when something has gone wrong.

A backend between hosts says that an exchange has failed, but not why: the rank that hung up may have lost another one,
or may be lost itself. So each pair of ranks has a second connection, on which each expects one message from the other:
a report, or a goodbye. A connection that breaks without a message means that the process of that rank is gone. Each
rank begins to receive when the connections are made, and what comes waits in memory. No thread runs until somebody asks
(:meth:`PeerReports.find`).

This is not an agreement (``control.agree``): one rank has news, at a moment that nobody else knows, and the others are
not expected to say anything. The encoding and its bounds are those of agreements.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from paceline import threads
from paceline.control import wire
from paceline.control.agree import ENCODING_BYTES
from paceline.control.tensor_line import row_of, word_in
from paceline.control.wire import MessageKind
from paceline.errors import DisagreementError, PacelineError, PeerError, PeerFailedError, RankLostError
from paceline.transport.hosts.messages import close_connections

# A message takes this much room. The text of a report is cut to what the rest leaves of it.
_ROW_BYTES = 4096
_TEXT_BYTES = _ROW_BYTES - wire.HEAD_BYTES - ENCODING_BYTES
# How long a connection may be silent. It is silent for as long as all goes well.
_SILENCE = timedelta(days=1000)
_TELL_S = 1.0
_END_S = 2.0


Why = Literal["lost", "failed", "disagreed", "closed"]


@dataclass(frozen=True)
class Report:
    """Why a group that spans hosts cannot go on."""

    rank: int | None
    """The rank that is the cause, if it is one rank."""
    why: Why
    """Lost: it is gone or silent. Failed: it has said so. Disagreed: ranks are in different collectives. Closed: it has
    left."""
    said: str

    @classmethod
    def of(cls, error: PacelineError, name: str, *, rank: int) -> Report:
        """The report of ``rank`` after an error in the collective ``name``."""
        if isinstance(error, PeerError):
            return cls(rank=error.rank, why="lost" if isinstance(error, RankLostError) else "failed", said=str(error))
        if isinstance(error, DisagreementError):
            return cls(rank=None, why="disagreed", said=str(error))
        return cls(rank=rank, why="failed", said=f"{name} failed on rank {rank}: {error}")

    def error(self) -> RankLostError | PeerFailedError | DisagreementError:
        """The error that other ranks raise."""
        if self.why == "disagreed":
            return DisagreementError(self.said)
        kind = PeerFailedError if self.why == "failed" else RankLostError
        return kind(self.said, rank=self.rank)

    def encode(self, sender: int) -> Tensor:
        """The message in which rank ``sender`` of the group tells it."""
        blamed = -1 if self.rank is None else self.rank
        said = wire.fitting(self.said, _TEXT_BYTES)
        return row_of(wire.encode(MessageKind.REPORT, blamed, self.why, said, place=_place(sender)), _ROW_BYTES)

    @classmethod
    def decode(cls, message: Tensor, sender: int, names: Sequence[int]) -> Report:
        """What rank ``sender`` has told; errors call the ranks of the group by ``names``."""
        name = names[sender]
        try:
            match wire.decode(MessageKind.REPORT, word_in(message), place=_place(sender)):
                case (int(blamed), ("lost" | "failed" | "disagreed" | "closed") as why, str(said)) if (
                    blamed == -1 or blamed in names
                ):
                    return cls(rank=None if blamed < 0 else blamed, why=why, said=said)
        except wire.BadMessageError:
            pass
        return cls(rank=name, why="failed", said=f"rank {name} has failed; what it said about it cannot be understood")


def _place(sender: int) -> str:
    return f"report of {sender}"


class PeerReports:
    """The connections of ``rank`` to all others of its group, over ``gloo``; ``names`` is what errors call them."""

    def __init__(self, gloo: Any, *, rank: int, names: Sequence[int]) -> None:
        self._gloo = gloo
        self._rank = rank
        self._names = names
        rows = {other: torch.zeros(_ROW_BYTES, dtype=torch.uint8) for other in range(len(names)) if other != rank}
        self._expected = {other: (self._gloo.recv([message], other, 0), message) for other, message in rows.items()}
        self._heard = _Heard()
        self._lock = threading.Lock()
        self._is_listening = False
        self._listeners: list[threads.Thread] = []
        self._has_spoken = False

    def tell(self, report: Report) -> None:
        """Say it to all other ranks. Only the first thing that a rank says is sent."""
        with self._lock:
            if self._has_spoken:
                return
            self._has_spoken = True
        message = report.encode(self._rank)
        deadline = time.monotonic() + _TELL_S
        works = []
        for other in self._expected:
            with contextlib.suppress(RuntimeError):  # that rank is gone
                works.append(self._gloo.send([message], other, 0))
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.01)))

    def find(self, limit_s: float) -> Report | None:
        """Return what a rank has reported, or which one is gone; None if nothing is heard within ``limit_s``."""
        self._listen()
        return self._heard.first(limit_s)

    def alert(self, action: Callable[[], None]) -> None:
        """Call ``action`` when there is a report or a rank is gone. It may run on any thread, and more than once."""
        self._heard.alert(action)
        self._listen()

    def silent(self, among: Sequence[int]) -> list[int]:
        """The names of the ranks ``among`` these from which nothing was heard."""
        return [self._names[other] for other in among if other in self._expected and not self._heard.has(other)]

    def close(self) -> None:
        """Say goodbye, and tell the threads of this rank to end."""
        me = self._names[self._rank]
        self.tell(Report(rank=me, why="closed", said=f"rank {me} closed the group"))
        with self._lock:
            listeners, self._listeners = self._listeners, []
        for thread in listeners:
            thread.tell_to_stop()

    def _listen(self) -> None:
        with self._lock:
            if self._is_listening:
                return
            self._is_listening = True
            gloo, heard = self._gloo, self._heard

            def stop() -> None:
                # Each thread is told, but the connections of all of them are closed in one go.
                if heard.stop():
                    close_connections(gloo)

            for other, (work, message) in self._expected.items():
                about = (work, message, other, self._names, heard)
                self._listeners.append(threads.start(_listen, *about, name="reports", stop=stop, within_s=_END_S))


class _Heard:
    """What other ranks have told. The threads that listen note it here."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._reports: dict[int, Report] = {}
        self._goodbyes: dict[int, Report] = {}
        self._actions: list[Callable[[], None]] = []
        self._has_stopped = False

    def note(self, rank: int, report: Report) -> None:
        with self._change:
            if self._has_stopped:
                # This rank itself has closed the connections.
                return
            is_goodbye = report.why == "closed"
            (self._goodbyes if is_goodbye else self._reports)[rank] = report
            self._change.notify_all()
            actions = [] if is_goodbye else list(self._actions)
        for action in actions:
            action()

    def alert(self, action: Callable[[], None]) -> None:
        with self._change:
            if action not in self._actions:
                self._actions.append(action)
            is_late = bool(self._reports)
        if is_late:
            action()

    def has(self, rank: int) -> bool:
        with self._change:
            return rank in self._reports or rank in self._goodbyes

    def first(self, limit_s: float) -> Report | None:
        with self._change:
            self._change.wait_for(lambda: self._reports, limit_s)
            if self._reports:
                return next(iter(self._reports.values()))
            # That a rank has left is the reason only if nobody gives another. It is lost to the ranks that need it.
            goodbye = next(iter(self._goodbyes.values()), None)
            return None if goodbye is None else replace(goodbye, why="lost")

    def stop(self) -> bool:
        """Ignore what comes from now on; returns whether this is the first such call."""
        with self._change:
            was_listening, self._has_stopped = not self._has_stopped, True
        return was_listening


def _listen(work: Any, message: Tensor, rank: int, names: Sequence[int], heard: _Heard) -> None:
    """Wait for one rank's message. This does not refer to the group, so that a group that nobody holds can end."""
    try:
        work.wait(_SILENCE)
    except RuntimeError:
        gone = f"rank {names[rank]} is gone: its process has ended, or the connection to it is lost"
        heard.note(rank, Report(rank=names[rank], why="lost", said=gone))
    else:
        heard.note(rank, Report.decode(message, rank, names))
