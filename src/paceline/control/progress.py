"""Which collectives a rank has started, and what it waits for: a few lines of memory that are also a file.

The file is mapped, so that writing costs no system call, and so that other ranks of the host and the doctor can read it
after the process has ended. There is one file per wrapper and rank. ::

    head: who this is | how many collectives | waiting since when, in what | how it failed
    ring: the last collectives: number, when, and a line of text each
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.control import own_files
from paceline.control.processes import Process, this_process

_log = logging.getLogger("paceline.control")

MAGIC = b"plprog01"
RING = 32
# magic, pid, when the process began, rank, size, wrapper, signal for stacks, host
_WHO = struct.Struct("<8sqqqqqq64s")
# collectives started, step, waiting since (0: not), last sign of life
_STATE = struct.Struct("<qqdd")
_TEXT = struct.Struct("<400s")
_ENTRY = struct.Struct("<q184s")
_STATE_AT = _WHO.size
_WAITING_AT = _STATE_AT + _STATE.size
_FAILED_AT = _WAITING_AT + _TEXT.size
_RING_AT = _FAILED_AT + _TEXT.size
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
    host: str
    started: int
    step: int
    waiting_since: float
    alive_at: float
    waiting: str
    failed: str
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
        self.step = 0
        self._prefix = f"{group}." if group else ""
        path = directory / self.file_name(rank) if directory is not None else None
        memory = _map(path) if path is not None else None
        self.path = path if memory is not None else None
        """None if there is no file: then only this process can read what is written."""
        self._memory = memory = memory or mmap.mmap(-1, FILE_BYTES)
        me = this_process()
        _WHO.pack_into(memory, 0, MAGIC, me.pid, me.born, rank, size, wrapper, stack_signal, me.host.encode())
        self._write_state()
        if self.path is not None:
            weakref.finalize(self, _remove, self.path, os.getpid())

    def file_name(self, rank: int) -> str:
        """The name of the file in which ``rank`` tells of the same wrapper."""
        return f"{self._prefix}wrapper{self.wrapper}.rank{rank}"

    def start(self, kind: str, what: str, tensor: Tensor) -> None:
        """Record that a collective is about to be started."""
        self.started = number = self.started + 1
        text = f"{kind} of {what}, {tensor.numel()} x {tensor.dtype}".encode()
        _ENTRY.pack_into(self._memory, _RING_AT + number % RING * _ENTRY.size, number, text)
        self._write_state()

    def begin_wait(self, doing: str) -> None:
        self.waiting, self.waiting_since = doing, time.time()
        _TEXT.pack_into(self._memory, _WAITING_AT, doing.encode())
        self._write_state()

    def end_wait(self) -> None:
        self.waiting_since = 0.0
        self._write_state()

    def fail(self, text: str) -> None:
        """Record how this rank failed, for the doctor."""
        _TEXT.pack_into(self._memory, _FAILED_AT, text.encode(errors="replace"))

    def recent(self) -> dict[int, str]:
        return read(bytes(self._memory)).recent

    def _write_state(self) -> None:
        _STATE.pack_into(self._memory, _STATE_AT, self.started, self.step, self.waiting_since, time.time())


def _remove(path: Path, pid: int) -> None:
    # A forked process drops its copy of the object, but it is not the rank.
    if os.getpid() == pid:
        own_files.remove(path)


def _map(path: Path) -> mmap.mmap | None:
    """A new file, mapped into memory; None if it cannot be made, in which case others have nothing to read."""
    try:
        with path.open("w+b") as file:
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
    """What the file says; None if it is not one of ours, or not whole."""
    try:
        with path.open("rb") as file:
            owner, data = os.fstat(file.fileno()).st_uid, file.read(FILE_BYTES + 1)
    except OSError:
        return None
    return replace(read(data), owner=owner) if len(data) == FILE_BYTES and data.startswith(MAGIC) else None


def read(data: bytes) -> Record:
    _, *who, host = _WHO.unpack_from(data, 0)
    state = _STATE.unpack_from(data, _STATE_AT)
    waiting, failed = (_text(*_TEXT.unpack_from(data, at)) for at in (_WAITING_AT, _FAILED_AT))
    recent = {number: _text(text) for number, text in sorted(_ENTRY.iter_unpack(data[_RING_AT:])) if number > 0}
    fields: tuple[Any, ...] = (*who, _text(host), *state, waiting, failed, recent)
    return Record(*fields)


def _text(raw: bytes) -> str:
    return raw.partition(b"\x00")[0].decode(errors="replace")
