"""A group whose ``wait()`` returns at once, as those of accelerators do: failure is found by the next call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP
from paceline.control import Channel
from paceline.errors import PeerError
from paceline.testing import RankError
from tests.control._common import BUSY_S
from tests.control._streams import join_streams

Ranks = Callable[..., list[Any]]

# 2 seconds are promised; the machine may be busy.
HEARD_WITHIN_S = 2.0 + BUSY_S


def _train(rank: int, size: int, how: str) -> tuple[str, int | None, str, float] | None:
    group = join_streams()
    ddp = DDP(nn.Linear(4, 2), process_group=group)
    ddp.channel.compare("parameters", [["a", 1]], ["name", "number"])
    for _ in range(2):
        ddp(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    start = time.monotonic()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            raise ValueError("no such file")
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        return None
    # Nothing that it waits for tells it, but the watch hears of it.
    group.runs_ahead = True
    heard, hear = threading.Event(), Channel.hear

    def hear_and_tell(channel: Channel) -> None:
        hear(channel)
        # Wrappers of earlier tests may live on in this process, and their channels hear as well.
        if channel is ddp.channel and channel.heard is not None:
            heard.set()

    def step() -> None:
        ddp(torch.ones(2, 4)).sum().backward()

    try:
        with mock.patch.object(Channel, "hear", hear_and_tell):
            # What the other rank does not join is what it is missed for.
            step()
            assert heard.wait(BUSY_S)
            step()
    except PeerError as error:
        return type(error).__name__, error.rank, str(error), time.monotonic() - start
    raise AssertionError("no error")


def test_an_exception_is_heard_by_the_next_call(ranks: Ranks) -> None:
    told = ranks(_train, "raises", timeout=120, clean_s=1)[0]
    assert told[:2] == ("PeerFailedError", 1)
    assert "ValueError: no such file" in told[2]
    assert told[3] < HEARD_WITHIN_S


def test_a_rank_that_was_killed_is_heard_of_by_the_next_call(ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks(_train, "killed", timeout=120, settle_s=60)
    told = caught.value.results[0]
    assert told[:2] == ("RankLostError", 1)
    assert "Rank 1 is gone: its process has ended" in told[2]
    assert told[3] < HEARD_WITHIN_S
