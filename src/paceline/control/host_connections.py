"""Connections of a channel's own between the hosts, for a group that has no backend for tensors of the CPU.

[Note: what the host has to know]
At the end of a backward the host has to know what all ranks have said: which gradients came late, which parameters were
used, whether somebody broke a contract. It needs that before it can go on, because it may have to send something a
second time. If the answer came from the accelerator, the host could not read it before the device had done all that was
asked of it. So the ranks tell each other from host to host. The host waits for the other hosts, which have come to the
same place, and not for the device, which may be far behind.
"""

from __future__ import annotations

import contextlib
from concurrent import futures
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from paceline import _torch, threads
from paceline.control.peer_wait import PeerWait

if TYPE_CHECKING:
    from paceline.control.channel import Channel

# torch makes connections in C++ and cannot be told to stop. If all ranks come, it takes less than this.
_END_S = 1.0


class HostConnections:
    """Gloo between the ranks of a channel. They connect when they first need it, at the same place on all ranks."""

    def __init__(self, channel: Channel, store: dist.Store) -> None:
        self._channel, self._store = channel, store
        self._gloo: Any = None

    def all_reduce(self, tensor: Tensor, op: Any) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: dist.Work = self._connected().allreduce([tensor], options)
        return work

    def broadcast(self, tensor: Tensor, *, source: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = source
        work: dist.Work = self._connected().broadcast([tensor], options)
        return work

    def _connected(self) -> Any:
        if self._gloo is None:
            channel = self._channel
            store = dist.PrefixStore("hosts", self._store)
            timeout = timedelta(seconds=channel.timeout_s)
            make = partial(_connect, store, rank=channel.rank, size=channel.size, timeout=timeout)
            made = threads.outcome_of(make, name="connecting", within_s=_END_S)
            # This raises if something happens to another rank. If the time is over, torch says so.
            wait = PeerWait(channel, "the connections of hosts", timeout_s=channel.timeout_s)
            wait.keep(lambda within_s: bool(futures.wait([made], within_s).done))
            self._gloo = made.result()
        return self._gloo


def _connect(store: Any, *, rank: int, size: int, timeout: timedelta) -> Any:
    # While torch waits for the others, it would keep everybody else from asking over the same connection.
    # Not every store can be cloned.
    with contextlib.suppress(RuntimeError):
        store = store.clone()
    return _torch.new_gloo(store, rank=rank, size=size, timeout=timeout)
