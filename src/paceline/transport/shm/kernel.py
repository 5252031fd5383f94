"""The C kernel of the shared-memory transport, as Python sees it.

The kernel (``csrc/``) is plain C without torch or Python in it; it is loaded with ``ctypes``, whose calls let go of
the GIL. It knows addresses, byte counts and the ranks of *one host*, nothing of tensors or process groups. One function
is the exception: :meth:`Endpoint.all_reduce_here` takes a tensor, and is called in a quicker way.

An :class:`Endpoint` is this rank's end of a group; every call on it gives a :class:`Job`::

    job = endpoint.all_reduce(t.data_ptr(), t.data_ptr(), t.numel(), DTYPES[t.dtype], Op.SUM,
                             timeout_s=60.0, inline=False, keep=t)
    job.wait()

``inline=True`` runs a collective on the calling thread if no other one is under way. This saves a thread switch for
callers that would wait at once anyway. What is passed as ``keep`` is held until the kernel has finished with its
memory.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from ctypes import c_int, c_uint64
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    BadArgumentError,
    DisagreementError,
    PacelineError,
    PeerFailedError,
    RankLostError,
    StateError,
)
from paceline.transport.shm.codes import ACTIONS, MAX_RANKS, PHASES, Action, Op, Outcome, dtype_number
from paceline.transport.shm.library import functions, library
from paceline.transport.shm.library import reason_unavailable as reason_unavailable

if TYPE_CHECKING:
    import torch

# The handle of a job while it is not known whether the kernel has it.
_NOT_YET = 0


def control_nbytes(size: int) -> int:
    """How large the control segment of ``size`` ranks is."""
    if not 1 <= size <= MAX_RANKS:
        raise BadArgumentError(f"{size} ranks on one host: the shared-memory transport serves 1 to {MAX_RANKS}")
    return int(library().pl_control_bytes(size))


def fail_at(phase: str, *, count: int = 0, action: Action = "kill") -> None:
    """For tests: make this process kill or stop itself at ``phase``, after it has passed there ``count`` times."""
    library().pl_fail_at(PHASES.index(phase), count, ACTIONS[action])


class Job:
    """Something the kernel was asked to do; :meth:`wait` for it."""

    __slots__ = ("__weakref__", "_handle", "_keep", "_library")

    def __init__(self, library: ctypes.CDLL, keep: object = None) -> None:
        self._library = library
        self._handle: int | None = _NOT_YET
        self._keep = keep

    def began(self, handle: int | None) -> Job:
        """Take the kernel's handle. It is None if the job ended well on the calling thread: nothing is left to ask."""
        self._handle = handle
        return self

    def __del__(self) -> None:
        if self._handle:
            self._library.pl_job_release(self._handle)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._handle:
            return self._handle is None
        return bool(self._library.pl_job_status(self._handle) != Outcome.PENDING)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise if it failed, or if ``timeout_s`` pass first (the job goes on then)."""
        if self._handle is None:
            return
        # Without a limit this thread may do the work itself; the job has a limit of its own.
        status = self._library.pl_job_wait(self._handle, math.inf if timeout_s is None else timeout_s)
        if status == Outcome.PENDING:
            raise RankLostError(f"still waiting for the other ranks after {timeout_s:.3f} s")
        if self.done():
            self._keep = None
        if status != Outcome.OK:
            # A signal handler may have raised something meanwhile, which ended the wait ([Note: signals], module.c).
            raised = functions().interruption()
            raise self._error(Outcome(status)) if raised is None else raised

    @property
    def source(self) -> int:
        """The rank a message came from, once a ``recv`` is done."""
        return -1 if self._handle is None else int(self._library.pl_job_source(self._handle))

    def part(self, rank: int) -> tuple[int, int]:
        """Where a ``gather_unequal`` has the bytes of a rank, and how many; they live as long as the job."""
        nbytes = c_uint64()
        address = self._library.pl_job_part(self._handle, rank, ctypes.byref(nbytes))
        return address or 0, nbytes.value

    def _error(self, status: Outcome) -> PacelineError:
        message = self._library.pl_job_message(self._handle).decode("utf-8", "replace")
        rank = self._library.pl_job_rank(self._handle)
        rank = None if rank < 0 else rank
        if status in (Outcome.LOST, Outcome.LEFT, Outcome.TIMED_OUT):
            return RankLostError(message, rank=rank)
        if status in (Outcome.POISONED, Outcome.INTERRUPTED):
            return PeerFailedError(message, rank=rank)
        if status is Outcome.DISAGREED:
            return DisagreementError(message)
        if status is Outcome.ARGUMENT:
            return BadArgumentError(message)
        return StateError(message)

    def _let_go(self) -> None:
        self._keep = None


class Endpoint:
    """This rank's end of a group of ranks on one host.

    ``address`` and ``nbytes`` are the mapped control segment (zeroed when new), ``fd`` its file. The endpoint holds a
    record lock on the file while it is open: that is how others see that this process lives. Such a lock goes when
    *any* descriptor of that file is closed in this process, so open the file once and close ``fd`` after
    :meth:`close`. With ``fd=-1`` there is no lock, for a rank that is alone and for tests whose ranks are threads.
    ``create`` is true on exactly one rank, whose constructor must return before the others' begin. ``names[r]`` is what
    rank ``r`` is called in messages.
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
        self._endpoint: int | None = None
        # The handle while the endpoint is being closed. Other ranks can still be told something through it.
        self._closing: int | None = None
        # The handle is freed when no thread can be inside a call any more.
        self._freed_later: int | None = None
        self._library = library()
        self._quick_all_reduce = functions().all_reduce
        if not 1 <= size <= MAX_RANKS or not 0 <= rank < size:
            raise BadArgumentError(f"rank {rank} of {size}: the shared-memory transport serves 1 to {MAX_RANKS} ranks")
        called = list(range(size)) if names is None else list(names)
        if len(called) != size:
            raise BadArgumentError(f"{len(called)} names for {size} ranks")
        self.rank = rank
        self.size = size
        self._pid = os.getpid()
        reason = ctypes.create_string_buffer(512)
        self._endpoint = self._library.pl_open(
            address, nbytes, fd, rank, size, create, (c_int * size)(*called), reason, len(reason)
        )
        self._freed_later = self._endpoint
        if self._endpoint is None:
            raise StateError(f"the control segment was refused: {reason.value.decode('utf-8', 'replace')}")
        self.names = called
        self.name = called[rank]
        self._done = Job(self._library).began(None)
        self._lock = threading.Lock()
        self._collectives: deque[Job] = deque()
        self._messages: list[Job] = []
        # Jobs that were interrupted when it was not known whether the kernel had them. Their memory stays.
        self._strays: list[Job] = []

    # -- collectives: every rank calls the same ones in the same order --------------------------------------

    def all_reduce(
        self, src: int, dst: int, count: int, dtype: int, op: Op, *, timeout_s: float, inline: bool, keep: object
    ) -> Job:
        """Fold ``count`` elements of all ranks into ``dst`` on all ranks; ``src`` may be ``dst``."""
        what = (src, dst, count, dtype, op, timeout_s)
        return self._collective(self._library.pl_all_reduce, *what, inline=inline, keep=keep)

    def all_reduce_here(self, tensor: torch.Tensor, op: int, timeout_s: float) -> bool:
        """:meth:`all_reduce` in place on the calling thread; returns when it has ended well, and raises if not.

        It returns false if nothing was done, because the tensor is not plain memory. A small all_reduce takes the
        kernel less time than ``ctypes`` takes to convert its arguments, so this uses neither ``ctypes`` nor a job,
        unless it fails.
        """
        failed = self._quick_all_reduce(self._endpoint or self._open(), tensor, op, timeout_s)
        if failed is None:
            return True
        if failed is False:
            return False
        self._unfinished(failed, tensor).wait()
        return True

    def exchange(
        self,
        sends: Sequence[tuple[int, int]],
        recvs: Sequence[tuple[int, int]],
        *,
        same: bool,
        kind: int,
        dtype: torch.dtype,
        root: int = -1,
        timeout_s: float,
        inline: bool,
        keep: object,
    ) -> Job:
        """Send ``sends[d]`` (address, nbytes) to each rank ``d``, receive ``recvs[s]`` from each rank ``s``.

        With ``same``, ``sends`` has one entry, which goes to all ranks or has no bytes. A piece for oneself may be its
        own destination. ``dtype`` says what the bytes are; ranks that do not agree on it get an error.
        """
        self._check(len(sends) == (1 if same else self.size) and len(recvs) == self.size, "exchange")
        out_addresses, out_nbytes = _columns(sends)
        in_addresses, in_nbytes = _columns(recvs)
        tables = (out_addresses, out_nbytes, in_addresses, in_nbytes)
        what = (same, kind, root, dtype_number(dtype), timeout_s)
        return self._collective(self._library.pl_exchange, *tables, *what, inline=inline, keep=keep)

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
        what = (addresses, numbers, dst, dtype, op, kind, root, timeout_s)
        return self._collective(self._library.pl_reduce_exchange, *what, inline=inline, keep=keep)

    def gather_unequal(
        self, src: int, nbytes: int, *, kind: int, dtype: torch.dtype, timeout_s: float, keep: object
    ) -> Job:
        """Send any number of bytes to everybody; :meth:`Job.part` has everybody's when the job has ended."""
        what = (src, nbytes, kind, dtype_number(dtype), timeout_s)
        return self._begin(self._collectives, self._library.pl_gather_unequal, *what, keep=keep)

    def barrier(self, *, timeout_s: float, inline: bool) -> Job:
        """Wait until every rank has come this far."""
        return self._collective(self._library.pl_barrier, timeout_s, inline=inline, keep=None)

    # -- point to point -------------------------------------------------------------------------------------

    def send(self, src: int, nbytes: int, to: int, tag: int, *, timeout_s: float, keep: object) -> Job:
        """Send a message. The job is done when the memory may be used again."""
        self._check(0 <= to < self.size and to != self.rank, f"send to rank {to}")
        return self._message(self._library.pl_send, src, nbytes, to, tag, timeout_s, keep=keep)

    def recv(self, dst: int, nbytes: int, frm: int | None, tag: int, *, timeout_s: float, keep: object) -> Job:
        """Receive the next message with this tag from ``frm``, or from anybody; messages do not overtake each other."""
        self._check(frm is None or (0 <= frm < self.size and frm != self.rank), f"recv from rank {frm}")
        source = -1 if frm is None else frm
        return self._message(self._library.pl_recv, dst, nbytes, source, tag, timeout_s, keep=keep)

    # -- memory that all ranks have mapped ------------------------------------------------------------------

    def register_arena(self, arena: int, bases: Sequence[int], nbytes: int) -> None:
        """Tell the kernel of memory that all ranks have mapped; ``bases[r]`` is where rank ``r``'s is mapped here.

        Each rank has ``nbytes`` of it. Every rank registers it under the same number before any uses it.
        """
        self._check(len(bases) == self.size, "register_arena")
        if not self._library.pl_register_arena(self._open(), arena, (c_uint64 * self.size)(*bases), nbytes):
            raise StateError(f"arena {arena} cannot be registered: the number is taken, or there is no memory")

    def unregister_arena(self, arena: int) -> None:
        """Forget an arena; returns when no collective uses it any more."""
        endpoint = self._endpoint
        if endpoint is not None and self._is_ours():
            self._library.pl_unregister_arena(endpoint, arena)

    # -- ends -----------------------------------------------------------------------------------------------

    def poison(self, cause: str, *, blamed: int | None, outcome: Outcome = Outcome.POISONED) -> None:
        """Make every rank's calls on this group fail, now and later, with ``cause``, unless it is closed already.

        ``blamed`` is the name of the rank at fault, on this host or another, if there is one. ``outcome`` is how
        the calls end.
        """
        if self._is_ours():
            with self._lock:
                endpoint = self._endpoint or self._closing
                if endpoint is not None:
                    text = cause.encode(errors="backslashreplace")
                    self._library.pl_poison(endpoint, text, -1 if blamed is None else blamed, outcome)

    def close(self) -> None:
        """Finish what was started, then leave the group; ranks that wait for this one from now on are told."""
        self._leave(self._library.pl_close)

    def abort(self) -> None:
        """Leave at once. Whatever is under way fails, here and on the other ranks, even a :meth:`close`."""
        if not self._leave(self._library.pl_abort):
            self.poison(f"rank {self.name} has aborted the group", blamed=self.name)

    def __del__(self) -> None:
        # An endpoint that was never closed is not freed, since it still has threads and a lock.
        if self._endpoint is None and self._freed_later is not None:
            self._library.pl_free(self._freed_later)

    # -- internals ------------------------------------------------------------------------------------------

    def _is_ours(self) -> bool:
        # A forked child shares nothing with the group but its memory: it must not end what its parent uses.
        return os.getpid() == self._pid

    def _open(self) -> int:
        if self._endpoint is None:
            raise StateError("this rank has closed the group")
        return self._endpoint

    def _leave(self, how: Any) -> bool:
        """Leave the group by way of ``how``. Return False if another call has left it, or is about to."""
        if not self._is_ours():
            return True
        with self._lock:
            if self._endpoint is None:
                return False
            self._closing, self._endpoint = self._endpoint, None
        how(self._closing)
        with self._lock:
            # From here on the segment may be unmapped.
            self._closing = None
        for jobs in (self._collectives, self._messages, self._strays):
            jobs.clear()
        return True

    def _check(self, right: bool, what: str) -> None:
        if not right:
            raise BadArgumentError(f"{what}: wrong rank or wrong number of pieces for a group of {self.size}")

    def _collective(self, function: Any, *arguments: object, inline: bool, keep: object) -> Job:
        if inline:
            handle = function(self._open(), *arguments, True)
            return self._done if handle is None else self._unfinished(handle, keep)
        return self._begin(self._collectives, function, *arguments, False, keep=keep)

    def _message(self, function: Any, *arguments: object, keep: object) -> Job:
        with self._lock:
            self._messages[:] = [other for other in self._messages if not other.done()]
        return self._begin(self._messages, function, *arguments, keep=keep)

    def _begin(self, jobs: deque[Job] | list[Job], function: Any, *arguments: object, keep: object) -> Job:
        endpoint = self._open()
        job = Job(self._library, keep)
        with self._lock:
            self._drop_ended()
            jobs.append(job)
        try:
            return job.began(function(endpoint, *arguments))
        except BaseException:
            with self._lock:
                if job in jobs:
                    jobs.remove(job)
                self._strays.append(job)
            raise

    # [Note: kept memory] A caller may drop a job, or be interrupted (Ctrl-C) before it has it. The memory has to stay
    # until the kernel has done with it. So asynchronous jobs are held here, from before the kernel is called.

    def _unfinished(self, handle: int, keep: object) -> Job:
        """Hold a job that failed on the calling thread, or that goes on without it after an interruption."""
        job = Job(self._library, keep).began(handle)
        with self._lock:
            self._drop_ended()
            self._collectives.append(job)
        return job

    def _drop_ended(self) -> None:
        while self._collectives and self._collectives[0].done():
            self._collectives.popleft()._let_go()


def _columns(pieces: Sequence[tuple[int, int]]) -> tuple[ctypes.Array[c_uint64], ctypes.Array[c_uint64]]:
    column = c_uint64 * len(pieces)
    return column(*[address for address, _ in pieces]), column(*[nbytes for _, nbytes in pieces])
