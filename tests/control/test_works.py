"""How long the host waits for a collective, and that it does not wait for one of a device."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline import _torch
from paceline.control import Channel, hang
from paceline.control.peer_wait import PeerWait
from paceline.control.works import HOST, blocks_host
from paceline.errors import RankLostError
from paceline.settings import HangWatch
from tests.control._common import BUSY_S, group_store
from tests.on_ranks import on_ranks

DEVICE = "cuda"
"""A type of device to name. Nothing here puts a tensor on one."""


class _DeviceWork(_torch.Work):
    """What is over when the test says so. A wait with a time-out ends the communicator, as it does with NCCL."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[timedelta | None] = []
        self.is_over = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout)
        if timeout is not None:
            raise RuntimeError("the communicator was aborted")
        return True

    def is_completed(self) -> bool:
        return self.is_over.is_set()


def _device_channel() -> Channel:
    """A channel of all ranks, over a backend for devices alone."""
    if "ordering" not in dist.Backend.backend_list:
        dist.Backend.register_backend("ordering", _new_group, extended_api=True, devices=[DEVICE])
    group: Any = dist.new_group(backend="ordering")
    return Channel(group)


def _unwatched() -> Channel:
    """A channel for which the test hears what the watch would."""
    with mock.patch.object(hang, "_settings", HangWatch("off")):
        return _device_channel()


def _new_group(options: Any, _: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = _torch.PythonProcessGroup(options.group_rank, options.group_size)
    return group


@on_ranks()
def test_a_device_is_waited_for_once_and_without_a_time_out(rank: int, size: int) -> None:
    channel, work = _device_channel(), _DeviceWork()
    channel.wait(work, "the test", device=DEVICE)
    assert work.waits == [None]


@on_ranks()
def test_the_host_waits_a_short_time_again_and_again(rank: int, size: int) -> None:
    """gloo takes the tensors of a device to the host, and a wait for it blocks."""
    channel = Channel(dist.group.WORLD)
    for device in (HOST, DEVICE):
        assert blocks_host(channel.group, device)
        if rank == 1:
            group_store().get(f"has looked {device}")
        summed = torch.ones(3)
        work = dist.all_reduce(summed, async_op=True)
        looks: list[None] = []

        def look(device: str = device, looks: list[None] = looks) -> None:
            looks.append(None)
            if len(looks) == 2:
                group_store().set(f"has looked {device}", "")

        with mock.patch.object(channel, "news", look):
            channel.wait(work, "the test", device=device)
        assert summed.tolist() == [2.0] * 3
        assert rank == 1 or len(looks) >= 2


@pytest.mark.parametrize("mode", ["observe", "enforce"])
@on_ranks(timeout=120)
def test_the_watch_tells_of_a_device_that_waits_in_vain(rank: int, size: int, mode: str) -> None:
    channel = _device_channel()
    if rank == 0:
        told, heard, work, hear = io.StringIO(), threading.Event(), _DeviceWork(), channel.hear
        channel.hang = HangWatch(mode, 0.01)

        def hear_and_tell() -> None:
            hear()
            if "has waited" in told.getvalue() or channel.heard is not None:
                heard.set()

        with contextlib.redirect_stderr(told), mock.patch.object(channel, "hear", hear_and_tell):
            channel.wait(work, "the all-reduce of the test", device=DEVICE)
            assert heard.wait(BUSY_S)
        if mode == "observe":
            assert "in the all-reduce of the test (on the device)" in told.getvalue()
            channel.check_news()
        else:
            with pytest.raises(RankLostError) as caught:
                channel.check_news()
            assert caught.value.rank == 1
    # Until then rank 1 answers.
    dist.barrier()


@on_ranks()
def test_a_hang_of_the_device_is_told_of_once(rank: int, size: int) -> None:
    channel, work = _unwatched(), _DeviceWork()
    channel.wait(_DeviceWork(), "an earlier one", device=DEVICE)
    channel.wait(work, "the last one", device=DEVICE)
    channel.hang = HangWatch("observe", 1e-9)
    with mock.patch.object(PeerWait, "tell_of_hang", autospec=True) as told:
        for _ in range(3):
            channel.hear()
    assert [call.args[0]._doing for call in told.call_args_list] == ["the last one (on the device)"]


@on_ranks()
def test_what_the_device_has_done_is_let_go_of(rank: int, size: int) -> None:
    """Its tensors may be large."""
    channel, work = _unwatched(), _DeviceWork()
    work.is_over.set()
    channel.wait(work, "the last one", device=DEVICE)
    channel.hear()
    kept = weakref.ref(work)
    del work
    gc.collect()
    assert kept() is None
