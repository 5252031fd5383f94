"""Segments: files of the shared-memory file system that several ranks map.

::

    with Segment.create(nbytes) as mine:        # on one rank; its room is reserved at once
        tell(mine.name)
    with Segment.open(name, nbytes=nbytes) as theirs: ...   # on another

[Note: nothing is left behind] A segment has a name only while ranks that must map it have not done so. It gets its
name *after* it is allocated and locked, and whoever ends the rendezvous takes the name away; from then on it lives as
long as somebody maps it, and the kernel frees it however the ranks die. A rank that dies while the name exists lets go
of the lock (``flock``), so that the next process of the same user that makes a segment sees it is stale and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
from functools import cache
from types import TracebackType

from paceline.errors import BadArgumentError, NoRoomError, StateError

DIRECTORY = "/dev/shm"
"""Where segments live: the file system that POSIX shared memory uses on Linux."""
PREFIX = "paceline-"
_NAME_BYTES = 16
# Python's ``mmap`` has no names for these.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


# Names that this process has open, or is about to open. Looking at such a file (remove_stale) would close a second
# descriptor of it, and that drops the record locks by which others see that this process lives. So a name is in the set
# before its file is opened and until it is closed, and whoever looks at files takes the lock before it looks at the
# set.
_open_here: set[str] = set()
_open_lock = threading.Lock()


# What a fork gets a copy of: by address, the number of bytes and the file.
_copied: dict[int, tuple[int, int]] = {}


def _forked() -> None:
    """Give a child a lock of its own, and memory of its own."""
    global _open_lock
    # Another thread of the parent may have held the old one.
    _open_lock = threading.Lock()
    _take_copies()


def _take_copies() -> None:
    """Map the memory that is to be copied anew, so that the kernel copies each page when this child writes to it.

    [Note: forks] A tensor in shared memory would stay shared with a child, so that ``p.grad.zero_()`` there zeroed the
    parent's gradients. A private mapping of the same file stops that, and takes less than 1 % of the time that the fork
    itself takes, however large it is. It costs an open file. Its other price is that a page which the child has not
    written to shows what the parent writes later.

    These ways were rejected. To copy everything at once takes seconds, and the memory once more in every worker of a
    data loader. Memory that is left out of the child (``MADV_DONTFORK``), or that cannot be written, ends it with a
    signal at the first touch. ``MADV_WIPEONFORK`` is for private memory only, and gradients that are zeros in the
    child would be silently wrong.
    """
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for address, (nbytes, fd) in _copied.items():
        if _libc_mmap()(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != address:
            reason = os.strerror(ctypes.get_errno())
            # The memory may be unmapped by now, and a later touch of it would be harder to explain.
            os.write(2, f"paceline: this fork has no room for its parent's gradients ({reason}), and ends.\n".encode())
            os._exit(1)
        os.close(fd)
    # A fork of this child copies what it sees here.
    _copied.clear()


os.register_at_fork(after_in_child=_forked)


def _note_open(name: str) -> None:
    with _open_lock:
        _open_here.add(name)


def _note_closed(name: str) -> None:
    with _open_lock:
        _open_here.discard(name)


def _close(fd: int, name: str) -> None:
    os.close(fd)
    _note_closed(name)


def room() -> int:
    """How many bytes the shared-memory file system has left for us."""
    found = os.statvfs(DIRECTORY)
    return found.f_bavail * found.f_frsize


class Segment:
    """A mapped segment. ``memory`` is what keeps it mapped; ``fd`` is its file, until :meth:`close`."""

    __slots__ = ("address", "fd", "memory", "name", "nbytes")

    def __init__(self, *, name: str, fd: int, nbytes: int) -> None:
        self.name = name
        self.fd = fd
        self.nbytes = nbytes
        self.memory = _map(fd, nbytes)
        self.address = address_of(self.memory)

    @classmethod
    def private(cls, nbytes: int) -> Segment:
        """Memory of this process alone, without a name or a file."""
        return cls(name="", fd=-1, nbytes=nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make a segment of zeros, with its room reserved, that others can :meth:`open` by ``name``.

        Raises NoRoomError if there is too little room, before anything has a name.
        """
        if nbytes <= 0:
            raise BadArgumentError(f"a segment must have at least one byte, got {nbytes}")
        remove_stale()
        try:
            return cls._create(nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                raise
            raise NoRoomError(
                f"{DIRECTORY} has no room for {nbytes:,} bytes of shared memory ({room():,} are free). Give it "
                f"more (`mount -o remount,size=... {DIRECTORY}`; docker: --shm-size=...)"
            ) from error

    @classmethod
    def _create(cls, nbytes: int) -> Segment:
        name = _new_name()
        _note_open(name)
        try:
            fd, named = _new_file(name)
        except OSError:
            _note_closed(name)
            raise
        try:
            # A hole in the file would raise SIGBUS at some later write, on whichever rank came last.
            os.posix_fallocate(fd, 0, nbytes)
            os.fchmod(fd, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made = cls(name=name, fd=fd, nbytes=nbytes)
            if not named:
                _link(fd, name)
            return made
        except BaseException:
            if named:
                remove(name)
            _close(fd, name)
            raise

    @classmethod
    def open(cls, name: str, *, nbytes: int) -> Segment:
        """Map a segment that another rank has made. It is refused if it is not exactly as a rank would make it."""
        random = name.removeprefix(PREFIX)
        if random == name or len(random) != 2 * _NAME_BYTES or not set(random) <= set("0123456789abcdef"):
            raise BadArgumentError(f"{name!r} is not the name of a segment")
        _note_open(name)
        try:
            fd = os.open(os.path.join(DIRECTORY, name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            _note_closed(name)
            raise
        try:
            _check(os.fstat(fd), name=name, nbytes=nbytes)
            return cls(name=name, fd=fd, nbytes=nbytes)
        except BaseException:
            _close(fd, name)
            raise

    def unlink(self) -> None:
        """Take the name away. Ranks that have mapped the segment keep it. Any rank may do this, repeatedly."""
        remove(self.name)

    def close_file(self) -> None:
        """Let go of the file; the memory stays."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            _close(fd, self.name)

    def copy_in_forks(self) -> None:
        """Have each fork of this process get a copy of the memory ([Note: forks]), until :func:`end_copies`.

        The file, which has lost its name, stays open for that: this takes the place of :meth:`close_file`.
        """
        fd, self.fd = self.fd, -1
        _copied[self.address] = self.nbytes, fd
        _note_closed(self.name)

    def close(self) -> None:
        """Let go of the file and, once nothing else refers to ``memory``, of the mapping."""
        self.close_file()
        self.address = 0
        # Its last owner unmaps it: memory.close() would raise while a tensor lives on it.
        self.memory = _UNMAPPED

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlink()
        self.close()


def end_copies(address: int) -> None:
    """Let go of the file of a segment that forks get a copy of. This comes before its memory is unmapped."""
    # In a fork there is nothing left to do, because it has taken its copy.
    found = _copied.pop(address, None)
    if found is not None:
        os.close(found[1])


_UNMAPPED = mmap.mmap(-1, mmap.PAGESIZE)


def remove(name: str) -> None:
    """Take a segment's name away, if it still has one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(DIRECTORY, name))


def remove_stale() -> None:
    """Remove named segments of this user whose makers are dead ([Note: nothing is left behind])."""
    for name in os.listdir(DIRECTORY):
        if name.startswith(PREFIX):
            with _open_lock:
                if name not in _open_here:
                    _remove_if_stale(name)


def _remove_if_stale(name: str) -> None:
    # A file that is somebody else's, or has gone since, is none of our business.
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(DIRECTORY, name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(name)
        finally:
            os.close(fd)


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def hold(used: object) -> None:
    """Keep ``used`` alive until :func:`release`, through the end of the interpreter, too.

    The kernel's threads run until the process is gone; memory they use must not be taken from under them by the
    clean-up of Python's objects at exit.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(used))


def release(used: object) -> None:
    """Let go of what was held: nobody in the kernel uses it any more."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(used))


def _check(found: os.stat_result, *, name: str, nbytes: int) -> None:
    reason = None
    if not stat.S_ISREG(found.st_mode):
        reason = "it is not a regular file"
    elif found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, not {os.geteuid()}"
    elif stat.S_IMODE(found.st_mode) != 0o600:
        reason = f"its mode is {stat.S_IMODE(found.st_mode):o}, not 600"
    elif found.st_size != nbytes:
        reason = f"it has {found.st_size} bytes, not {nbytes}"
    if reason is not None:
        raise StateError(f"segment {name} is refused: {reason}")


def _new_name() -> str:
    return PREFIX + secrets.token_hex(_NAME_BYTES)


def _new_file(name: str) -> tuple[int, bool]:
    """Make an empty file, if possible without a name. Also returns whether it has its name already."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if os.path.exists("/proc/self/fd"):
        with contextlib.suppress(OSError):
            return os.open(DIRECTORY, flags | os.O_TMPFILE, 0o600), False
    return os.open(os.path.join(DIRECTORY, name), flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), True


def _link(fd: int, name: str) -> None:
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a dir_fd does Python follow the link in /proc to the file itself.
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


@cache
def _libc_mmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    return function


def _map(fd: int, nbytes: int) -> mmap.mmap:
    """Map the file without keeping a descriptor of it.

    Python's ``mmap`` keeps a duplicate of the descriptor, and closing that one would drop the record locks by which
    others see that this process lives. So it is given anonymous memory, in whose place the file is mapped.
    """
    memory = mmap.mmap(-1, nbytes)
    if fd < 0:
        return memory
    where = address_of(memory)
    got = _libc_mmap()(where, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if got != where:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes of shared memory: {os.strerror(code)}")
    return memory
