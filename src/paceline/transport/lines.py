"""``Lines``: what the leaders of hosts tell each other when something has gone wrong.

A backend between hosts says that an exchange has failed, not why: the leader that hung up has lost a rank of its own
host, or is itself the one that is lost. So each pair of leaders has a line beside it, a connection on which each
listens for one word of the other, on a thread that costs nothing until there is one: a report, or a goodbye. A line
that breaks without a word is a leader whose process is gone.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from paceline import _torch
from paceline.errors import PacelineError, PeerError, PeerFailedError, RankLostError

# Of a word: the text of a report is cut to fit.
_WORD_BYTES = 4096
_TEXT_CHARACTERS = 400
# A line is silent for as long as all goes well.
_SILENCE = timedelta(days=1000)
_TELL_S = 1.0


@dataclass(frozen=True)
class Report:
    """Why a group that spans hosts cannot go on."""

    rank: int | None
    """Who is the cause, if it is one rank."""
    lost: bool
    """It is gone or silent; otherwise it has failed, and said so."""
    said: str

    @classmethod
    def of(cls, error: PacelineError, name: str, *, rank: int) -> Report:
        """What ``rank`` has to say after an error in the collective ``name``."""
        if isinstance(error, PeerError):
            return cls(rank=error.rank, lost=isinstance(error, RankLostError), said=str(error))
        return cls(rank=rank, lost=False, said=f"{name} failed on rank {rank}: {error}")

    def error(self) -> RankLostError | PeerFailedError:
        """As other ranks raise it."""
        kind = RankLostError if self.lost else PeerFailedError
        return kind(self.said, rank=self.rank)


class Lines:
    """The lines of the leader of host ``rank`` to the ``leaders`` of all hosts."""

    def __init__(self, store: Store, *, rank: int, leaders: Sequence[int]) -> None:
        self._gloo = _torch.new_gloo(dist.PrefixStore("lines/", store), rank=rank, size=len(leaders), timeout=_SILENCE)
        self._leaders = leaders
        self._others = [host for host in range(len(leaders)) if host != rank]
        self._heard = _Heard()
        self._lock = threading.Lock()
        self._has_spoken = False
        for host in self._others:
            arguments = (self._gloo, host, leaders[host], self._heard)
            threading.Thread(target=_listen, args=arguments, name="paceline-line", daemon=True).start()

    def tell(self, report: Report) -> None:
        """Say it to all other leaders; the first word is the last."""
        self._speak(asdict(report) | {"said": report.said[:_TEXT_CHARACTERS]})

    def find(self, limit_s: float) -> Report | None:
        """What some leader has reported, or which one is gone; None if nothing is heard within ``limit_s``."""
        return self._heard.first(limit_s)

    def silent(self) -> list[int]:
        """The leaders that nothing was heard of."""
        return [self._leaders[host] for host in self._others if not self._heard.has(host)]

    def close(self) -> None:
        """Say goodbye, which ends the threads of the others; ours end with their goodbyes."""
        self._speak(None)

    def _speak(self, word: dict[str, Any] | None) -> None:
        with self._lock:
            if self._has_spoken:
                return
            self._has_spoken = True
        sent = _as_tensor(json.dumps(word))
        deadline = time.monotonic() + _TELL_S
        works = []
        for host in self._others:
            with contextlib.suppress(RuntimeError):  # that leader is gone
                works.append(self._gloo.send([sent], host, 0))
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.01)))


class _Heard:
    """What has come over the lines; filled by their threads."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._reports: dict[int, Report] = {}
        self._goodbyes: dict[int, Report] = {}

    def note(self, host: int, report: Report, *, is_goodbye: bool) -> None:
        with self._change:
            (self._goodbyes if is_goodbye else self._reports)[host] = report
            self._change.notify_all()

    def has(self, host: int) -> bool:
        with self._change:
            return host in self._reports or host in self._goodbyes

    def first(self, limit_s: float) -> Report | None:
        with self._change:
            self._change.wait_for(lambda: self._reports, limit_s)
            # Who has left is a reason only if nobody has another.
            found = self._reports or self._goodbyes
            return next(iter(found.values()), None)


def _listen(gloo: Any, host: int, leader: int, heard: _Heard) -> None:
    """Refers to nothing that could end the group, so that a group nobody holds ends all the same."""
    word = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
    try:
        gloo.recv([word], host, 0).wait()
    except RuntimeError:
        gone = f"rank {leader} is gone: its process has ended, or the connection to it is lost"
        heard.note(host, Report(rank=leader, lost=True, said=gone), is_goodbye=False)
        return
    said = json.loads(bytes(word.tolist()).rstrip(b"\0"))
    if said is None:
        left = Report(rank=leader, lost=True, said=f"rank {leader} has closed the group")
        heard.note(host, left, is_goodbye=True)
    else:
        rank = None if said["rank"] is None else int(said["rank"])
        heard.note(host, Report(rank=rank, lost=bool(said["lost"]), said=str(said["said"])), is_goodbye=False)


def _as_tensor(text: str) -> Tensor:
    word = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
    encoded = text.encode()
    word[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    return word
