"""Collectives that are under way: whether the host waits for them, and what the watch sees of those of a device.

[Note: waits on a device]
The host waits for a collective of its own memory a short time, again and again, and looks at the other ranks in
between. On an accelerator, ``wait()`` only makes the device's stream wait, and the host goes on. With a time-out it
would block the host, and when that time is over, the backend aborts the communicator: a rank that is late by a moment
would end the job. So the host calls ``wait()`` there once, and without a time-out. Nobody looks at the other ranks
then but the watch, which also looks whether the last collective comes to its end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.control.failure import Failure
from paceline.control.peer_wait import PeerWait
from paceline.errors import RankLostError

if TYPE_CHECKING:
    from paceline.control.channel import Channel

HOST = "cpu"
"""The type of device that the host's own tensors are on."""


def backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """The name of the backend that ``group`` uses for tensors of such a device; empty if it has none."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return next((backend for device, _, backend in pairs if device == device_type), "")


def blocks_host(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether ``work.wait()`` blocks the host: gloo takes tensors of a device to the host, and waits there."""
    return device_type == HOST or backend_for(group, device_type) == dist.Backend.GLOO


def future_ends(future: torch.futures.Future[Any]) -> Callable[[float], bool]:
    """A function that waits for ``future`` for so many seconds, and says whether it is done."""
    pause_s = 20e-6

    def is_done(within_s: float) -> bool:
        # A future has no wait with a time-out, and a callback would need the interpreter lock on the communication
        # thread: short sleeps that grow are the cheapest thing left.
        nonlocal pause_s
        end = time.monotonic() + within_s
        while not future.done():
            if time.monotonic() > end:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 1e-3)
        return True

    return is_done


class _Sent(NamedTuple):
    work: dist.Work
    doing: str
    at_s: float


class DeviceWorks:
    """The collectives that the device does for a channel. Only the last one is kept, since it ends last."""

    def __init__(self, channel: Channel) -> None:
        self._channel = weakref.ref(channel)
        self._last: _Sent | None = None
        self._told_of: dist.Work | None = None

    def add(self, work: dist.Work, doing: str) -> None:
        self._last = _Sent(work, doing, time.monotonic())

    def look(self) -> Failure | None:
        """Tell of a device that waits for others in vain; called by the watch. A failure ends what this rank does."""
        channel = self._channel()
        # If the host waits too, its own wait tells of the hang.
        if channel is None or channel.progress.waiting_since or (sent := self._overdue(channel.hang.after_s)) is None:
            return None
        self._told_of = sent.work
        wait = PeerWait(channel, f"{sent.doing} (on the device)", timeout_s=channel.timeout_s)
        try:
            wait.tell_of_hang(time.monotonic() - sent.at_s)
        except RankLostError as error:
            rank = channel.rank if error.rank is None else error.rank
            return Failure(rank, sent.doing, "", str(error), final=True, lost=True)
        return None

    def _overdue(self, after_s: float) -> _Sent | None:
        """What the device has not done in that time, and was not told of; what it has done is let go of."""
        sent = self._last
        if sent is None or not sent.work.is_completed():
            late = sent is not None and time.monotonic() - sent.at_s > after_s and sent.work is not self._told_of
            return sent if late else None
        # The work holds memory. The host may have sent another one by now.
        if self._last is sent:
            self._last = None
        return None
