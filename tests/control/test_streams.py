"""A group whose ``wait()`` returns at once, as those of accelerators do: failure is found by the next call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline import DDP, _torch
from paceline.control import Channel
from paceline.errors import PeerError
from paceline.testing import RankError
from tests.on_ranks import on_ranks

Ranks = Callable[..., list[Any]]

# 2 seconds are promised; the machine may be busy.
HEARD_WITHIN_S = 2.0 + 28.0


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


def _join(rank: int, size: int) -> _StreamGroup:
    if "streams" not in dist.Backend.backend_list:
        dist.Backend.register_backend("streams", _new_group, extended_api=True, devices=["cpu"])
    group: Any = dist.new_group(backend="streams")
    return group


def _train(rank: int, size: int, how: str) -> tuple[str, int | None, str, float] | None:
    group = _join(rank, size)
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
        if channel.heard is not None:
            heard.set()

    def step() -> None:
        ddp(torch.ones(2, 4)).sum().backward()

    try:
        with mock.patch.object(Channel, "hear", hear_and_tell):
            # What the other rank does not join is what it is missed for.
            step()
            assert heard.wait(60)
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


@on_ranks(timeout=180)
def test_ranks_compile_together(rank: int, size: int) -> None:
    """Ranks that see different sizes agree on what is dynamic, over a group of the agreement's own."""
    torch._dynamo.reset()
    group = _join(rank, size)
    compiled = torch.compile(lambda x: x.sin().sum(), backend="eager")
    with paceline.compiler.agreement(True, group=group) as agreed:
        for n in ([3, 3, 7], [4, 9, 9])[rank]:
            compiled(torch.ones(n))
    (made,) = agreed.compilations
    assert not made.difference
