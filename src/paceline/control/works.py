"""Collectives that are under way: how long the host waits for one, or that it does not wait at all.

[Note: waits on a device]
The host waits for a collective of its own memory a short time, again and again, and looks at the other ranks in
between. On an accelerator, ``wait()`` only makes the device's stream wait, and the host goes on. With a time-out it
would block the host, and when that time is over, the backend aborts the communicator: a rank that is late by a moment
would end the job. So the host calls ``wait()`` there once, and without a time-out. Nobody looks at the other ranks
then but the watch, which also looks whether the last collective comes to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

HOST = torch.device("cpu")


def backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """The name of the backend that ``group`` uses for tensors of such a device; empty if it has none."""
    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(group)).split(","))
    return next((backend for device, _, backend in pairs if device == device_type), "")


def blocks_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``work.wait()`` blocks the host: gloo takes tensors of a device to the host, and waits there."""
    return device.type == HOST.type or backend_for(group, device.type) == dist.Backend.GLOO


def has_ended(work: dist.Work, within_s: float) -> bool:
    """Wait for ``work``, which blocks the host, for so long. It raises what the work has failed with."""
    try:
        work.wait(timedelta(seconds=within_s))
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        if not work.is_completed():
            return False
        # The work ended, well or not, just after the time-out, so that the error above is only about the time.
        work.wait()
    return True


def has_let_stream_wait(work: dist.Work, _: float) -> bool:
    """Make the device's current stream wait for ``work``; the host does not ([Note: waits on a device])."""
    work.wait()
    return True


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
    """The collectives that a device does while the host goes on. Only the last one is kept, as it ends last."""

    def __init__(self) -> None:
        self._last: _Sent | None = None
        self._told_of: dist.Work | None = None

    def add(self, work: dist.Work, doing: str) -> None:
        self._last = _Sent(work, doing, time.monotonic())

    def overdue(self, after_s: float) -> tuple[str, float] | None:
        """What the device has been doing for more than ``after_s``, told once, and for how long; None if it is not.

        The watch calls this. A collective that has ended is let go of, and with it the memory that it holds.
        """
        sent = self._last
        if sent is None:
            return None
        if sent.work.is_completed():
            # The host may have sent another one by now.
            if self._last is sent:
                self._last = None
            return None
        lasted_s = time.monotonic() - sent.at_s
        if lasted_s <= after_s or self._told_of is sent.work:
            return None
        self._told_of = sent.work
        return sent.doing, lasted_s
