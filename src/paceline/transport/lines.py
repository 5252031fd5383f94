"""``Lines``: what the ranks of a group that spans hosts tell each other when something has gone wrong.

A backend between hosts says that an exchange has failed, not why: the rank that hung up has lost another one, or is
itself the one that is lost. So each pair of ranks has a line beside it, a connection on which each expects one word of
the other: a report, or a goodbye. A line that breaks without a word is a rank whose process is gone. Words are asked
for when the lines are made, and wait in memory; nothing runs until somebody wants to know (:meth:`Lines.find`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.errors import DisagreementError, PacelineError, PeerError, PeerFailedError, RankLostError

# Of a word: the text of a report is cut to fit.
_WORD_BYTES = 4096
_TEXT_CHARACTERS = 400
# A line is silent for as long as all goes well.
_SILENCE = timedelta(days=1000)
_TELL_S = 1.0


Why = Literal["lost", "failed", "disagreed"]


@dataclass(frozen=True)
class Report:
    """Why a group that spans hosts cannot go on."""

    rank: int | None
    """Who is the cause, if it is one rank."""
    why: Why
    """It is gone or silent; or it has failed, and said so; or ranks are not in the same collective."""
    said: str

    @classmethod
    def of(cls, error: PacelineError, name: str, *, rank: int) -> Report:
        """What ``rank`` has to say after an error in the collective ``name``."""
        if isinstance(error, PeerError):
            return cls(rank=error.rank, why="lost" if isinstance(error, RankLostError) else "failed", said=str(error))
        if isinstance(error, DisagreementError):
            return cls(rank=None, why="disagreed", said=str(error))
        return cls(rank=rank, why="failed", said=f"{name} failed on rank {rank}: {error}")

    def error(self) -> RankLostError | PeerFailedError | DisagreementError:
        """As other ranks raise it."""
        if self.why == "disagreed":
            return DisagreementError(self.said)
        kind = RankLostError if self.why == "lost" else PeerFailedError
        return kind(self.said, rank=self.rank)


class Lines:
    """The lines of ``rank`` to all others of its group, over ``gloo``; ``names`` is what errors call them."""

    def __init__(self, gloo: Any, *, rank: int, names: Sequence[int]) -> None:
        self._gloo = gloo
        self._names = names
        words = {other: torch.zeros(_WORD_BYTES, dtype=torch.uint8) for other in range(len(names)) if other != rank}
        self._expected = {other: (self._gloo.recv([word], other, 0), word) for other, word in words.items()}
        self._heard = _Heard()
        self._lock = threading.Lock()
        self._is_listening = False
        self._has_spoken = False

    def tell(self, report: Report) -> None:
        """Say it to all other ranks; the first word is the last."""
        self._speak(asdict(report) | {"said": report.said[:_TEXT_CHARACTERS]})

    def find(self, limit_s: float) -> Report | None:
        """What some rank has reported, or which one is gone; None if nothing is heard within ``limit_s``."""
        self._listen()
        return self._heard.first(limit_s)

    def alert(self, action: Callable[[], None]) -> None:
        """Call ``action`` when there is a report or a rank is gone; from another thread, more than once maybe."""
        self._heard.alert(action)
        self._listen()

    def silent(self, among: Sequence[int]) -> list[int]:
        """Those of the ranks that nothing was heard of, by their names."""
        return [self._names[other] for other in among if other in self._expected and not self._heard.has(other)]

    def close(self) -> None:
        """Say goodbye, which ends the threads of the others, if there are any; ours end with their goodbyes."""
        self._speak(None)

    def _listen(self) -> None:
        with self._lock:
            is_listening, self._is_listening = self._is_listening, True
        if is_listening:
            return
        for other, (work, word) in self._expected.items():
            arguments = (work, word, other, self._names[other], self._heard)
            threading.Thread(target=_listen, args=arguments, name="paceline-line", daemon=True).start()

    def _speak(self, word: dict[str, Any] | None) -> None:
        with self._lock:
            if self._has_spoken:
                return
            self._has_spoken = True
        sent = _as_tensor(json.dumps(word))
        deadline = time.monotonic() + _TELL_S
        works = []
        for other in self._expected:
            with contextlib.suppress(RuntimeError):  # that rank is gone
                works.append(self._gloo.send([sent], other, 0))
        for work in works:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.01)))


class _Heard:
    """What has come over the lines; filled by their threads."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._reports: dict[int, Report] = {}
        self._goodbyes: dict[int, Report] = {}
        self._actions: list[Callable[[], None]] = []

    def note(self, rank: int, report: Report, *, is_goodbye: bool) -> None:
        with self._change:
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
            # Who has left is a reason only if nobody has another.
            found = self._reports or self._goodbyes
            return next(iter(found.values()), None)


def _listen(work: Any, word: Tensor, rank: int, name: int, heard: _Heard) -> None:
    """Refers to nothing that could end the group, so that a group nobody holds ends all the same."""
    try:
        work.wait(_SILENCE)
    except RuntimeError:
        gone = f"rank {name} is gone: its process has ended, or the connection to it is lost"
        heard.note(rank, Report(rank=name, why="lost", said=gone), is_goodbye=False)
        return
    said = json.loads(bytes(word.tolist()).rstrip(b"\0"))
    if said is None:
        left = Report(rank=name, why="lost", said=f"rank {name} has closed the group")
        heard.note(rank, left, is_goodbye=True)
    else:
        blamed = None if said["rank"] is None else int(said["rank"])
        why: Why = said["why"] if said["why"] in ("lost", "disagreed") else "failed"
        heard.note(rank, Report(rank=blamed, why=why, said=str(said["said"])), is_goodbye=False)


def _as_tensor(text: str) -> Tensor:
    word = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
    encoded = text.encode()
    word[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    return word
