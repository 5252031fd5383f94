"""What several tests of the control plane use."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

BUSY_S = 60.0
"""How much longer than promised something may take, because the machine may be busy with other things."""


def group_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_process_group_store(dist.group.WORLD)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, also where it waits in the kernel. This is for the main thread."""

    def expire(_signum: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"this took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def control_characters(text: str) -> set[str]:
    """What ``text`` holds that a terminal would obey instead of showing it, besides line breaks."""
    return {letter for letter in text if not letter.isprintable() and letter != "\n"}
