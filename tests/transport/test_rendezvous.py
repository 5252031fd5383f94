"""How ranks find out who shares memory: by trying, all with the same conclusion."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from paceline import transport
from paceline.control import store_thread
from paceline.errors import RankLostError
from paceline.transport import creation
from paceline.transport.hosts import rendezvous
from paceline.transport.hosts.rendezvous import meet
from paceline.transport.shm import codes, kernel, segment
from tests.transport.notices import notices
from tests.transport.requirements import needs_shm


@pytest.fixture(autouse=True)
def _kernel() -> None:
    needs_shm()


def _store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def _end(meeting: rendezvous.HostMap) -> None:
    if meeting.endpoint is not None and meeting.control is not None:
        meeting.endpoint.close()
        meeting.control.close()


def _meet_and_talk(rank, world_size):
    meeting = meet(_store("meet"), rank=rank, size=world_size)
    assert meeting.reason is None
    assert meeting.endpoint is not None
    assert meeting.control is not None
    meeting.endpoint.barrier(timeout_s=30, inline=True).wait()
    # All have mapped it, so its name is gone.
    assert not os.path.lexists(os.path.join(segment.DIRECTORY, meeting.control.name))
    _end(meeting)
    return meeting.hosts


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_of_one_host(ranks, world_size):
    assert ranks(_meet_and_talk, world_size=world_size) == [(tuple(range(world_size)),)] * world_size


def _meet_twice(rank, world_size):
    """On one store, as elastic restarts do: what was said in the first meeting must not be taken for the second's."""
    store = _store("again")
    for _ in range(2):
        meeting = meet(store, rank=rank, size=world_size)
        assert meeting.reason is None
        # Such are the addresses of a backend between hosts.
        assert not meeting.store.check([f"address/{rank}"])
        meeting.store.set(f"address/{rank}", "here")
        meeting.endpoint.barrier(timeout_s=30, inline=True).wait()
        _end(meeting)


def test_a_store_may_be_used_again(ranks):
    ranks(_meet_twice)


def _meet_on_hosts(rank, world_size, host_of_rank, directories):
    segment.DIRECTORY = directories[host_of_rank[rank]]
    try:
        meeting = meet(_store("hosts"), rank=rank, size=world_size)
        assert meeting.reason is None
        if meeting.endpoint is not None:
            meeting.endpoint.barrier(timeout_s=30, inline=True).wait()
        _end(meeting)
        return meeting.hosts, meeting.endpoint is not None
    finally:
        segment.DIRECTORY = "/dev/shm"


@pytest.mark.parametrize(
    ("host_of_rank", "hosts"),
    [
        ([0, 0, 1], ((0, 1), (2,))),
        ([0, 1, 0], ((0, 2), (1,))),
        ([0, 1, 2], ((0,), (1,), (2,))),
        ([0, 0, 1, 1], ((0, 1), (2, 3))),
        ([1, 0, 0, 1], ((0, 3), (1, 2))),
    ],
)
def test_hosts_are_those_who_see_each_others_memory(ranks, host_of_rank, hosts):
    directories = [tempfile.mkdtemp(dir=segment.DIRECTORY) for _ in range(3)]
    try:
        got = ranks(_meet_on_hosts, host_of_rank, directories, world_size=len(host_of_rank))
        for rank, (found, has_endpoint) in enumerate(got):
            assert found == hosts
            assert has_endpoint == (host_of_rank.count(host_of_rank[rank]) > 1)
        assert [os.listdir(directory) for directory in directories] == [[], [], []]
    finally:
        for directory in directories:
            shutil.rmtree(directory)


# -- what goes wrong on one rank goes for all ---------------------------------------------------------------------


def _no_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernel, "reason_unavailable", lambda: "no kernel, says the test")


def _other_version(patch: pytest.MonkeyPatch) -> None:
    assert kernel.reason_unavailable() is None  # loads it while it still fits
    patch.setattr(codes, "ABI", codes.ABI + 1)


def _no_room_for_control(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kernel, "control_nbytes", lambda size: 1 << 50)


def _cannot_map(patch: pytest.MonkeyPatch) -> None:
    def refuse(name, *, nbytes):
        if nbytes != rendezvous._PROBE_BYTES:
            raise OSError("cannot map, says the test")
        return real(name, nbytes=nbytes)

    real = segment.Segment.open
    patch.setattr(segment.Segment, "open", refuse)


def _blind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rendezvous, "_is_seen", lambda hello: False)


def _fall_back(rank, world_size, broken_rank, spoil):
    """Spoil one rank for the length of a meeting."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == broken_rank:
            spoil(patch)
        meeting = meet(_store("broken"), rank=rank, size=world_size)
    assert meeting.endpoint is None
    assert meeting.control is None
    return meeting.reason


@pytest.mark.parametrize(
    ("broken_rank", "spoil", "said"),
    [
        (1, _no_compiler, "rank 1: no kernel, says the test"),
        (1, _other_version, "rank 1 has kernel version"),
        (0, _no_room_for_control, "rank 0: /dev/shm has no room for 1,125,899,906,842,624 bytes"),
        (2, _cannot_map, "rank 2: cannot map, says the test"),
        (1, _blind, r"do not agree on whose shared memory they see .*rank 1 sees \[1\]"),
    ],
    ids=["no compiler", "other version", "no room", "cannot map", "one-sided"],
)
def test_all_ranks_do_without_for_the_same_reason(ranks, broken_rank, spoil, said):
    reasons = ranks(_fall_back, broken_rank, spoil, world_size=3)
    assert reasons[0] is not None
    assert reasons == [reasons[0]] * 3
    assert re.search(said, reasons[0])


def test_threads_of_one_process_are_refused():
    store = dist.HashStore()
    reasons = [None, None]

    def rank(number: int) -> None:
        reasons[number] = meet(store, rank=number, size=2).reason

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reasons[0] == reasons[1]
    assert "ranks 0 and 1 are threads of one process" in str(reasons[0])


class _Mute(dist.Store):
    """Takes what it is told, and does not answer questions."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def add(self, key: str, amount: int) -> int:
        return amount

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return False


def test_a_silent_store_keeps_nobody(monkeypatch):
    monkeypatch.setattr(store_thread, "ANSWER_S", 0.1)
    store = _Mute()
    with pytest.raises(RankLostError, match="could not be made: The process group's store has not answered"):
        meet(store, rank=0, size=2, timeout=timedelta(seconds=0.2))
    store.answers.set()


def _group_without_room(rank, world_size):
    groups = []
    creation._said.clear()
    with pytest.MonkeyPatch.context() as patch, notices() as said:
        # Whoever else uses the memory of this host changes how much of it is free.
        for nbytes in (1 << 50, 1 << 51):
            if rank == 0:
                patch.setattr(kernel, "control_nbytes", lambda size, nbytes=nbytes: nbytes)
            groups.append(dist.new_group(backend="cpu:shm"))
    group, again = groups
    tensor = torch.full((3,), float(rank + 1))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work.get_future().wait()[0] is not None
    dist.all_reduce(tensor, group=again)
    gathered = [None] * world_size
    dist.all_gather_object(gathered, rank, group=group)
    assert gathered == list(range(world_size))
    for _ in range(5000):
        # Nothing holds the tensor but gloo, whose threads drop it.
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    work.wait()
    return transport.describe(group), tensor.tolist(), said


def test_too_little_room_gives_one_notice_and_gloo_on_all_ranks(ranks):
    (carried, value, said), (other_carried, other_value, other_said) = ranks(_group_without_room)
    assert carried == other_carried == "2 ranks, collectives over gloo"
    assert value == other_value == [6.0] * 3
    assert other_said == []
    (notice,) = said
    assert "use gloo instead" in notice
    assert "no room for 1,125,899,906,842,624 bytes" in notice
    assert "are free" in notice
