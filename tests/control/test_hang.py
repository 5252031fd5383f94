"""The hang watch: who waits for whom, from ranks that answer and from files of those that do not."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline import DDP, threads
from paceline.control import Channel, hang, stacks
from paceline.control.hang import Inquiries
from paceline.control.peer_wait import PeerWait
from paceline.control.progress import read_file
from paceline.control.user_code import OWN_COLLECTIVE
from paceline.control.whereabouts import Whereabouts
from paceline.errors import PeerError, RankLostError
from paceline.run.doctor import doctor
from paceline.settings import HangWatch
from paceline.testing import RankError, fail_at
from tests.control._common import group_store
from tests.on_ranks import on_ranks

Ranks = Callable[..., list[Any]]


# -- ranks that hang -----------------------------------------------------------------------------------


class _Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        _until_told()
        return torch.ones(4)


def _until_told() -> None:
    group_store().wait(["told"], timedelta(seconds=120))


def _until_stuck() -> None:
    group_store().wait(["stuck"], timedelta(seconds=120))


def _get_stuck(how: str, ddp: DDP) -> None:
    # The others wait for this first, so that they do not look before there is something to see.
    group_store().set("stuck", "")
    match how:
        case "loader":
            next(iter(DataLoader(_Slow())))
        case "parted":
            ddp._broadcast_tensors([torch.ones(5)], source=0)
        case _:
            fail_at(rank=1, phase="loader", action=how).strike("loader", 0)


def _start_watching(ddp: DDP, watch: HangWatch) -> None:
    """Train two steps, and only then watch: a slow start is no hang."""
    for _ in range(2):
        # The second one begins by agreeing on the order of buckets.
        ddp(torch.ones(1, 4)).sum().backward()
    dist.barrier()
    ddp.channel.hang = watch


def _hang(rank: int, size: int, how: str, mode: str) -> dict[str, Any]:
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), bucket_cap_mb=0.00005)
    # Both wait if they have parted: it is for rank 0 to find out, while rank 1 is still there to be asked.
    _start_watching(ddp, HangWatch(mode, 60.0 if (rank, how) == (1, "parted") else 1.0))
    if rank == 1:
        if how == "parted":
            with pytest.raises(PeerError):
                _get_stuck(how, ddp)
            return {}
        _get_stuck(how, ddp)
        if how == "loader":
            ddp(torch.ones(1, 4)).sum().backward()
        return {}
    _until_stuck()
    record = read_file(_directory(ddp.channel) / "wrapper1.rank1")
    told, seen, looked = "", io.StringIO(), io.StringIO()
    with _patience(is_answered=how in ("loader", "parted")):
        try:
            tell = _tell_and_go_on if mode == "observe" else _tell_of_hang
            with mock.patch("sys.stderr", seen), mock.patch.object(PeerWait, "tell_of_hang", tell):
                ddp(torch.ones(1, 4)).sum().backward()
        except RankLostError as error:
            told = f"{error} ({error.rank})"
        doctor(_directory(ddp.channel), with_stacks=how == "loader", out=looked)
    if how in ("stop", "hold_lock"):
        os.kill(record.pid, signal.SIGKILL)
    group_store().set("told", "")
    return {"told": told or seen.getvalue(), "doctor": looked.getvalue(), "directory": str(_directory(ddp.channel))}


@contextmanager
def _patience(*, is_answered: bool = True) -> Iterator[None]:
    """A slow machine is not taken for a rank that does not answer.

    One that cannot is waited for in full, so there it has to be short.
    """
    answer_s = 20.0 if is_answered else hang.ANSWER_S
    with mock.patch.object(hang, "ANSWER_S", answer_s), mock.patch.object(stacks, "_WAIT_S", 20.0):
        yield


def _directory(channel: Channel) -> Path:
    return channel.progress.path.parent


_tell_of_hang = PeerWait.tell_of_hang


def _tell_and_go_on(wait: PeerWait, waited_s: float) -> None:
    """Let rank 1 go on once the report is there: observing changes nothing."""
    _tell_of_hang(wait, waited_s)
    group_store().set("told", "")


def _told(ranks: Ranks, how: str, mode: str) -> dict[str, Any]:
    """What rank 0 has to tell."""
    try:
        return ranks(_hang, how, mode, timeout=120, clean_s=1)[0]
    except RankError as error:
        # Enforced: rank 1 is dead, or comes to a collective that rank 0 has left.
        assert mode == "enforce"
        return error.results[0]


@pytest.mark.parametrize("mode", ["observe", "enforce"])
def test_a_rank_in_its_data_loader(ranks: Ranks, mode: str) -> None:
    told = _told(ranks, "loader", mode)
    assert "Rank 1 has not started all-reduce of bucket 0" in told["told"]
    assert "it is in data loading at " in told["told"]
    assert "test_hang.py:" in told["told"]
    assert "in _until_told" in told["told"]
    if mode == "enforce":
        assert told["told"].endswith("(1)")
        assert "wrapper 1: 2 ranks" in told["doctor"]
        assert "_until_told" in told["doctor"].partition("stacks of rank 1")[2]


@pytest.mark.parametrize(
    ("how", "words"), [("stop", "is stopped (by SIGSTOP"), ("hold_lock", "some of its code holds the interpreter lock")]
)
def test_a_rank_that_cannot_answer(ranks: Ranks, how: str, words: str) -> None:
    told = _told(ranks, how, "enforce")
    assert "Rank 1 has not started all-reduce of bucket 0" in told["told"]
    assert words in told["told"]
    if how == "hold_lock":
        assert "in _get_stuck" in told["told"]
    # Dead by now: its files are what is left of it.
    seen = io.StringIO()
    doctor(Path(told["directory"]), out=seen)
    assert "rank 1: process" in seen.getvalue()
    assert "is gone" in seen.getvalue()


def test_ranks_that_start_different_collectives(ranks: Ranks) -> None:
    told = _told(ranks, "parted", "enforce")
    assert "Ranks parted at collective" in told["told"]
    assert "rank 0 started all-reduce of bucket 0" in told["told"]
    assert "rank 1 started broadcast of parameters and buffers, " in told["told"]


def _own_collective(rank: int, size: int) -> str:
    """Rank 0 calls a collective itself, to which rank 1 comes only when that was noticed."""
    ddp = DDP(nn.Linear(2, 2))
    seen = io.StringIO()
    tell = hang._watch._tell_of_raw_collective

    def tell_and_go_on(*args: Any) -> None:
        with mock.patch("sys.stderr", seen):
            tell(*args)
        group_store().set("told", "")

    if rank == 1:
        _until_told()
    with (
        _patience(),
        mock.patch.object(hang, "_settings", HangWatch("observe", 1.0)),
        mock.patch.object(hang._watch, "_tell_of_raw_collective", tell_and_go_on if rank == 0 else lambda *args: None),
    ):
        dist.barrier()
    assert ddp.channel.heard is None
    return seen.getvalue()


def test_a_collective_that_the_user_called_and_that_does_not_end(ranks: Ranks) -> None:
    told = ranks(_own_collective, timeout=120)[0]
    assert "has been in torch.distributed.barrier for" in told
    assert "in _own_collective" in told
    assert "rank 1" in told
    assert "in _until_told" in told


def _one_of_four(rank: int, size: int) -> str:
    """Three ranks wait for one, and ask where the others are at the same time."""
    ddp = DDP(nn.Linear(4, 2))
    # Longer than one of the three may be late.
    _start_watching(ddp, HangWatch("enforce", 3.0))
    if rank == 2:
        _get_stuck("loader", ddp)
        return ""
    _until_stuck()
    try:
        with _patience():
            ddp(torch.ones(1, 4)).sum().backward()
    except RankLostError as error:
        if group_store().add("done", 1) == size - 1:
            group_store().set("told", "")
        # The others may be about to ask this one: it is there until they have been told.
        _until_told()
        return f"{error} ({error.rank})"
    return ""


def test_ranks_that_ask_at_the_same_time_are_all_answered(ranks: Ranks) -> None:
    told = ranks(_one_of_four, world_size=4, timeout=120, clean_s=1)
    for rank in (0, 1, 3):
        assert "Rank 2 has not started all-reduce of bucket 0" in told[rank]
        assert "it is in data loading at " in told[rank]
        assert told[rank].endswith("(2)")
        assert "interpreter lock" not in told[rank]


def test_of_the_ranks_in_a_collective_of_the_users_the_lowest_tells() -> None:
    ring = {4: "all-reduce of bucket 2"}
    positions = {
        0: Whereabouts(5, 1, activity="data loading", recent=ring),
        1: Whereabouts(5, 1, activity=OWN_COLLECTIVE, recent=ring),
        2: Whereabouts(5, 1, activity=OWN_COLLECTIVE, recent=ring),
        3: None,
    }
    told = []
    for rank in (1, 2):
        inquiries = Inquiries(mock.Mock(), mock.Mock(), mock.Mock(), rank=rank, size=4, directory=None)
        with mock.patch.object(inquiries, "ask", return_value=positions):
            told.append(inquiries.report_own_collective(lambda: None))
    assert "rank 0: collective 5; is in data loading" in told[0].lines
    assert told[1] is None


def test_calls_that_follow_each_other_are_not_one_that_lasts() -> None:
    watch = hang._Watch()
    told: list[str] = []

    def call(n_looks: int) -> None:
        for _ in range(n_looks):
            watch._look_at_threads()

    with (
        mock.patch.object(hang, "_settings", HangWatch("observe", 1e-9)),
        mock.patch.object(hang, "collective_frame", lambda frame: frame.f_back),
        mock.patch.object(watch, "_tell_of_raw_collective", lambda frame, _: told.append(frame.f_code.co_name)),
    ):
        for _ in range(50):
            call(1)
        assert told == []
        call(3)
        assert told == ["call"]


def _end_well(rank: int, size: int) -> Path:
    ddp = DDP(nn.Linear(2, 2))
    assert ddp.channel.progress.path.exists()
    dist.barrier()
    # The watch may be looking at the channel, which is not freed before the watch has let go of it.
    assert threads.end_all() == []
    return _directory(ddp.channel)


def test_ranks_that_end_well_leave_no_files(ranks: Ranks) -> None:
    for path in ranks(_end_well):
        assert [file.name for file in path.iterdir() if not file.name.startswith("stacks")] == []


@on_ranks()
def test_off_means_no_files(rank: int, size: int) -> None:
    with mock.patch.object(hang, "_settings", HangWatch("off")):
        ddp = DDP(nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.channel.progress.path is None
