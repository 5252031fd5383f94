"""Where a rank is, as it says itself or as its file and its process tell."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from paceline.control import stacks
from paceline.control.plain_text import plain
from paceline.control.processes import process_state
from paceline.control.progress import RING, Progress, Record
from paceline.control.user_code import activity_of_frame, has_user_frames_below, line_of_frame
from paceline.control.wire import Field

# The longest that a number or a text of another rank may be. Python does not read numbers of thousands of digits.
_NUMBER = re.compile(r"[0-9]{1,19}")
_TEXT_LIMIT = 2000

HOLDS_LOCK = "does not answer: some of its code holds the interpreter lock"

Fields = tuple[int, int, int, str, str, str, str, tuple[int | str | bytes, ...]]


@dataclass(frozen=True)
class Whereabouts:
    """Where one rank is."""

    started: int
    """How many collectives of the wrapper it has started."""
    forwards: int = 0
    """How many forwards that train it has begun."""
    backwards: int = 0
    """How many backwards that synchronise it has begun."""
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
        counts = self.started, self.forwards, self.backwards
        return *counts, self.waiting, self.activity, self.line, self.silent, told

    @staticmethod
    def from_fields(fields: tuple[Field, ...] | None) -> Whereabouts | None:
        match fields:
            case (int(n), int(forwards), int(backwards), str(wait), str(activity), str(line), str(silent), tuple(told)):
                pairs = [text.partition(" ") for text in told[:RING] if isinstance(text, str)]
                recent = {int(number): _shown(text) for number, _, text in pairs if _NUMBER.fullmatch(number)}
                where = _shown(wait), _shown(activity), _shown(line), _shown(silent)
                return Whereabouts(n, forwards, backwards, *where, recent)
        return None

    def where(self) -> str:
        """The words that follow "rank 1 "."""
        at = f" at {self.line}" if self.line else ""
        if self.silent:
            return f"{self.silent}{', last seen' + at if at else ''}"
        if self.waiting:
            return f"waits in {self.waiting}{at}"
        return f"is in {self.activity}{at}" if self.activity else "is running"


def _shown(text: str) -> str:
    """What another rank says, as it may be shown."""
    return plain(text[:_TEXT_LIMIT])


def of_this_rank(progress: Progress) -> Whereabouts:
    """Where the thread is that waits, or else the one that trains. Another thread calls this."""
    waits = bool(progress.waiting_since)
    frame = sys._current_frames().get(progress.waiting_thread) if waits else None
    if not has_user_frames_below(frame):
        # A backward on an accelerator waits on a thread of autograd's, which shows no line of the user's.
        frame = progress.trainer.frame() or frame
    outside = "" if waits else progress.trainer.where()
    return Whereabouts(
        progress.started,
        progress.forwards,
        progress.backwards,
        waiting=progress.waiting if waits else "",
        activity=outside or activity_of_frame(frame),
        line="" if outside else line_of_frame(frame),
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
    if record.finished:
        over = "its program ended" if state == "gone" else "it has shut down, or has deleted its wrapper"
        silent = f"has finished: {over}"
    elif ask and state == "running":
        line = stacks.user_line(stacks.ask(directory, record))
    waiting = record.waiting if record.waiting_since else ""
    counts = record.started, record.forwards, record.backwards
    return Whereabouts(*counts, waiting, "", line, silent, record.recent)
