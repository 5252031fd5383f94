"""Collectives that move: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..conformance import case
from ..inputs import GLOO_DTYPES, HUGE, OTHER_INTEGERS, SIZES, SMALL_SIZES, every, same, values

FLOAT8 = torch.float8_e4m3fn


def _sizes(dtype: torch.dtype) -> tuple[int, ...]:
    return SIZES if dtype == torch.float32 else SMALL_SIZES[:4]


def _blank(count: int, dtype: torch.dtype, pieces: int) -> list[torch.Tensor]:
    return [torch.zeros(count, dtype=dtype) for _ in range(pieces)]


def _each(got: list[torch.Tensor], want: list[torch.Tensor], *what: object) -> None:
    assert len(got) == len(want)
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        same(one, other, *what, "piece", index)


@case(2, 3)
def broadcast(rank, world_size):
    for root in range(world_size):
        for dtype in GLOO_DTYPES:
            for count in _sizes(dtype):
                mine = values(count, dtype, rank=rank)
                dist.broadcast(mine, root)
                same(mine, values(count, dtype, rank=root), "broadcast", dtype, count, "from", root)


@case(2, 3)
def all_gather(rank, world_size):
    for dtype in GLOO_DTYPES:
        for count in _sizes(dtype):
            mine = values(count, dtype, rank=rank)
            want = every(count, dtype, world_size)
            outs = _blank(count, dtype, world_size)
            dist.all_gather(outs, mine)
            _each(outs, want, "all_gather", dtype, count)
            whole = torch.zeros(count * world_size, dtype=dtype)
            dist.all_gather_single(whole, mine)
            same(whole, torch.cat(want), "all_gather_single", dtype, count)


@case()
def all_gather_in_place(rank, world_size):
    """The input may be the rank's own part of the output."""
    for count in (1, 1023, 70_001):
        whole = torch.zeros(count * world_size)
        part = whole[rank * count : (rank + 1) * count]
        part.copy_(values(count, torch.float32, rank=rank))
        dist.all_gather_single(whole, part)
        same(whole, torch.cat(every(count, torch.float32, world_size)), "all_gather_single in place", count)


@case(2, 3)
def gather(rank, world_size):
    for root in range(world_size):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            for count in _sizes(dtype) if root == 0 else SMALL_SIZES[:3]:
                outs = _blank(count, dtype, world_size) if rank == root else None
                dist.gather(values(count, dtype, rank=rank), outs, dst=root)
                if outs is not None:
                    _each(outs, every(count, dtype, world_size), "gather", dtype, count, "to", root)


@case(2, 3)
def scatter(rank, world_size):
    for root in range(world_size):
        for dtype in GLOO_DTYPES:
            for count in _sizes(dtype) if root == 0 else SMALL_SIZES[:3]:
                out = torch.zeros(count, dtype=dtype)
                dist.scatter(out, every(count, dtype, world_size) if rank == root else None, src=root)
                same(out, values(count, dtype, rank=rank), "scatter", dtype, count, "from", root)


def _to(count: int, dtype: torch.dtype, *, frm: int, to: int) -> torch.Tensor:
    return values(count, dtype, rank=frm, seed=to + 1)


@case(2, 3)
def all_to_all(rank, world_size):
    for dtype in GLOO_DTYPES:
        for count in _sizes(dtype):
            sent = [_to(count, dtype, frm=rank, to=to) for to in range(world_size)]
            want = [_to(count, dtype, frm=frm, to=rank) for frm in range(world_size)]
            whole = torch.zeros(count * world_size, dtype=dtype)
            dist.all_to_all_single(whole, torch.cat(sent))
            same(whole, torch.cat(want), "all_to_all_single", dtype, count)
            outs = _blank(count, dtype, world_size)
            dist.all_to_all(outs, sent)
            _each(outs, want, "all_to_all", dtype, count)


@case(2, 4)
def all_to_all_with_splits(rank, world_size):
    """Rank f sends f + t rows to rank t, none at all from rank 0 to itself."""
    for width in (1, 3, 20_001):
        sent = [_to((rank + to) * width, torch.float32, frm=rank, to=to).view(-1, width) for to in range(world_size)]
        want = [_to((f + rank) * width, torch.float32, frm=f, to=rank).view(-1, width) for f in range(world_size)]
        out = torch.zeros(sum(len(piece) for piece in want), width)
        dist.all_to_all_single(
            out,
            torch.cat(sent),
            output_split_sizes=[len(piece) for piece in want],
            input_split_sizes=[len(piece) for piece in sent],
        )
        same(out, torch.cat(want), "all_to_all_single with splits", width)


@case(2)
def all_to_all_even_and_uneven_mixed(rank, world_size):
    """Splits on one side only, as FSDP and expert routing call it."""
    sent = values(4, torch.float32, rank=rank)
    out = torch.zeros(4)
    dist.all_to_all_single(out, sent, output_split_sizes=[2, 2])
    want = torch.cat([values(4, torch.float32, rank=f).chunk(2)[rank] for f in range(world_size)])
    same(out, want, "output splits only")


@case(2, 4)
def several_megabytes(rank, world_size):
    count = HUGE // 2
    mine = values(count, torch.float32, rank=rank)
    dist.broadcast(mine, 1)
    same(mine, values(count, torch.float32, rank=1), "broadcast", count)
    whole = torch.zeros(count * world_size)
    mine = values(count, torch.float32, rank=rank)
    dist.all_gather_single(whole, mine)
    same(whole, torch.cat(every(count, torch.float32, world_size)), "all_gather_single", count)
    part = count // world_size
    out = torch.zeros(part * world_size)
    dist.all_to_all_single(out, torch.cat([_to(part, torch.float32, frm=rank, to=to) for to in range(world_size)]))
    want = torch.cat([_to(part, torch.float32, frm=f, to=rank) for f in range(world_size)])
    same(out, want, "all_to_all_single", part)
    outs = _blank(count, torch.float32, world_size) if rank == 1 else None
    dist.gather(mine, outs, dst=1)
    if outs is not None:
        _each(outs, every(count, torch.float32, world_size), "gather", count)
    out = torch.zeros(count)
    dist.scatter(out, every(count, torch.float32, world_size) if rank == 1 else None, src=1)
    same(out, mine, "scatter", count)


@case(2, shm_only="gloo refuses these dtypes")
def dtypes_gloo_refuses(rank, world_size):
    for dtype in (*OTHER_INTEGERS, FLOAT8, torch.complex64):
        mine = values(1023, dtype, rank=rank)
        want = every(1023, dtype, world_size)
        outs = _blank(1023, dtype, world_size)
        dist.all_gather(outs, mine)
        _each([t.view(torch.uint8) for t in outs], [t.view(torch.uint8) for t in want], "all_gather", dtype)
        outs = _blank(1023, dtype, world_size) if rank == 0 else None
        dist.gather(mine, outs)
        if outs is not None:
            _each([t.view(torch.uint8) for t in outs], [t.view(torch.uint8) for t in want], "gather", dtype)
        dist.broadcast(mine, 1)
        same(mine.view(torch.uint8), want[1].view(torch.uint8), "broadcast", dtype)


@case(2, 16)
def barrier(rank, world_size):
    """Nobody leaves before everybody has come: each rank's mark is there for all after it."""
    store = dist.PrefixStore("barrier-case", dist.distributed_c10d._get_default_store())
    for turn in range(3):
        store.add(f"turn{turn}", 1)
        if turn == 2:
            dist.barrier(async_op=True).wait()
        else:
            dist.barrier()
        assert store.add(f"turn{turn}", 0) == world_size


@case(16)
def many_ranks(rank, world_size):
    mine = values(1023, torch.float32, rank=rank)
    want = every(1023, torch.float32, world_size)
    whole = torch.zeros(1023 * world_size)
    dist.all_gather_single(whole, mine)
    same(whole, torch.cat(want), "all_gather_single")
    dist.broadcast(mine, 13)
    same(mine, want[13], "broadcast")
    out = torch.zeros(3 * world_size)
    dist.all_to_all_single(out, torch.cat([_to(3, torch.float32, frm=rank, to=to) for to in range(world_size)]))
    same(out, torch.cat([_to(3, torch.float32, frm=f, to=rank) for f in range(world_size)]), "all_to_all_single")
    out = torch.zeros(5)
    dist.scatter(out, every(5, torch.float32, world_size) if rank == 15 else None, src=15)
    same(out, values(5, torch.float32, rank=rank), "scatter")


@case(2, 4, shm_only="gloo wants pieces of one size")
def uneven_lists(rank, world_size):
    """Pieces whose sizes differ in all_to_all: torch documents that they may."""
    sent = [_to(1 + rank + 2 * to, torch.float32, frm=rank, to=to) for to in range(world_size)]
    outs = [torch.zeros(1 + source + 2 * rank) for source in range(world_size)]
    dist.all_to_all(outs, sent)
    _each(outs, [_to(1 + s + 2 * rank, torch.float32, frm=s, to=rank) for s in range(world_size)], "all_to_all")
