"""``ShmProcessGroup``: a c10d process group whose ranks share memory.

Its methods are c10d's, by their names; ``dist.*``, functional collectives, compiled graphs and torch's DDP and FSDP all
end there. ``calls`` refuses what does not fit; ``reductions`` and ``exchanges`` turn tensors into addresses
(``packing``), hand them to the kernel (``launcher``) and return a ``Work``. A synchronous call runs in the kernel on
the calling thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.errors import StateError
from paceline.transport import checks, forms
from paceline.transport.arena import Arenas
from paceline.transport.calls import one
from paceline.transport.exchanges import Exchanges
from paceline.transport.herald import Herald
from paceline.transport.kernel import Channel, Job
from paceline.transport.packing import Packing, place
from paceline.transport.reductions import Reductions
from paceline.transport.segment import Segment, hold, release
from paceline.transport.work import ShmWork


class ShmProcessGroup(Reductions, Exchanges, _torch.PythonProcessGroup):  # type: ignore[misc]
    """A group of ranks on one host; made by :func:`paceline.transport.new_group`."""

    def __init__(
        self, store: Store, *, rank: int, size: int, timeout: timedelta, channel: Channel, control: Segment
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._name = ""
        self._description = ""
        self._sequence = 0
        self._timeout_s = timeout.total_seconds()
        self._herald = Herald()
        self.channel = channel
        self.arenas = Arenas(channel)
        # Works without destroy_process_group: a group that nobody refers to leaves nothing behind. Not at exit,
        # where tensors may outlive us and where dying is what tells the others.
        used = (channel, control, self.arenas)
        hold(used)
        self._ending = weakref.finalize(self, _end, used, self._herald, os.getpid())
        self._ending.atexit = False

    # -- what c10d asks about a group ------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "shm"

    def name(self) -> str:
        return "shm"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank
    getSize = size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """What serves tensors on ``device``: this group itself, and CPU tensors only."""
        if torch.device(device).type != "cpu":
            raise StateError(f"No backend type associated with device type {device}: shm carries CPU tensors")
        return self

    def _get_backend_name(self) -> str:
        return "shm"

    @property
    def options(self) -> SimpleNamespace:
        """What is read of a backend's options."""
        return SimpleNamespace(_timeout=timedelta(seconds=self._timeout_s), backend="shm", group_name=self._name)

    @property
    def carried(self) -> str:
        """How collectives travel, for people."""
        return f"{self._size} ranks on one host, collectives through shared memory"

    adds_sparse = True
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """For collectives from now on."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self.channel.barrier(timeout_s=self._timeout_s, inline=True).wait()

    # -- the end ---------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish what was started and leave; what ``destroy_process_group`` calls. May be repeated."""
        self._ending()

    def abort(self) -> None:
        """Leave at once; whatever is under way fails, here and on the other ranks."""
        self.channel.abort()
        self._ending()

    # -- barrier, messages -----------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = forms.options(c10d.BarrierOptions, opts, default=forms.BARRIER, timeout=timeout)

        def start(inline: bool, timeout_s: float) -> Sequence[Job]:
            return [self.channel.barrier(timeout_s=timeout_s, inline=inline)]

        return self._launch("barrier", [], [], start, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come; every barrier of ours does."""
        # Zero is no time at all here; to the kernel it is no limit.
        limit_s = self._timeout_s if timeout is None else max(timeout.total_seconds(), 1e-6)
        self.channel.barrier(timeout_s=limit_s, inline=True).wait()

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Any:
        tensor = checks.tensor(one(tensors, "send"), "send")
        to = checks.peer(dstRank, me=self._rank, size=self._size, what="send")
        packed = Packing().read(tensor)
        job = self.channel.send(*place(packed), to, checks.tag(tag), timeout_s=self._timeout_s, keep=packed)
        return self._message("send", tensor, job)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Any:
        frm = checks.peer(srcRank, me=self._rank, size=self._size, what="recv")
        return self._recv("recv", tensors, frm, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        return self._recv("recvAnySource", tensors, None, tag)

    def _recv(self, what: str, tensors: Sequence[Tensor], frm: int | None, tag: int) -> Any:
        tensor = checks.tensor(one(tensors, what), what)
        packing = Packing()
        packed = packing.write(tensor)
        job = self.channel.recv(*place(packed), frm, checks.tag(tag), timeout_s=self._timeout_s, keep=packed)
        return self._message(what, tensor, job, packing)

    def _message(self, what: str, tensor: Tensor, job: Job, packing: Packing | None = None) -> Any:
        on_end = _torch.start_profiler_range(f"shm:{what}", [tensor]) if _torch.is_profiling() else None
        after = packing.unpack if packing else None
        return ShmWork((job,), [tensor], herald=None, after=after, on_end=on_end, name_source=int)

    def _start_coalescing(self, device: torch.device) -> None:
        raise StateError("Backend shm does not implement startCoalescing: leave `device` out of the coalescing manager")

    _end_coalescing = _start_coalescing


def _end(used: tuple[Channel, Segment, Arenas], herald: Herald, pid: int) -> None:
    channel, control, arenas = used
    if os.getpid() != pid:
        # A fork is not the rank; it only lets go of its copy of the memory.
        control.close()
        return
    channel.close()
    herald.close()
    arenas.close()
    control.close()
    release(used)
