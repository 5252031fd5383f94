"""Files that nobody but this user can have made or written to.

Anybody may make things in the temporary directory under the names that ours would have: a link to another place, a
FIFO that a reader would wait for, a directory whose files change while they are read. So a directory is opened first,
and is looked at through its descriptor. Its files are opened below that descriptor, and are looked at too. What
somebody else could have made or changed is refused, with a ``PermissionError`` that says why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

# Neither follow a link nor wait for whoever has the other end of a FIFO.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def directory(path: Path, *, may_be_link: bool = False) -> Iterator[int]:
    """A descriptor of a directory. If it ``may_be_link``, a link that this user or root has made is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | _SAFELY
    if may_be_link and path.lstat().st_uid in (os.getuid(), 0):
        flags &= ~os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        # Systems differ in what they say of a link.
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise PermissionError(f"{path} is a link, or is not a directory") from None
    try:
        _check(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def refusal(path: Path, *, may_be_link: bool = False) -> str:
    """Why a directory is refused; empty if it is not, or if there is none."""
    try:
        with directory(path, may_be_link=may_be_link):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)


def names(path: Path) -> list[str]:
    """What is in a directory."""
    with directory(path) as descriptor:
        return sorted(os.listdir(descriptor))


def read(path: Path, limit_bytes: int, *, start: int = 0) -> bytes:
    """What a file holds from ``start`` on, ``limit_bytes`` at most."""
    with directory(path.parent) as parent:
        descriptor = os.open(path.name, os.O_RDONLY | _SAFELY, dir_fd=parent)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise PermissionError(f"{path} is not a file")
        _check(info, path)
        return os.pread(descriptor, limit_bytes, start)
    finally:
        os.close(descriptor)


def create(path: Path) -> int:
    """A descriptor of a new file, which takes the place of whatever has its name."""
    with directory(path.parent) as parent:
        # An old file is not emptied: whoever has it mapped would die of that (SIGBUS).
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=parent)
        return os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600, dir_fd=parent)


def remove(path: Path) -> None:
    """Remove a file."""
    with directory(path.parent) as parent:
        os.unlink(path.name, dir_fd=parent)


def _check(info: os.stat_result, path: Path) -> None:
    if info.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user ({info.st_uid})")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write to {path} (its mode is {stat.S_IMODE(info.st_mode):o})")
