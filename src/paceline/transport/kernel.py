"""The C kernel of the shared-memory transport, as Python sees it.

The kernel (``csrc/``) is plain C without torch or Python in it; it is loaded with ``ctypes``, whose calls let go of
the GIL. (One function is called in a quicker way: :meth:`Channel.all_reduce_here`.) It knows addresses, byte counts and
the ranks of *one host*, nothing of tensors or process groups.

A :class:`Channel` is this rank's end of a group; every call on it gives a :class:`Job`::

    job = channel.all_reduce(t.data_ptr(), t.data_ptr(), t.numel(), DTYPES[t.dtype], Op.SUM,
                             scale=None, timeout_s=60.0, inline=False, keep=t)
    job.wait()

``inline=True`` runs a collective on the calling thread if no other one is under way: no thread switch, for callers
that would wait at once anyway. What is passed as ``keep`` is held until the kernel has finished with its memory.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from ctypes import c_int, c_uint64
from enum import IntEnum
from typing import Literal

import torch

from paceline.errors import (
    BadArgumentError,
    DisagreementError,
    PacelineError,
    PeerFailedError,
    RankLostError,
    StateError,
)
from paceline.transport.library import library, quick_all_reduce, why_not

MAX_RANKS = 64


class Op(IntEnum):
    """How elements of several ranks become one; always folded in rank order."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class Kind(IntEnum):
    """What a collective is called in messages, and what ranks must agree on."""

    BARRIER = 0
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    GATHER = 4
    SCATTER = 5
    ALL_TO_ALL = 6
    REDUCE = 7
    REDUCE_SCATTER = 8


DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.complex64: 4,
    torch.complex128: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.uint8: 10,
    torch.uint16: 11,
    torch.uint32: 12,
    torch.uint64: 13,
    torch.bool: 14,
}

# Where a rank can be made to fail (fail_at), in the order of csrc/pl.h.
PHASES = (
    "posted",  # the descriptor is written, nothing is staged
    "staged",  # inputs are in the staging area
    "before_publish",  # all is written, nobody has been told
    "published",  # others were told, the gate has not been passed
    "passed",  # every rank has arrived; others' memory may be read
    "reduced",  # own share is reduced, in the middle of a large collective too
    "copied",  # results of others are copied out
    "sending",  # point to point: a part of the message is in the ring
    "receiving",  # point to point: a part of the message is out of the ring
)
Action = Literal["kill", "stop"]
_ACTIONS: dict[Action, int] = {"kill": 1, "stop": 2}


class _Status(IntEnum):
    """How a job ended: the codes of csrc/pl.h."""

    OK = 0
    PENDING = 1
    LOST = 2
    LEFT = 3
    TIMED_OUT = 4
    POISONED = 5
    DISAGREED = 6
    CLOSED = 7
    FORKED = 8
    ARGUMENT = 9
    MEMORY = 10


def reason_unavailable() -> str | None:
    """Why the kernel cannot be used in this installation, or None if it can."""
    return why_not()


def control_nbytes(size: int) -> int:
    """How large the control segment of ``size`` ranks is."""
    if not 1 <= size <= MAX_RANKS:
        raise BadArgumentError(f"{size} ranks on one host: the shared-memory transport serves 1 to {MAX_RANKS}")
    return int(library().pl_control_bytes(size))


def fail_at(phase: str, *, count: int = 0, action: Action = "kill") -> None:
    """For tests: this process kills (or stops) itself when it reaches ``phase`` for the ``count``-th time from now."""
    library().pl_fail_at(PHASES.index(phase), count, _ACTIONS[action])


class Job:
    """Something the kernel was asked to do; :meth:`wait` for it."""

    # `_handle` is None for a job that ended well on the calling thread: there is nothing left to ask.
    __slots__ = ("__weakref__", "_handle", "_keep", "_library")

    def __init__(self, library: ctypes.CDLL, handle: int | None, keep: object) -> None:
        self._library = library
        self._handle = handle
        self._keep = keep if handle is not None else None

    def __del__(self) -> None:
        if self._handle is not None:
            self._library.pl_job_release(self._handle)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._handle is None or self._library.pl_job_status(self._handle) != _Status.PENDING

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise if it failed, or if ``timeout_s`` pass first (the job goes on then)."""
        if self._handle is None:
            return
        # Without a limit this thread may do the work itself; the job has a limit of its own.
        status = self._library.pl_job_wait(self._handle, math.inf if timeout_s is None else timeout_s)
        if status == _Status.PENDING:
            raise RankLostError(f"still waiting for the other ranks after {timeout_s:.3f} s")
        self._keep = None
        if status != _Status.OK:
            raise self._error(_Status(status))

    @property
    def source(self) -> int:
        """The rank a message came from, once a ``recv`` is done."""
        return -1 if self._handle is None else int(self._library.pl_job_source(self._handle))

    def _error(self, status: _Status) -> PacelineError:
        message = self._library.pl_job_message(self._handle).decode("utf-8", "replace")
        rank = self._library.pl_job_rank(self._handle)
        rank = None if rank < 0 else rank
        if status in (_Status.LOST, _Status.LEFT, _Status.TIMED_OUT):
            return RankLostError(message, rank=rank)
        if status is _Status.POISONED:
            return PeerFailedError(message, rank=rank)
        if status is _Status.DISAGREED:
            return DisagreementError(message)
        if status is _Status.ARGUMENT:
            return BadArgumentError(message)
        return StateError(message)

    def _let_go(self) -> None:
        self._keep = None


class Channel:
    """This rank's end of a group of ranks on one host.

    ``address`` and ``nbytes`` are the mapped control segment (zeroed when new), ``fd`` its file. The channel holds a
    record lock on the file while it is open: that is how others see that this process lives. Such a lock goes when
    *any* descriptor of that file is closed in this process, so open the file once and close ``fd`` after
    :meth:`close`. ``fd=-1`` does without (tests: ranks that are threads). ``create`` is true on exactly one rank,
    whose constructor must return before the others' begin. ``names[r]`` is what rank ``r`` is called in messages.
    """

    def __init__(
        self,
        *,
        address: int,
        nbytes: int,
        fd: int,
        rank: int,
        size: int,
        create: bool,
        names: Sequence[int] | None = None,
    ) -> None:
        self._channel: int | None = None
        # What is closed is freed when no thread can be inside a call any more.
        self._freed_later: int | None = None
        self._library = library()
        self._quick_all_reduce = quick_all_reduce()
        if not 1 <= size <= MAX_RANKS or not 0 <= rank < size:
            raise BadArgumentError(f"rank {rank} of {size}: the shared-memory transport serves 1 to {MAX_RANKS} ranks")
        called = list(range(size)) if names is None else list(names)
        if len(called) != size:
            raise BadArgumentError(f"{len(called)} names for {size} ranks")
        self.rank = rank
        self.size = size
        self._pid = os.getpid()
        reason = ctypes.create_string_buffer(512)
        self._channel = self._library.pl_open(
            address, nbytes, fd, rank, size, create, (c_int * size)(*called), reason, len(reason)
        )
        self._freed_later = self._channel
        if self._channel is None:
            raise StateError(f"the control segment was refused: {reason.value.decode('utf-8', 'replace')}")
        self._done = Job(self._library, None, None)
        self._lock = threading.Lock()
        self._collectives: deque[Job] = deque()
        self._messages: list[Job] = []

    # -- collectives: every rank calls the same ones in the same order --------------------------------------

    def all_reduce(
        self,
        src: int,
        dst: int,
        count: int,
        dtype: int,
        op: Op,
        *,
        scale: float | None = None,
        timeout_s: float,
        inline: bool,
        keep: object,
    ) -> Job:
        """Fold ``count`` elements of all ranks into ``dst`` on all ranks; ``src`` may be ``dst``.

        ``scale``: inputs are multiplied by it before they are summed.
        """
        handle = self._library.pl_all_reduce(
            self._open(), src, dst, count, dtype, op, 1.0 if scale is None else scale, timeout_s, inline
        )
        return self._collective(handle, keep)

    def all_reduce_here(self, at: int, count: int, dtype: int, op: int, timeout_s: float) -> None:
        """:meth:`all_reduce` in place on the calling thread; returns when it has ended well, and raises if not.

        A small all_reduce takes the kernel less time than ``ctypes`` takes to convert its arguments, so this way
        there is neither that nor a job, unless it has failed.
        """
        failed = self._quick_all_reduce(self._channel or self._open(), at, count, dtype, op, timeout_s)
        if failed is not None:
            Job(self._library, failed, None).wait()

    def exchange(
        self,
        sends: Sequence[tuple[int, int]],
        recvs: Sequence[tuple[int, int]],
        *,
        same: bool,
        kind: int,
        root: int = -1,
        timeout_s: float,
        inline: bool,
        keep: object,
    ) -> Job:
        """Send ``sends[d]`` (address, nbytes) to each rank ``d``, receive ``recvs[s]`` from each rank ``s``.

        ``same``: ``sends`` has one entry, which goes to all (or is of no bytes). A piece for oneself may overlap its
        destination exactly.
        """
        self._check(len(sends) == (1 if same else self.size) and len(recvs) == self.size, "exchange")
        out_addresses, out_nbytes = _columns(sends)
        in_addresses, in_nbytes = _columns(recvs)
        handle = self._library.pl_exchange(
            self._open(), out_addresses, out_nbytes, in_addresses, in_nbytes, same, kind, root, timeout_s, inline
        )
        return self._collective(handle, keep)

    def reduce_exchange(
        self,
        sends: Sequence[int],
        counts: Sequence[int],
        dst: int,
        *,
        dtype: int,
        op: Op,
        kind: int,
        root: int = -1,
        timeout_s: float,
        inline: bool,
        keep: object,
    ) -> Job:
        """Fold piece ``d`` (at ``sends[d]``, ``counts[d]`` elements) of every rank into ``dst`` on rank ``d``.

        All ranks pass the same ``counts``.
        """
        self._check(len(sends) == self.size and len(counts) == self.size, "reduce_exchange")
        addresses = (c_uint64 * self.size)(*sends)
        numbers = (c_uint64 * self.size)(*counts)
        handle = self._library.pl_reduce_exchange(
            self._open(), addresses, numbers, dst, dtype, op, kind, root, timeout_s, inline
        )
        return self._collective(handle, keep)

    def barrier(self, *, timeout_s: float, inline: bool) -> Job:
        """Every rank has come this far."""
        return self._collective(self._library.pl_barrier(self._open(), timeout_s, inline), None)

    # -- point to point -------------------------------------------------------------------------------------

    def send(self, src: int, nbytes: int, to: int, tag: int, *, timeout_s: float, keep: object) -> Job:
        """Send a message; done when the memory may be used again."""
        self._check(0 <= to < self.size and to != self.rank, f"send to rank {to}")
        return self._message(self._library.pl_send(self._open(), src, nbytes, to, tag, timeout_s), keep)

    def recv(self, dst: int, nbytes: int, frm: int | None, tag: int, *, timeout_s: float, keep: object) -> Job:
        """Receive the next message with this tag from ``frm``, or from anybody; messages do not overtake."""
        self._check(frm is None or (0 <= frm < self.size and frm != self.rank), f"recv from rank {frm}")
        source = -1 if frm is None else frm
        return self._message(self._library.pl_recv(self._open(), dst, nbytes, source, tag, timeout_s), keep)

    # -- memory that all ranks have mapped ------------------------------------------------------------------

    def register_arena(self, arena: int, bases: Sequence[int], nbytes: int) -> None:
        """Memory of ``nbytes`` a rank; ``bases[r]`` is where rank ``r``'s is mapped here. ``arena`` is its number.

        Every rank registers an arena under the same number before any uses it.
        """
        self._check(len(bases) == self.size, "register_arena")
        if not self._library.pl_register_arena(self._open(), arena, (c_uint64 * self.size)(*bases), nbytes):
            raise StateError(f"arena {arena} cannot be registered: the number is taken, or there is no memory")

    def unregister_arena(self, arena: int) -> None:
        """Forget an arena; returns when no collective uses it any more."""
        if self._usable():
            self._library.pl_unregister_arena(self._channel, arena)

    # -- ends -----------------------------------------------------------------------------------------------

    def poison(self, cause: str) -> None:
        """Make every rank's calls on this group fail, now and later, with ``cause``."""
        self._library.pl_poison(self._open(), cause.encode())

    def close(self) -> None:
        """Finish what was started, then leave the group; ranks that wait for this one from now on are told."""
        if self._usable():
            channel, self._channel = self._channel, None
            self._library.pl_close(channel)
            self._sweep()

    def abort(self) -> None:
        """Leave at once: whatever is under way fails, here and on the other ranks."""
        if self._usable():
            channel, self._channel = self._channel, None
            self._library.pl_abort(channel)
            self._sweep()

    def __del__(self) -> None:
        # One that was never closed has threads and a lock, and lives on.
        if self._channel is None and self._freed_later is not None:
            self._library.pl_free(self._freed_later)

    # -- internals ------------------------------------------------------------------------------------------

    def set_spin(self, *, inline_s: float, worker_s: float) -> None:
        """How long waits burn the CPU before they sleep: on calling threads, and on the kernel's own."""
        self._library.pl_set_spin(self._open(), inline_s, worker_s)

    def _usable(self) -> bool:
        # A forked child shares nothing with the group but its memory: it must not end what its parent uses.
        return self._channel is not None and os.getpid() == self._pid

    def _open(self) -> int:
        if self._channel is None:
            raise StateError("this rank has closed the group")
        return self._channel

    def _check(self, right: bool, what: str) -> None:
        if not right:
            raise BadArgumentError(f"{what}: wrong rank or wrong number of pieces for a group of {self.size}")

    def _collective(self, handle: int | None, keep: object) -> Job:
        if handle is None:
            return self._done
        job = Job(self._library, handle, keep)
        # Whoever asked may drop the job; the memory has to stay until the kernel has done with it.
        with self._lock:
            pending = self._collectives
            while pending and pending[0].done():
                pending.popleft()._let_go()
            pending.append(job)
        return job

    def _message(self, handle: int, keep: object) -> Job:
        job = Job(self._library, handle, keep)
        with self._lock:
            self._messages = [other for other in self._messages if not other.done()]
            self._messages.append(job)
        return job

    def _sweep(self) -> None:
        self._collectives.clear()
        self._messages.clear()


def _columns(pieces: Sequence[tuple[int, int]]) -> tuple[ctypes.Array[c_uint64], ctypes.Array[c_uint64]]:
    column = c_uint64 * len(pieces)
    return column(*[address for address, _ in pieces]), column(*[nbytes for _, nbytes in pieces])
