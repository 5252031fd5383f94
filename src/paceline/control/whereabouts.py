"""Where a rank is, as it says itself or as its file and its process tell; and which rank waits for which."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.control import stacks
from paceline.control.processes import process_state
from paceline.control.progress import Progress, Record
from paceline.control.user_code import activity_of_frame, line_of_frame
from paceline.control.wire import Field

HOLDS_LOCK = "does not answer: some of its code holds the interpreter lock"

Fields = tuple[int, int, str, str, str, str, tuple[int | str | bytes, ...]]


@dataclass(frozen=True)
class Whereabouts:
    """Where one rank is."""

    started: int
    """How many collectives of the wrapper it has started."""
    step: int
    waiting: str = ""
    """What it waits for, if it does."""
    activity: str = ""
    line: str = ""
    silent: str = ""
    """Why it did not answer itself: ``gone``, ``stopped``, ...; empty if it did."""
    recent: dict[int, str] = field(default_factory=dict)
    """Its last collectives by number."""

    def fields(self) -> Fields:
        told = tuple(f"{number} {text}" for number, text in self.recent.items())
        return self.started, self.step, self.waiting, self.activity, self.line, self.silent, told

    @staticmethod
    def from_fields(fields: tuple[Field, ...] | None) -> Whereabouts | None:
        match fields:
            case (int(started), int(step), str(waiting), str(activity), str(line), str(silent), tuple(told)):
                pairs = [text.partition(" ") for text in told if isinstance(text, str)]
                recent = {int(number): text for number, _, text in pairs if number.isascii() and number.isdigit()}
                return Whereabouts(started, step, waiting, activity, line, silent, recent)
        return None

    def where(self) -> str:
        """The words that follow "rank 1 "."""
        at = f" at {self.line}" if self.line else ""
        if self.silent:
            return f"{self.silent}{', last seen' + at if at else ''}"
        if self.waiting:
            return f"waits in {self.waiting}{at}"
        return f"is in {self.activity}{at}" if self.activity else "is running"


def of_this_rank(progress: Progress) -> Whereabouts:
    """Where the main thread of this process is. Another thread calls this."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return Whereabouts(
        progress.started,
        progress.step,
        waiting=progress.waiting if progress.waiting_since else "",
        activity=activity_of_frame(frame),
        line=line_of_frame(frame),
        recent=progress.recent(),
    )


def of_record(record: Record, directory: Path, *, running: str = HOLDS_LOCK, ask: bool = True) -> Whereabouts:
    """Where a rank that does not answer is, by its file and its process. ``running`` describes one that runs.

    If ``ask`` is set, the process gets a signal, which makes it tell its line.
    """
    state = process_state(record.process)
    line = ""
    silent = {
        "gone": "is gone: its process has ended",
        "stopped": "is stopped (by SIGSTOP, or in a debugger)",
        "": "does not answer, and runs on another host",
    }.get(state, running)
    if ask and state == "running":
        line = stacks.user_line(stacks.ask(directory, record))
    waiting = record.waiting if record.waiting_since else ""
    return Whereabouts(record.started, record.step, waiting, "", line, silent, record.recent)


# -- who waits for whom --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnosis:
    """Why nothing happens."""

    cause: str
    """One sentence."""
    ranks: tuple[int, ...]
    """The ranks that are the cause, as far as can be told."""
    lines: tuple[str, ...]
    """Where each rank is."""
    parted: bool = False
    """They have started different collectives."""

    def __str__(self) -> str:
        return "\n  ".join([self.cause, *self.lines])


def explain(answers: Mapping[int, Whereabouts | None], size: int) -> Diagnosis:
    """Explain where the ranks are: where they first parted, or who is behind, and in what."""
    known = {rank: answer for rank, answer in answers.items() if answer is not None}
    lines = [f"rank {rank}: collective {answer.started}; {answer.where()}" for rank, answer in sorted(known.items())]
    unknown = tuple(rank for rank in range(size) if rank not in known)
    lines += [f"rank {rank}: nothing is known of it; it has no wrapper yet, or has deleted it" for rank in unknown]
    parted = _divergence(known)
    cause, ranks = parted or _behind(known, unknown)
    return Diagnosis(cause, ranks, tuple(lines), parted=parted is not None)


def _divergence(known: dict[int, Whereabouts]) -> tuple[str, tuple[int, ...]] | None:
    """The first collective that is not the same on all ranks that have started it."""
    for number in sorted({number for answer in known.values() for number in answer.recent}):
        told = {rank: p.recent[number] for rank, p in known.items() if number in p.recent}
        kinds = Counter(told.values())
        if len(kinds) > 1:
            # The larger group is taken to be right; of two groups of the same size, the one with the lowest rank.
            usual = kinds.most_common(1)[0][0]
            odd = tuple(rank for rank, text in sorted(told.items()) if text != usual)
            first = min(rank for rank, text in told.items() if text == usual)
            return (
                f"Ranks parted at collective {number}: rank {first} started {usual}; "
                f"rank {odd[0]} started {told[odd[0]]}.",
                odd,
            )
    return None


def _behind(known: dict[int, Whereabouts], unknown: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    last = min((p.started for p in known.values()), default=0)
    behind = {rank: p for rank, p in sorted(known.items()) if p.started == last}
    ahead = {rank: p for rank, p in sorted(known.items()) if p.started > last}
    if not ahead:
        silent = tuple(rank for rank, p in known.items() if p.silent) + unknown
        elsewhere = tuple(rank for rank, p in known.items() if not p.waiting and rank not in silent)
        for ranks in (silent, elsewhere):
            if ranks:
                where = known[ranks[0]].where() if ranks[0] in known else "says nothing"
                return f"All ranks have started collective {last}; rank {ranks[0]} {where}.", ranks
        return f"All ranks wait in collective {last}, which does not end.", ()
    first, answer = next(iter(ahead.items()))
    wanted = answer.recent.get(last + 1, f"collective {last + 1}")
    rank, laggard = next(iter(behind.items()))
    others = f" (nor has rank {', '.join(map(str, list(behind)[1:]))})" if len(behind) > 1 else ""
    return (
        f"Rank {rank} has not started {wanted}, for which rank {first} waits{others}: it {laggard.where()}.",
        tuple(behind),
    )
