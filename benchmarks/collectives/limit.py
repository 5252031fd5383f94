"""The limit: every rank sums its share of all ranks' buffers and stores it to all of them, and waits for nobody.

The buffers lie in one file of the shared-memory file system that all ranks map, as a real transport's would, so the
memory is of the same kind (page size, who touched it first). The loop is C for this very CPU (`limit.c`); where there
is no compiler, torch does it in blocks that fit the cache, at the cost of a few more instructions.

[Note: the limit, called] What users call is `dist.all_reduce`, which takes some microseconds before it calls a backend
and after. A backend written in Python that does nothing but the limit's loop (:class:`LimitGroup`) shows which share of
the limit there is to be had.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("limit.c")
FOLDER = Path("/dev/shm")
BLOCK = 64 * 1024
"""Elements that torch sums at a time."""


class Limit:
    """The shared buffers of `world_size` ranks, and this rank's share of the work on them."""

    def __init__(self, rank: int, world_size: int, nbytes: int) -> None:
        self._rank, self._world_size = rank, world_size
        stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = shared(rank, stride * world_size)
        self._copies = [
            torch.frombuffer(memory, dtype=torch.float32, count=nbytes // 4, offset=r * stride)
            for r in range(world_size)
        ]
        self._copies[rank].zero_()  # who touches a page first gives it a place
        loop = compiled() if world_size in (2, 4) else None
        self.how = "C loop for this CPU" if loop else "torch, in blocks"
        self._run = self._in_c(loop) if loop else self._in_torch

    def own(self, nbytes: int) -> torch.Tensor:
        """What belongs to this rank of the first `nbytes` of all."""
        return self._copies[self._rank][: nbytes // 4]

    def run(self, nbytes: int) -> None:
        """What one all-reduce of `nbytes` has to do at least, on this rank."""
        count = nbytes // 4
        share = -(-count // self._world_size)
        begin = min(self._rank * share, count)
        self._run(begin, min(begin + share, count))

    def _in_c(self, loop: ctypes._CFuncPtr) -> Callable[[int, int], None]:
        addresses = (ctypes.c_void_p * self._world_size)(*(copy.data_ptr() for copy in self._copies))
        return lambda begin, end: loop(addresses, self._world_size, begin, end)

    def _in_torch(self, begin: int, end: int) -> None:
        for at in range(begin, end, BLOCK):
            first, *others = (copy[at : min(at + BLOCK, end)] for copy in self._copies)
            for other in others:
                first += other
            for other in others:
                other.copy_(first)


class LimitGroup(dist.ProcessGroup):
    """A backend that does what the limit does: what it takes to call a backend at all shows in it, and nothing else."""

    def __init__(self, limit: Limit, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self._limit = limit
        self._ended = _Ended()

    def getBackendName(self) -> str:
        return "limit"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
        self._limit.run(tensors[0].nbytes)
        return self._ended


class _Ended(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


def shared(rank: int, nbytes: int) -> mmap.mmap:
    """The same memory on every rank; its file is gone before this returns."""
    names: list[object] = [None]
    fd = -1
    if rank == 0:
        # It is not named like a segment of the transport, because tests look for stale ones of those.
        fd, names[0] = tempfile.mkstemp(prefix="bench-limit-", dir=FOLDER)
        os.posix_fallocate(fd, 0, nbytes)
    dist.broadcast_object_list(names, 0)
    if rank:
        fd = os.open(str(names[0]), os.O_RDWR)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    dist.barrier()
    if rank == 0:
        os.unlink(str(names[0]))
    return memory


def compiled() -> ctypes._CFuncPtr | None:
    """The loop in C, or None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limit.so"
        flags = ("-O3", "-march=native", "-mprefer-vector-width=512", "-shared", "-fPIC")
        for tried in (flags, ("-O3", "-shared", "-fPIC")):
            done = subprocess.run([compiler, *tried, str(SOURCE), "-o", str(library)], capture_output=True, check=False)
            if done.returncode == 0:
                break
        else:
            return None
        loop = ctypes.CDLL(str(library)).limit_run
    loop.restype = None
    loop.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
    return loop
