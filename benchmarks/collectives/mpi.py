"""MPI beside the others: `mpirun` starts one more process for each rank, which takes its turns when its rank asks.

Between turns an MPI process is blocked on a Unix socket to its rank and takes no time from anybody (inside a
collective it spins, as MPI does); it ends when its rank does. It needs mpi4py and numpy, and no torch. Neither MPI nor
mpi4py is needed for anything else: where one is missing, the method is left out and the run says so.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .turn import timed

ASK, ANSWER = struct.Struct("<QQ?"), struct.Struct("<d")
START_S = 60.0
# Harmless to others than Open MPI, which would refuse to run in a container or on fewer cores than ranks.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def missing() -> str | None:
    """Why MPI can't take part here, or None."""
    if shutil.which("mpirun") is None:
        return "no mpirun (Debian: apt install openmpi-bin)"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    return None


class Peer:
    """A rank's line to its MPI process."""

    def __init__(self, rank: int, world_size: int) -> None:
        import torch.distributed as dist

        folders: list[object] = [tempfile.mkdtemp(prefix="paceline-bench-") if rank == 0 else None]
        dist.broadcast_object_list(folders, 0)
        folder = Path(str(folders[0]))
        self._mpirun: subprocess.Popen[bytes] | None = None
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / str(rank)))
            listener.listen(1)
            listener.settimeout(START_S)
            dist.barrier()
            if rank == 0:
                self._mpirun = subprocess.Popen(
                    ["mpirun", "-n", str(world_size), sys.executable, "-m", __name__, str(folder)],
                    env={**os.environ, **ENVIRONMENT},
                    stdin=subprocess.DEVNULL,
                )
            self._line, _ = listener.accept()
        self._line.settimeout(START_S)
        self.version = _receive(self._line, struct.Struct("<64s"))[0].decode().strip("\0 ")
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)

    def turn(self, nbytes: int, calls: int, *, warm: bool) -> float:
        """Seconds of one call, on this rank."""
        self._line.sendall(ASK.pack(nbytes, calls, warm))
        return _receive(self._line, ANSWER)[0]

    def close(self) -> None:
        self._line.close()
        if self._mpirun is not None:
            try:
                self._mpirun.wait(timeout=START_S)
            except subprocess.TimeoutExpired:
                self._mpirun.kill()
                self._mpirun.wait()


def _receive(line: socket.socket, form: struct.Struct) -> tuple:
    data = b""
    while len(data) < form.size:
        part = line.recv(form.size - len(data))
        if not part:
            raise EOFError("the other end has gone")
        data += part
    return form.unpack(data)


def serve(folder: Path) -> None:
    """The MPI process: take turns until the rank hangs up."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    buffers: dict[int, np.ndarray] = {}
    version = MPI.Get_library_version().replace("\n", " ").replace("\t", " ")
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(folder / str(world.rank)))
        line.sendall(struct.pack("<64s", version.split(",")[0].encode()[:64]))
        while True:
            try:
                nbytes, calls, warm = _receive(line, ASK)
            except EOFError:
                return
            buffer = buffers.get(nbytes)
            if buffer is None:
                buffer = buffers[nbytes] = np.full(nbytes // 4, world.rank + 1, np.float32)
                world.Allreduce(MPI.IN_PLACE, buffer)
                assert (buffer == world.size * (world.size + 1) / 2).all()
                buffer.fill(0)
            answer = timed(
                functools.partial(world.Allreduce, MPI.IN_PLACE, buffer),
                functools.partial(_prepare, None if warm else buffer, world),
                calls,
            )
            line.sendall(ANSWER.pack(answer))


def _prepare(written: Any, world: Any) -> None:
    if written is not None:
        written.fill(0)
        world.Barrier()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
