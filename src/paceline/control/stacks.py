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

from paceline.control import own_files
from paceline.control.processes import birth
from paceline.control.progress import Record
from paceline.control.user_code import is_user_code

# Hardly anybody uses this signal, while SIGUSR1 and SIGUSR2 are how schedulers announce an end. 0 means that this
# system has no signals of that kind.
SIGNAL = int(signal.SIGRTMIN) + 9 if hasattr(signal, "SIGRTMIN") else 0
_log = logging.getLogger("paceline.control")

_WAIT_S = 1.0
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
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        _log.info("This process will not write its stacks when asked to: %s.", error)
        return 0
    if _descriptor is None:
        _descriptor = opened
        faulthandler.register(SIGNAL, file=_descriptor, all_threads=True)
        atexit.register(take_away)
    else:
        # This process has begun another job: the registered descriptor stays, and leads to the new file.
        os.dup2(opened, _descriptor)
        os.close(opened)
        take_away()
    _path = path
    return SIGNAL


def _file_name(pid: int) -> str:
    return f"stacks.{pid}"


def take_away() -> None:
    """Remove the file of this process."""
    global _path
    # A forked process has a copy of the name, and no file.
    if _path is not None and _path.name == _file_name(os.getpid()):
        own_files.remove(_path)
        _path = None


def ask(directory: Path, record: Record) -> str:
    """The stacks of a process that answers requests, as Python's faulthandler writes them; empty if it does not."""
    path = directory / _file_name(record.pid)
    try:
        before = path.stat().st_size
        if not _may_signal(record, path):
            return ""
        os.kill(record.pid, SIGNAL)
    except OSError:
        return ""
    deadline = time.monotonic() + _WAIT_S
    last = before
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            time.sleep(0.02)
            size = path.stat().st_size
            if size > before and size == last:
                with path.open("rb") as file:
                    file.seek(before)
                    return file.read(64 * 1024).decode(errors="replace")
            last = size
    return ""


def _may_signal(record: Record, path: Path) -> bool:
    """Whether a process of this user asked for our signal. Anybody can write a file that names any process."""
    if not SIGNAL or record.stack_signal != SIGNAL or record.born == 0 or birth(record.pid) != record.born:
        return False
    info = path.lstat()
    owners = {record.owner, info.st_uid, os.stat(f"/proc/{record.pid}").st_uid}
    return stat.S_ISREG(info.st_mode) and owners == {os.getuid()}


def user_line(stacks: str) -> str:
    """The innermost line of the user's code. The main thread is written last, and is looked at first."""
    for thread in reversed(re.split(r"\n(?=Thread |Current thread )", stacks)):
        for line in thread.splitlines():
            found = _FRAME.match(line)
            if found and is_user_code(found[1]):
                return f"{found[1]}:{found[2]} in {found[3]}"
    return ""
