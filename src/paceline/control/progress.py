"""How far a rank has come, and what it waits for: a few lines of memory that are also a file.

The file is mapped, so that writing costs no system call, and so that other ranks of the host and the doctor can read it
after the process has ended. There is one file per wrapper and rank. ::

    head: who this is | collectives, forwards and backwards | waiting since when, in what | failure | last report
    ring: the last collectives: number, when, and a line of text each
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.control import own_files, private_files
from paceline.control.plain_text import plain
from paceline.control.processes import Process, this_process
from paceline.control.trainer import Trainer

_log = logging.getLogger("paceline.control")

MAGIC = b"plprog02"
RING = 32
RANKS_LIMIT = 1 << 16
"""A file that claims more ranks is not read."""
# No process has a number of more than 31 bits, and no time here is after the year 9999.
_PIDS_END = 1 << 31
_TIMES_END_S = 253_402_300_800.0
# magic, pid, when the process began, rank, size, wrapper, signal for stacks, when the file was made, host, script
_WHO = struct.Struct("<8sqqqqqqd64s200s")
# collectives started, forwards, backwards, whether it has finished, waiting since (0: not), last sign of life
_STATE = struct.Struct("<qqqqdd")
_TEXT = struct.Struct("<400s")
_REPORT = struct.Struct("<2000s")
_ENTRY = struct.Struct("<q184s")
_STATE_AT = _WHO.size
_WAITING_AT = _STATE_AT + _STATE.size
_FAILED_AT = _WAITING_AT + _TEXT.size
_REPORT_AT = _FAILED_AT + _TEXT.size
_RING_AT = _REPORT_AT + _REPORT.size
FILE_BYTES = _RING_AT + RING * _ENTRY.size


@dataclass(frozen=True)
class Record:
    """What a progress file says, in the order in which it is written."""

    pid: int
    born: int
    rank: int
    size: int
    wrapper: int
    stack_signal: int
    made_at: float
    host: str
    script: str
    started: int
    forwards: int
    backwards: int
    finished: int
    waiting_since: float
    alive_at: float
    waiting: str
    failed: str
    report: str
    """The last report of a hang that this rank has made."""
    recent: dict[int, str]
    """The last collectives by number, from 1."""
    owner: int | None = None
    """The user who owns the file; None if the record does not come from a file."""

    @property
    def process(self) -> Process:
        return Process(self.pid, self.born, self.host)


class Progress:
    """This rank's progress in one wrapper."""

    def __init__(
        self, directory: Path | None, *, rank: int, size: int, wrapper: int, group: str = "", stack_signal: int = 0
    ) -> None:
        """``group`` names the wrapper's process group, if that is not the default group."""
        self.wrapper = wrapper
        self.started = 0
        self.waiting_since = 0.0
        self.waiting = ""
        self.forwards = 0
        """How many forwards have begun that train, so that a backward which synchronises should follow."""
        self.backwards = 0
        """How many backwards have begun that synchronise."""
        self.evaluates = False
        """The last forward was one that does not train, and no backward has begun since."""
        self.trainer = Trainer()
        self.waiting_thread = 0
        """The thread that began the last wait."""
        self.finished = False
        """This rank has ended well, and does not take part any more."""
        self._prefix = f"{group}." if group else ""
        path = directory / self.file_name(rank) if directory is not None else None
        mapped = _map(path) if path is not None else None
        self.path = path if mapped is not None else None
        """None if there is no file: then only this process can read what is written."""
        self._memory = memory = mapped or bytearray(FILE_BYTES)
        me = this_process()
        numbers = me.pid, me.born, rank, size, wrapper, stack_signal
        texts = me.host.encode(), sys.argv[0].encode(errors="replace")
        _WHO.pack_into(memory, 0, MAGIC, *numbers, time.time(), *texts)
        self._write_state()
        self._ending = (
            weakref.finalize(self, _finish, mapped, path) if mapped is not None and path is not None else None
        )

    def become_fork(self) -> None:
        """Leave the file to the rank: from here on, what is written stays in this process."""
        self._memory, self.path = bytearray(self._memory), None
        if self._ending is not None:
            self._ending.detach()

    def file_name(self, rank: int) -> str:
        """The name of the file in which ``rank`` tells of the same wrapper."""
        return f"{self._prefix}wrapper{self.wrapper}.rank{rank}"

    def start(self, kind: str, what: str, tensor: Tensor) -> None:
        """Record that a collective is about to be started."""
        self.started = number = self.started + 1
        self.waiting_since = 0.0
        text = f"{kind} of {what}, {tensor.numel()} x {tensor.dtype}".encode()
        _ENTRY.pack_into(self._memory, _RING_AT + number % RING * _ENTRY.size, number, text)
        self._write_state()

    def begin_forward(self, *, trains: bool) -> None:
        self.trainer.note()
        self.evaluates = not trains
        if trains:
            self.forwards += 1
            self._write_state()

    def begin_backward(self, number: int) -> None:
        """Record that the ``number``-th synchronised backward begins. It is written with its first collective."""
        self.evaluates = False
        self.backwards = number

    def finish(self) -> None:
        """Record that this rank has ended well. Others can then tell it from one that was lost."""
        self.finished = True
        self._write_state()

    def begin_wait(self, doing: str) -> None:
        self.waiting, self.waiting_since = doing, time.time()
        self.waiting_thread = threading.get_ident()
        _TEXT.pack_into(self._memory, _WAITING_AT, doing.encode())
        self._write_state()

    def end_wait(self) -> None:
        self.waiting_since = 0.0
        self._write_state()

    def fail(self, text: str) -> None:
        """Record how this rank failed, for the doctor."""
        _TEXT.pack_into(self._memory, _FAILED_AT, text.encode(errors="replace"))

    def note_report(self, text: str) -> None:
        """Keep the report of a hang, for the doctor: its cause is gone when the ranks are."""
        _REPORT.pack_into(self._memory, _REPORT_AT, text.encode(errors="replace"))

    def recent(self) -> dict[int, str]:
        return read(bytes(self._memory)).recent

    def _write_state(self) -> None:
        counts = self.started, self.forwards, self.backwards, self.finished
        _STATE.pack_into(self._memory, _STATE_AT, *counts, self.waiting_since, time.time())


def _finish(memory: mmap.mmap, path: Path) -> None:
    """The wrapper is no more. Its files go when all ranks have finished: until then others may ask how far it came."""
    if own_files.keep:
        return
    started, forwards, backwards, _, *times = _STATE.unpack_from(memory, _STATE_AT)
    _STATE.pack_into(memory, _STATE_AT, started, forwards, backwards, True, *times)
    # Somebody may have removed the directory.
    with contextlib.suppress(OSError):
        # Of ranks that finish at the same time, the last one to look sees that all have.
        same = f"{path.name.rpartition('.')[0]}.rank"
        files = [path.parent / name for name in private_files.names(path.parent) if name.startswith(same)]
        if all(record is None or record.finished for record in map(read_file, files)):
            for file in files:
                own_files.remove(file)


def _map(path: Path) -> mmap.mmap | None:
    """A new file, mapped into memory; None if it cannot be made, in which case others have nothing to read."""
    try:
        with open(private_files.create(path), "w+b") as file:
            # The length alone is not enough: on a full disk, writing to a page without a block ends the process
            # (SIGBUS).
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            file.truncate(FILE_BYTES)
            return mmap.mmap(file.fileno(), FILE_BYTES)
    except OSError as error:
        _log.info("`paceline doctor` will not know of this rank: %s.", error)
        own_files.remove(path)
        return None


def read_file(path: Path) -> Record | None:
    """What the file says; None if it is not one of ours, or not whole, or says what cannot be."""
    try:
        data = private_files.read(path, FILE_BYTES + 1)
    except OSError:
        return None
    if len(data) != FILE_BYTES or not data.startswith(MAGIC):
        return None
    record = replace(read(data), owner=os.getuid())
    return record if _is_possible(record) else None


def _is_possible(record: Record) -> bool:
    """Whether a rank can have written these numbers. Readers count up to some of them, and ask the system of others."""
    counts = record.born, record.wrapper, record.stack_signal, record.started, record.forwards, record.backwards
    times = record.made_at, record.waiting_since, record.alive_at
    return (
        0 < record.pid < _PIDS_END
        and 0 <= record.rank < record.size <= RANKS_LIMIT
        and min(counts) >= 0
        and record.finished in (0, 1)
        and all(math.isfinite(time_s) and 0 <= time_s < _TIMES_END_S for time_s in times)
    )


def read(data: bytes) -> Record:
    _, *who, host, script = _WHO.unpack_from(data, 0)
    state = _STATE.unpack_from(data, _STATE_AT)
    places = (_TEXT, _WAITING_AT), (_TEXT, _FAILED_AT), (_REPORT, _REPORT_AT)
    texts = [_text(*size.unpack_from(data, at), lines=at != _WAITING_AT) for size, at in places]
    recent = {number: _text(text) for number, text in sorted(_ENTRY.iter_unpack(data[_RING_AT:])) if number > 0}
    fields: tuple[Any, ...] = (*who, _text(host), _text(script), *state, *texts, recent)
    return Record(*fields)


def _text(raw: bytes, *, lines: bool = False) -> str:
    return plain(raw.partition(b"\x00")[0].decode(errors="replace"), lines=lines)
