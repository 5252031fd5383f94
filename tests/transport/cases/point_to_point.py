"""send, recv, isend, irecv, any source, tags, batches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..conformance import case
from ..inputs import GLOO_DTYPES, HUGE, OTHER_INTEGERS, SIZES, in_threads, same, values

LARGE = 1_500_001


def _message(count: int, dtype: torch.dtype, *, frm: int, to: int, number: int = 0) -> torch.Tensor:
    return values(count, dtype, rank=frm, seed=10 + 100 * number + to)


@case()
def send_and_recv(rank, world_size):
    for dtype in (*GLOO_DTYPES, *OTHER_INTEGERS):
        for count in SIZES if dtype == torch.float32 else (0, 1, 1023):
            want = _message(count, dtype, frm=0, to=1)
            if rank == 0:
                dist.send(want, 1)
            else:
                got = torch.zeros(count, dtype=dtype)
                assert dist.recv(got, 0) == 0
                same(got, want, "recv", dtype, count)


@case(2, 4)
def ring(rank, world_size):
    """Everyone sends to the next before it receives from the last: more than any socket buffer holds."""
    for count in (1, 1023, HUGE):
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        got = torch.zeros(count)
        sending = dist.isend(_message(count, torch.float32, frm=rank, to=right), right)
        receiving = dist.irecv(got, left)
        receiving.wait()
        sending.wait()
        same(got, _message(count, torch.float32, frm=left, to=rank), "ring", count)


@case(2, 4)
def crossing_pairs(rank, world_size):
    """Large messages between all pairs at once, started in different orders, waited for in yet others."""
    others = [other for other in range(world_size) if other != rank]
    got = {other: torch.zeros(LARGE) for other in others}
    works = []
    for other in others if rank % 2 else reversed(others):
        if other > rank:
            works.append(dist.isend(_message(LARGE, torch.float32, frm=rank, to=other), other))
            works.append(dist.irecv(got[other], other))
        else:
            works.append(dist.irecv(got[other], other))
            works.append(dist.isend(_message(LARGE, torch.float32, frm=rank, to=other), other))
    for work in reversed(works):
        work.wait()
    for other in others:
        same(got[other], _message(LARGE, torch.float32, frm=other, to=rank), "from", other)


@case()
def tags_out_of_order(rank, world_size):
    """A message is taken by its tag, not by its turn; of one tag, in turn."""
    order = [5, 0, 3, 7, 1]
    turns = range(9, 30)
    for count in (3, 50_001):
        if rank == 0:
            tags = [*zip(order, order, strict=True), *((number, 9) for number in turns)]
            works = [dist.isend(_message(count, torch.float32, frm=0, to=1, number=n), 1, tag=tag) for n, tag in tags]
            for work in works:
                work.wait()
        else:
            for number in (*sorted(order), *turns):
                got = torch.zeros(count)
                dist.recv(got, 0, tag=min(number, 9))
                same(got, _message(count, torch.float32, frm=0, to=1, number=number), "number", number)


@case(2, 4)
def any_source(rank, world_size):
    for count in (1, 1023, 300_007):
        if rank == 0:
            seen = []
            for _ in range(world_size - 1):
                got = torch.zeros(count)
                source = dist.recv(got)
                same(got, _message(count, torch.float32, frm=source, to=0), "from", source)
                seen.append(source)
            assert sorted(seen) == list(range(1, world_size))
        else:
            dist.send(_message(count, torch.float32, frm=rank, to=0), 0)
        # The next size must not overtake: a receive from anyone takes whatever comes.
        dist.barrier()


@case(2, 4)
def any_source_by_tag(rank, world_size):
    """Tags are received in another order than sent, and several ranks send more than is under way at a time."""
    for count in (1, 50_001):
        sources = []
        for tag in (1, 2) if rank == 0 else ():
            for _ in range(1, world_size):
                got = torch.zeros(count)
                work = dist.irecv(got, tag=tag)
                work.wait()
                sources.append(work._source_rank())
                assert got.eq(10 * sources[-1] + tag).all()
        works = [dist.isend(torch.full((count,), 10.0 * rank + tag), 0, tag=tag) for tag in (2, 1) if rank]
        for work in works:
            work.wait()
        assert sorted(sources) == sorted([*range(1, world_size)] * 2 if rank == 0 else [])
        # The next size must not overtake: a receive from anyone takes whatever comes.
        dist.barrier()


@case(2, 4)
def batch(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for count in (7, 300_007):
        from_left, from_right = torch.zeros(count), torch.zeros(count)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, _message(count, torch.float32, frm=rank, to=right, number=1), right, tag=1),
                dist.P2POp(dist.irecv, from_right, right, tag=2),
                dist.P2POp(dist.isend, _message(count, torch.float32, frm=rank, to=left, number=2), left, tag=2),
                dist.P2POp(dist.irecv, from_left, left, tag=1),
            ]
        )
        for work in works:
            work.wait()
        same(from_left, _message(count, torch.float32, frm=left, to=rank, number=1), "from the left", count)
        same(from_right, _message(count, torch.float32, frm=right, to=rank, number=2), "from the right", count)


@case()
def among_collectives(rank, world_size):
    """A receive that waits for a send made after a collective does not hold the collective up."""
    got = torch.zeros(1023)
    receiving = dist.irecv(got, 1) if rank == 0 else None
    total = torch.ones(50_001)
    dist.all_reduce(total)
    assert total.eq(world_size).all()
    if rank == 1:
        dist.send(_message(1023, torch.float32, frm=1, to=0), 0)
    if receiving is not None:
        assert not receiving.is_completed() or got.any()
        receiving.wait()
        same(got, _message(1023, torch.float32, frm=1, to=0), "recv")


@case(4)
def subgroup(rank, world_size):
    """Ranks are named as the world names them, or as the group does."""
    members = [3, 1]
    group = dist.new_group(members)
    if rank in members:
        other = 4 - rank
        got = torch.zeros(11)
        sending = dist.isend(_message(11, torch.float32, frm=rank, to=other), other, group=group)
        source = dist.recv(got, other, group=group)
        sending.wait()
        assert source == other
        same(got, _message(11, torch.float32, frm=other, to=rank), "in a subgroup")
        place = dist.get_group_rank(group, other)
        sending = dist.isend(_message(5, torch.float32, frm=rank, to=other), group=group, group_dst=place)
        got = torch.zeros(5)
        dist.recv(got, group=group, group_src=place)
        sending.wait()
        same(got, _message(5, torch.float32, frm=other, to=rank), "by group rank")


@case()
def several_threads(rank, world_size):
    """Each thread has a tag; messages of one never reach another."""
    other = 1 - rank

    def talk(tag: int) -> None:
        for turn in range(20):
            count = 1 + 997 * turn
            got = torch.zeros(count)
            sending = dist.isend(_message(count, torch.float32, frm=rank, to=other, number=tag), other, tag=tag)
            dist.recv(got, other, tag=tag)
            sending.wait()
            same(got, _message(count, torch.float32, frm=other, to=rank, number=tag), "thread", tag, turn)

    in_threads(talk, 3)


@case()
def objects(rank, world_size):
    if rank == 0:
        dist.send_object_list([{"a": 1}, "two"], dst=1)
    else:
        got = [None, None]
        assert dist.recv_object_list(got, src=0) == 0
        assert got == [{"a": 1}, "two"]


@case(2, shm_only="gloo receives an empty message from a known sender only")
def nothing_from_anyone(rank, world_size):
    if rank == 0:
        dist.send(torch.zeros(0), 1)
    else:
        assert dist.recv(torch.zeros(0)) == 0


@case(2, shm_only="gloo refuses tensors that are not contiguous")
def strided(rank, world_size):
    """A column goes out and comes in as a column; what is beside it stays."""
    grid = torch.full((9, 3), -9.0)
    if rank == 0:
        grid[:, 1] = _message(9, torch.float32, frm=0, to=1)
        dist.send(grid[:, 1], 1)
        dist.isend(grid.t(), 1, tag=1).wait()
    else:
        dist.recv(grid[:, 1], 0)
        same(grid[:, 1], _message(9, torch.float32, frm=0, to=1), "column")
        assert grid[:, ::2].eq(-9.0).all()
        rows = torch.zeros(9, 3)
        dist.irecv(rows.t(), 0, tag=1).wait()
        same(rows, grid, "transposed")
