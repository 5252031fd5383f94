"""The hang watch: one thread per process, which says where its rank is and asks the others when nothing happens.

An *inquiry* is a number that somebody counts up in the store. Every rank's thread looks at it now and then, and puts up
its whereabouts together with that number. This answers all inquiries up to that number. The rank that asked reads the
answers, and looks at the files and processes of ranks that do not answer. None of this is on the path of a step: the
thread has a connection to the store of its own.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch.distributed as dist

from paceline import threads
from paceline.control import forks
from paceline.control.board import Board
from paceline.control.census import Census
from paceline.control.diagnosis import UNKNOWN, Diagnosis, explain
from paceline.control.processes import Process, process_state
from paceline.control.progress import Progress, Record, read_file
from paceline.control.user_code import OWN_COLLECTIVE, collective_frame, line_of_frame
from paceline.control.whereabouts import HOLDS_LOCK, Whereabouts, of_record, of_this_rank
from paceline.control.wire import MessageKind
from paceline.errors import PeerError
from paceline.settings import HangWatch

LOOK_S = 0.5
"""How often a rank looks whether somebody asks where it is."""
ANSWER_S = 3 * LOOK_S
# How long the watch may take to end, because it may be waiting for an answer of the store.
_END_S = 5.0
_log = logging.getLogger("paceline.control")

_settings: HangWatch | None = None


def configure(settings: HangWatch) -> None:
    """Use ``settings`` for channels made from now on."""
    global _settings
    _settings = settings


def settings() -> HangWatch:
    """What was configured, or what the environment says."""
    return _settings or HangWatch.from_arguments()


class Inquiries:
    """Asking the ranks of one channel where they are, and answering."""

    def __init__(
        self, board: Board, progress: Progress, census: Census, *, rank: int, size: int, directory: Path | None
    ) -> None:
        self.board = board
        self.progress = progress
        self.rank = rank
        self._census = census
        self._processes: dict[int, Process] = {}
        self._size = size
        self._directory = directory
        self._answered = 0
        # A rank that asks also answers, on a thread other than the watch's. No answer may replace a later one.
        self._answering = threading.Lock()

    def answer(self) -> None:
        """Say where this rank is, if somebody asks."""
        with self._answering:
            asked = self.board.add("inquiries", 0)
            if asked > self._answered:
                told = of_this_rank(self.progress).fields()
                self.board.put(f"whereabouts/{self.rank}", MessageKind.WHEREABOUTS, asked, *told)
                self._answered = asked

    def ask(
        self, meanwhile: Callable[[], None] | None = None, *, within_s: float | None = None
    ) -> dict[int, Whereabouts | None]:
        """Where every rank is, learnt in ``within_s`` at most (`ANSWER_S`); None for a rank that stays unknown.

        Others may ask at the same time: ``meanwhile`` answers them, by default on this channel.
        """
        found: dict[int, Whereabouts | None] = dict.fromkeys(range(self._size))
        deadline = time.monotonic() + (ANSWER_S if within_s is None else within_s)
        try:
            number = self.board.add("inquiries", 1)
            while None in found.values() and time.monotonic() < deadline:
                (meanwhile or self.answer)()
                for rank, answer in found.items():
                    if answer is None:
                        found[rank] = self._answer_of(rank, number) or self._of_the_dead(rank)
                time.sleep(20e-3)
        except dist.DistError:
            return self.read_files() | {rank: answer for rank, answer in found.items() if answer is not None}
        return {rank: answer or self._from_file(rank) for rank, answer in found.items()}

    def read_files(self) -> dict[int, Whereabouts | None]:
        """Where every rank is according to files and processes, for when the store does not answer. Nobody is asked."""
        found = {rank: self._from_file(rank, running="") for rank in self._others()}
        return found | {self.rank: of_this_rank(self.progress)}

    def _answer_of(self, rank: int, number: int) -> Whereabouts | None:
        match self.board.read(f"whereabouts/{rank}", MessageKind.WHEREABOUTS):
            case (int(answered), *fields) if answered >= number:
                return Whereabouts.from_fields(tuple(fields))
        return None

    def report(self) -> Diagnosis:
        """Why nothing happens."""
        # If the watch is off, no thread answers for a rank. Only ranks that make an inquiry themselves also answer.
        why = (
            UNKNOWN
            if self._directory is not None
            else "it does not say where it is; with hang_watch='observe' it would"
        )
        return explain(self.ask(), self._size, unknown_why=why)

    def finished(self, rank: int) -> Whereabouts | None:
        """How far ``rank`` came, if it is on this host and has ended well."""
        record = self._record(rank)
        return self._from_file(rank) if record is not None and record.finished else None

    def report_own_collective(self, meanwhile: Callable[[], None]) -> Diagnosis | None:
        """The report, if this rank is in a collective of the user's; None if a lower rank is in one, and reports it."""
        answers = self.ask(meanwhile)
        waiting = [rank for rank, answer in answers.items() if answer and answer.activity == OWN_COLLECTIVE]
        return explain(answers, self._size) if self.rank <= min(waiting, default=self.rank) else None

    def gone(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        return [rank for rank in self._others() if self._state(rank) == "gone"]

    def stopped(self) -> list[int]:
        """The ranks of this host whose processes are stopped."""
        return [rank for rank in self._others() if self._state(rank) == "stopped"]

    def missed(self) -> list[int]:
        """The ranks of this host that died before they came to a collective that this rank has started.

        Their files show it. A rank that has finished says so in its file, and is not among them.
        """
        records = {rank: self._record(rank) for rank in self.gone()}
        lost = {rank: record for rank, record in records.items() if record and not record.finished}
        return [rank for rank, record in lost.items() if record.started < self.progress.started]

    def is_running(self, rank: int) -> bool:
        """Whether the process of ``rank`` is on this host and has not ended."""
        return self._state(rank) in ("running", "stopped")

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self.rank]

    def _state(self, rank: int) -> str:
        """As `process_state`; empty if nothing is known of the rank."""
        # The watch asks this about every rank twice a second, so a file is read only until it has named the process.
        if rank not in self._processes and (record := self._record(rank)) is not None:
            self._processes[rank] = record.process
        known = self._processes.get(rank)
        return process_state(known) if known is not None else self._census.state(rank)

    def _of_the_dead(self, rank: int) -> Whereabouts | None:
        """Where a rank was, if it has finished, or if its process has ended or is stopped and will not answer."""
        record = self._record(rank)
        dead = record is not None and (record.finished or process_state(record.process) in ("gone", "stopped"))
        return self._from_file(rank) if dead else None

    def _from_file(self, rank: int, *, running: str = HOLDS_LOCK) -> Whereabouts | None:
        record = self._record(rank)
        if record is None or self._directory is None:
            return None
        return of_record(record, self._directory, running=running)

    def _record(self, rank: int) -> Record | None:
        if self._directory is None:
            return None
        return read_file(self._directory / self.progress.file_name(rank))


class Watched(Protocol):
    """A channel, as the watch sees it."""

    @property
    def inquiries(self) -> Inquiries: ...

    def hear(self) -> None:
        """Look for news of failure."""

    def report(self, where: str, error: BaseException | None, *, final: bool = False) -> None:
        """Tell the other ranks that this one raised."""


def _look_at_trainer(channel: Watched) -> None:
    """Tell the others what has ended this rank's training, if a framework has caught it."""
    progress = channel.inquiries.progress
    if progress.trainer.look() and not progress.finished:
        error = progress.trainer.held_exception()
        if error is not None and not isinstance(error, PeerError):
            # It is not final: the framework may call the function again.
            channel.report("its program", error)


class _Call:
    """A collective that the user called on one thread, as the watch sees it."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._seen_since = 0.0
        # The frame itself is held, so that the next call cannot get its address. It is held only for a call that looks
        # stuck, because a frame keeps alive everything that its callers have in their variables.
        self._held: FrameType | None = None
        self._told = False

    def lasts(self, frame: FrameType | None, watch: HangWatch) -> float:
        """How long the call in ``frame`` has lasted, if that is so long that the person should be told, once."""
        now = time.monotonic()
        seen = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or seen != self._seen or (self._held is not None and self._held is not frame):
            self._seen, self._seen_since = seen, now
            self._held, self._told = None, False
            return 0.0
        lasted_s = now - self._seen_since
        if watch.mode == "off" or lasted_s < watch.after_s / 2:
            return 0.0
        if self._held is None:
            self._held = frame
        elif lasted_s > watch.after_s and not self._told:
            self._told = True
            return lasted_s
        return 0.0


class _Watch:
    """The thread of the hang watch, for all channels of this process."""

    def __init__(self) -> None:
        self._channels: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threads.Thread | None = None
        self._calls: dict[int, _Call] = {}
        """By thread."""
        forks.tell(self)

    def become_fork(self) -> None:
        """Answer for none of the ranks that the parent is."""
        self._channels, self._thread = weakref.WeakSet(), None
        forks.tell(self)

    def add(self, channel: Watched) -> None:
        self._channels.add(channel)
        # If none runs, this is the first channel of the process, or the first after all threads ended.
        if self._thread is None or not self._thread.is_alive():
            self._ended = threading.Event()
            self._thread = threads.start(self._run, self._ended, name="watch", stop=self._ended.set, within_s=_END_S)

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            self._answer()
            for channel in list(self._channels):
                with contextlib.suppress(Exception):
                    channel.hear()
                with contextlib.suppress(Exception):
                    _look_at_trainer(channel)
            channel = None  # type: ignore[assignment]  # or the last one would never be collected
            with contextlib.suppress(Exception):
                self._look_at_threads()

    def _answer(self) -> None:
        for channel in list(self._channels):
            # The store may be gone, because its group or its host has ended.
            with contextlib.suppress(Exception):
                channel.inquiries.answer()

    def _look_at_threads(self) -> None:
        """Notice a collective that the user called and that does not end: no wait of ours sees it."""
        current = settings()
        trainers = (channel.inquiries.progress.trainer.thread for channel in list(self._channels))
        # A program may call collectives on its main thread, and train on another.
        looked_at = {threading.main_thread().ident or 0, *trainers}
        self._calls = {thread: self._calls.get(thread) or _Call() for thread in looked_at}
        for thread, call in self._calls.items():
            # The dict holds this very frame, so it is kept in no variable: in a circle with it, all frames would live
            # on, with everything that is in the user's variables, until the next garbage collection.
            frame = collective_frame(sys._current_frames().get(thread))
            lasted_s = call.lasts(frame, current)
            if lasted_s > 0 and frame is not None:
                self._tell_of_raw_collective(frame, lasted_s)

    def _tell_of_raw_collective(self, frame: FrameType, waited_s: float) -> None:
        """Say who waits for whom, on the lowest rank that waits."""
        where = f"torch.distributed.{frame.f_code.co_name} for {waited_s:.0f} s, called at {line_of_frame(frame)}"
        reports: list[Diagnosis | None] = []
        for channel in list(self._channels):
            # Nothing can be learnt about a group that has ended, but the other groups are asked nevertheless.
            with contextlib.suppress(Exception):
                report = channel.inquiries.report_own_collective(self._answer)
                channel.inquiries.progress.note_report(str(report or ""))
                reports.append(report)
        told = [str(report) for report in reports if report is not None]
        if told or not reports:
            told = [f"this process has been in {where}.", *told]
            print(*(f"paceline: {text}" for text in told), sep="\n", file=sys.stderr, flush=True)


_watch = _Watch()


def watch(channel: Watched) -> None:
    """Answer for ``channel``'s rank as long as it lives."""
    _watch.add(channel)
