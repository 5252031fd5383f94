"""A c10d backend for the sim device, which does what NCCL is documented to do.

``work.wait()`` makes the current stream wait, and the host goes on. With a time-out it blocks the host, and if the time
is over before the collective is, the communicator is aborted: every later call raises. If another rank is gone, a
collective does not end, and nobody is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from tests.devices import sim

_POLL_S = 1e-3
_LOOK_S = 0.05


class AbortedError(RuntimeError):
    """The communicator was aborted."""


class SimWork(_torch.Work):
    """A collective on the stream of its communicator."""

    def __init__(self, group: SimGroup, tensors: list[Tensor]) -> None:
        super().__init__()
        self._group = group
        self._done = torch.Event(device=sim.DEVICE)
        self._done.record(group.stream)
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[torch.device(sim.DEVICE)])
        with group.stream:
            # It is complete for the host, and holds events of the streams that write the tensors.
            self._future.set_result(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.check()
        if timeout is None:
            torch.accelerator.current_stream().wait_event(self._done)
            return True
        self._group.timed_waits += 1
        end = time.monotonic() + timeout.total_seconds()
        while not self._done.query():
            if time.monotonic() > end:
                self._group.abort()
                raise AbortedError("Operation timed out, and the communicator was aborted")
            time.sleep(_POLL_S)
        return True

    def is_completed(self) -> bool:
        return self._done.query()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class SimGroup(_torch.PythonProcessGroup):
    """The ranks of a communicator. The numbers travel over gloo, when the device has come to the collective."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = _torch.new_gloo(store, rank=rank, size=size, timeout=timeout)
        self.stream = torch.Stream(device=sim.DEVICE)
        self.timed_waits = 0
        self._aborted = threading.Event()

    def getBackendName(self) -> str:  # c10d's name
        return "simccl"

    def abort(self) -> None:
        """Let the device go on, whatever it has by then."""
        self._aborted.set()

    def check(self) -> None:
        if self._aborted.is_set():
            raise AbortedError("the communicator was aborted")

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimWork:
        return self._launch("all-reduce", tensors, lambda on_cpu: self._gloo.allreduce(on_cpu, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimWork:
        return self._launch("broadcast", tensors, lambda on_cpu: self._gloo.broadcast(on_cpu, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimWork:
        def run(on_cpu: list[Tensor]) -> Any:
            return self._gloo.allgather([on_cpu[1:]], on_cpu[:1], opts)

        return self._launch("all-gather", [*inputs, *outputs[0]], run)

    def _launch(self, name: str, tensors: list[Tensor], run: Callable[[list[Tensor]], Any]) -> SimWork:
        self.check()
        for tensor in tensors:
            if tensor.device != torch.device(sim.DEVICE):
                raise ValueError(f"simccl takes tensors of the sim device, not of {tensor.device}")
        # The communicator begins when the caller's stream has come here, and reads the memory at that time.
        self.stream.wait_stream(torch.accelerator.current_stream())
        on_cpu = [sim.on_cpu(tensor) for tensor in tensors]

        def collective() -> None:
            if not self._aborted.is_set():
                self._go_through(run(on_cpu))

        sim.call(self.stream.stream_id, name, collective)
        return SimWork(self, tensors)

    def _go_through(self, work: Any) -> None:
        """Wait, on the device, for a collective or until the communicator is aborted."""
        while not self._aborted.is_set():
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    # A peer is gone. A device that waits for it knows nothing of that.
                    self._aborted.wait()


def _new_group(options: Any, _: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = SimGroup(options.store, options.group_rank, options.group_size, options.timeout)
    return group


def join() -> SimGroup:
    """A communicator of all ranks. It has no backend for tensors of the CPU."""
    if "simccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simccl", _new_group, extended_api=True, devices=["sim"])
    group: Any = dist.new_group(backend="simccl")
    return group  # type: ignore[no-any-return]
