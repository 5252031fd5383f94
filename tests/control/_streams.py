"""A group whose ``wait()`` returns at once, as those of accelerators do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch


class _StreamWork(_torch.Work):
    """What a stream waits for, and the host does not."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.work.get_future()


class _StreamGroup(_torch.PythonProcessGroup):
    """Gloo, whose collectives nobody can wait for.

    Who reads a result of a device's waits for it. On a CPU nothing does that: until the host ``runs_ahead`` of what
    will never end, a collective is over when it is launched.
    """

    runs_ahead = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = _torch.new_gloo(store, rank=rank, size=size, timeout=timeout)
        _torch.adopt_backend(self, self.gloo)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _StreamWork:
        return self._launch(self.gloo.allreduce(tensors, opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _StreamWork:
        return self._launch(self.gloo.broadcast(tensors, opts))

    def _launch(self, work: dist.Work) -> _StreamWork:
        if not self.runs_ahead:
            work.wait()
        return _StreamWork(work)


def _new_group(options: Any, _: Any) -> dist.ProcessGroup:
    return _StreamGroup(options.store, options.group_rank, options.group_size, options.timeout)


def join_streams() -> _StreamGroup:
    """A group of all ranks. It does what a host sees of one on an accelerator."""
    if "streams" not in dist.Backend.backend_list:
        dist.Backend.register_backend("streams", _new_group, extended_api=True, devices=["cpu"])
    group: Any = dist.new_group(backend="streams")
    return group
