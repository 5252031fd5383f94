"""Stacks on request: a signal makes a process write where its threads are, whichever holds the interpreter lock."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import signal
import stat
import time
from pathlib import Path

from paceline.control import own_files, private_files
from paceline.control.plain_text import plain
from paceline.control.processes import birth
from paceline.control.progress import Record
from paceline.control.user_code import is_user_code

# Hardly anybody uses this signal, while SIGUSR1 and SIGUSR2 are how schedulers announce an end. 0 means that this
# system has no signals of that kind.
SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else 0
_log = logging.getLogger("paceline.control")

_WAIT_S = 1.0
_LIMIT_BYTES = 64 * 1024
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')

_descriptor: int | None = None
_path: Path | None = None


def answer_requests(directory: Path | None) -> int:
    """Write this process's stacks into ``directory`` whenever it gets a signal; returns the signal, or 0 for none."""
    global _descriptor, _path
    if directory is None or not SIGNAL:
        return 0
    path = directory / _file_name(os.getpid())
    if path == _path:
        return SIGNAL
    if _descriptor is None and signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return 0
    try:
        opened = private_files.create(path)
    except OSError as error:
        _log.info("This process will not write its stacks when asked to: %s.", error)
        return 0
    if _descriptor is None:
        _descriptor = opened
        faulthandler.register(SIGNAL, file=_descriptor, all_threads=True)
        atexit.register(take_away)
    else:
        # This process has begun another job: the registered descriptor stays, and leads to the new file.
        os.dup2(opened, _descriptor, inheritable=False)
        os.close(opened)
        take_away()
    _path = path
    return SIGNAL


def _file_name(pid: int) -> str:
    return f"stacks.{pid}"


def take_away() -> None:
    """Remove the file of this process."""
    global _path
    if _path is not None:
        own_files.remove(_path)
        _path = None


def _become_fork() -> None:
    """Keep the stacks of a fork out of the rank's file. The handler stays, as without it the signal would kill."""
    global _path
    if _descriptor is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, _descriptor, inheritable=False)
        os.close(nowhere)
    _path = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_fork)


def ask(directory: Path, record: Record) -> str:
    """The stacks of a process that answers requests, as Python's faulthandler writes them; empty if it does not."""
    path = directory / _file_name(record.pid)
    try:
        before = path.lstat().st_size
        if not _send(record, path):
            return ""
    except OSError:
        return ""
    deadline = time.monotonic() + _WAIT_S
    last = before
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            time.sleep(0.02)
            size = path.lstat().st_size
            if size > before and size == last:
                told = private_files.read(path, _LIMIT_BYTES, start=before)
                return plain(told.decode(errors="replace"), lines=True)
            last = size
    return ""


def _send(record: Record, path: Path) -> bool:
    """Send our signal, if a process of this user waits for it; returns whether it was sent."""
    # Without a descriptor for the process, the signal might go to another one that has got the number meanwhile.
    if not SIGNAL or record.stack_signal != SIGNAL or not hasattr(signal, "pidfd_send_signal"):
        return False
    # The descriptor comes first, so that what is found out by the number afterwards is about the same process.
    process = os.pidfd_open(record.pid)
    try:
        if not _may_signal(record, path):
            return False
        signal.pidfd_send_signal(process, SIGNAL)
        return True
    finally:
        os.close(process)


def _may_signal(record: Record, path: Path) -> bool:
    """Whether a process of this user waits for our signal. Anybody can write a file that names any process."""
    if record.born == 0 or birth(record.pid) != record.born:
        return False
    info = path.lstat()
    owners = {record.owner, info.st_uid, os.stat(f"/proc/{record.pid}").st_uid}
    return stat.S_ISREG(info.st_mode) and owners == {os.getuid()} and _catches(record.pid)


def _catches(pid: int) -> bool:
    """Whether the process has a handler for our signal, which would end it otherwise.

    A process that has begun another program (``exec``) keeps its number and its birth, and loses its handlers.
    """
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def user_thread_first(stacks: str) -> str:
    """The same stacks, with the threads that run the user's code before those of libraries."""
    return "\n".join(sorted(_threads(stacks), key=lambda thread: not _user_line(thread)))


def user_line(stacks: str) -> str:
    """The innermost line of the user's code, in the first thread that runs some."""
    return next(filter(None, map(_user_line, _threads(stacks))), "")


def _threads(stacks: str) -> list[str]:
    """What is told of each thread. The main thread is written last, and is what people look for."""
    return [text.strip("\n") for text in reversed(re.split(r"\n(?=Thread |Current thread )", stacks))]


def _user_line(thread: str) -> str:
    for line in thread.splitlines():
        found = _FRAME.match(line)
        if found and is_user_code(found[1]):
            return f"{found[1]}:{found[2]} in {found[3]}"
    return ""
