"""Which process a rank is, and whether that process still runs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Which process a rank is."""

    pid: int
    born: int
    host: str


def birth(pid: int) -> int:
    """When a process began, in the kernel's ticks, which tells it from others with the same pid; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def this_process() -> Process:
    return Process(os.getpid(), birth(os.getpid()), this_host())


def this_host() -> str:
    """A name of the place where a pid means the same process. Host names do not suffice: containers may share one."""
    return f"{socket.gethostname()[:40]}-{_kernel()}"


@cache
def _kernel() -> str:
    found = ""
    with contextlib.suppress(OSError):
        found = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii") + os.readlink("/proc/self/ns/pid")
    return hashlib.blake2b(found.encode(), digest_size=4).hexdigest()


def process_state(process: Process) -> str:
    """``running``, ``stopped`` or ``gone``; empty if the process is on another host, or if this host does not tell."""
    if process.host != this_host() or not os.path.exists("/proc/self/stat"):
        return ""
    fields = _stat(process.pid)
    if not fields and _is_hidden(process.pid):
        return ""
    if not fields or (process.born and int(fields[19]) != process.born) or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _is_hidden(pid: int) -> bool:
    """Whether the process exists although this user may not see it (``hidepid``)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _stat(pid: int) -> list[str]:
    try:
        # The name in parentheses may hold anything, blanks and parentheses too.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
