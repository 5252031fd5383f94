"""What ranks of a group that spans hosts tell each other: over gloo, on one host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from paceline import _torch
from paceline.transport.hosts.peer_reports import PeerReports, Report

Ranks = Callable[..., list[Any]]
NAMES = [7, 8, 9]


def _reports(rank: int, size: int) -> PeerReports:
    store = dist.PrefixStore("reports", _torch.group_store(dist.group.WORLD))
    gloo = _torch.new_gloo(store, rank=rank, size=size, timeout=timedelta(seconds=60))
    return PeerReports(gloo, rank=rank, names=[10 * rank for rank in range(size)])


def _tell(rank: int, size: int, report: Report) -> Report | None:
    reports = _reports(rank, size)
    found = None
    if rank == 1:
        reports.tell(report)
    else:
        found = reports.find(30)
    # The others have heard it before this rank leaves.
    dist.barrier()
    reports.close()
    return found


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f6b4", "\ud800"])
def test_a_report_of_any_characters_reaches_the_others(ranks: Ranks, letter: str) -> None:
    told = Report(rank=10, why="failed", said=letter * 1000)
    shown = letter if letter != "\ud800" else "\\ud800"
    found, *_, same = ranks(_tell, told, world_size=3)
    assert found == same
    # It is whole, or cut between two characters where its row is full.
    n_characters, rest = divmod(len(found.said), len(shown))
    assert (found.rank, found.why, found.said, rest) == (10, "failed", shown * n_characters, 0)
    row_is_full = len(shown.encode()) * (n_characters + 1) > 3900
    assert n_characters == 1000 or row_is_full


def _leave(rank: int, size: int, is_listening: bool) -> Report | None:
    """Rank 1 leaves, and its threads end though rank 0 has not left yet."""
    reports = _reports(rank, size)
    found = reports.find(0) if rank == 1 or is_listening else None
    dist.barrier()
    if rank == 1:
        (thread,) = reports._listeners
        reports.close()
        thread.join(60)
        assert not thread.is_alive()
    dist.barrier()
    if rank == 0:
        # That a rank has left does not end the wait, as another may have a better reason. So this asks again.
        while (heard := reports.find(0.01)) is None:
            pass
        assert heard == Report(rank=10, why="lost", said="rank 10 closed the group")
        reports.close()
    return found


@pytest.mark.parametrize("is_listening", [True, False])
def test_the_threads_of_a_rank_that_leaves_end_before_the_others_leave(ranks: Ranks, is_listening: bool) -> None:
    assert ranks(_leave, is_listening) == [None, None]


def _hand_on(rank: int, size: int) -> Report | None:
    """Rank 2 leaves. Rank 0 gives up because of it, and tells rank 1, which waits for anybody."""
    reports = _reports(rank, size)
    alerted = threading.Event()
    reports.alert(alerted.set)
    if rank == 2:
        reports.close()
    dist.barrier()
    if rank == 0:
        while (found := reports.find(0.01)) is None:
            pass
        reports.tell(found)
    heard = reports.find(60) if rank == 1 and alerted.wait(60) else None
    dist.barrier()
    reports.close()
    return heard


def test_that_a_rank_has_left_alerts_others_once_somebody_needs_it(ranks: Ranks) -> None:
    told = Report(rank=20, why="lost", said="rank 20 closed the group")
    assert ranks(_hand_on, world_size=3) == [None, told, None]


def test_what_cannot_be_understood_is_a_failure_of_whoever_said_it() -> None:
    message = Report(rank=None, why="disagreed", said="words").encode(1)
    assert Report.decode(message, 1, NAMES) == Report(rank=None, why="disagreed", said="words")
    # Said by another rank, or damaged.
    for sender in (0, 1):
        message[30] ^= sender
        found = Report.decode(message, sender, NAMES)
        assert (found.rank, found.why) == (NAMES[sender], "failed")
    # It blames a rank that the group does not have.
    for blamed in (5, -2, 2**40):
        found = Report.decode(Report(rank=blamed, why="lost", said="words").encode(1), 1, NAMES)
        assert (found.rank, found.why) == (8, "failed")
