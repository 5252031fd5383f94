"""Collectives that compute: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from ..conformance import case
from ..inputs import (
    GLOO_DTYPES,
    GLOO_INTEGERS,
    HUGE,
    OPS,
    OTHER_INTEGERS,
    SIZES,
    defined,
    every,
    is_rounded,
    reduce_op,
    reduced,
    same,
    values,
)


def _sizes(op: str) -> tuple[int, ...]:
    # Large sizes differ from small ones in the path, not in the arithmetic: for one operation they are enough.
    return SIZES if op == "SUM" else (7, 1023)


def _check_all_reduce(rank: int, world_size: int, dtype: torch.dtype, op: str, count: int) -> None:
    inputs = every(count, dtype, world_size, op=op)
    mine = inputs[rank].clone()
    dist.all_reduce(mine, reduce_op(op))
    same(mine, reduced(op, inputs), "all_reduce", dtype, op, count, rounded=is_rounded(op, world_size))


def _all_reduce(rank: int, world_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype, op in defined(dtypes):
        for count in _sizes(op):
            _check_all_reduce(rank, world_size, dtype, op, count)


@case(2, 3)
def all_reduce(rank, world_size):
    _all_reduce(rank, world_size, GLOO_DTYPES)


@case(2, 4, shm_only="gloo refuses these dtypes")
def all_reduce_other_integers(rank, world_size):
    _all_reduce(rank, world_size, OTHER_INTEGERS)


@case(16)
def all_reduce_many_ranks(rank, world_size):
    for dtype, op, count in (
        (torch.float32, "SUM", 1),
        (torch.float32, "SUM", 1024),
        (torch.float32, "AVG", 70_001),
        (torch.bfloat16, "MAX", 1023),
        (torch.int64, "SUM", 40_001),
    ):
        _check_all_reduce(rank, world_size, dtype, op, count)


@case(2, 4)
def all_reduce_several_megabytes(rank, world_size):
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        _check_all_reduce(rank, world_size, dtype, "SUM", HUGE)


@case()
def all_reduce_extremes(rank, world_size):
    """Infinities, not-a-number and signed zeros travel as IEEE arithmetic has it; integers wrap."""
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        mine = torch.tensor([[inf, inf, nan, -0.0], [1.0, -inf, 1.0, -0.0]][rank % 2], dtype=dtype)
        dist.all_reduce(mine)
        assert mine[0] == inf
        assert mine[1].isnan()
        assert mine[2].isnan()
        assert mine[3] == 0
        assert mine[3].signbit(), f"{dtype}: -0 + -0 is -0"
    biggest = torch.tensor([127], dtype=torch.int8)
    dist.all_reduce(biggest)
    assert biggest.item() == -2
    halves = torch.tensor([60_000.0], dtype=torch.float16)
    dist.all_reduce(halves)
    assert halves.item() == inf


@case(2, 3)
def reduce(rank, world_size):
    for root, (dtype, op) in itertools.product(range(world_size), defined(GLOO_DTYPES)):
        for count in (0, 1, 1023) if op != "SUM" or root else SIZES:
            inputs = every(count, dtype, world_size, op=op)
            mine = inputs[rank].clone()
            dist.reduce(mine, root, reduce_op(op))
            # What the others' tensors hold afterwards is not defined; gloo uses them as scratch.
            if rank == root:
                rounded = is_rounded(op, world_size)
                same(mine, reduced(op, inputs), "reduce", dtype, op, count, "root", root, rounded=rounded)


def _pieces(count: int, dtype: torch.dtype, *, rank: int, world_size: int, op: str) -> list[torch.Tensor]:
    return [values(count, dtype, rank=rank, seed=to, op=op) for to in range(world_size)]


@case(2, 3)
def reduce_scatter(rank, world_size):
    rounded = {op: is_rounded(op, world_size) for op in OPS}
    for dtype, op in defined(GLOO_DTYPES):
        for count in _sizes(op)[:6]:
            want = reduced(op, every(count, dtype, world_size, seed=rank, op=op))
            pieces = _pieces(count, dtype, rank=rank, world_size=world_size, op=op)
            out = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter(out, [piece.clone() for piece in pieces], reduce_op(op))
            same(out, want, "reduce_scatter", dtype, op, count, rounded=rounded[op])
            out = torch.zeros(count, dtype=dtype)
            whole = torch.cat(pieces)
            dist.reduce_scatter_single(out, whole, reduce_op(op))
            same(out, want, "reduce_scatter_single", dtype, op, count, rounded=rounded[op])
            same(whole, torch.cat(pieces), "the input of reduce_scatter_single", dtype, op, count)


@case(2, 3)
def reduce_scatter_several_megabytes(rank, world_size):
    want = reduced("SUM", every(HUGE // 4, torch.float32, world_size, seed=rank))
    out = torch.zeros(HUGE // 4)
    pieces = _pieces(HUGE // 4, torch.float32, rank=rank, world_size=world_size, op="SUM")
    dist.reduce_scatter_single(out, torch.cat(pieces))
    same(out, want, "reduce_scatter_single", HUGE // 4)


@case()
def reduce_scatter_shapes(rank, world_size):
    """Rows of a matrix; the old name of the call."""
    whole = values(24, torch.float32, rank=rank).view(4, 6)
    out = torch.zeros(2, 6)
    dist.reduce_scatter_single(out, whole)
    want = reduced("SUM", [t.view(4, 6)[2 * rank : 2 * rank + 2] for t in every(24, torch.float32, world_size)])
    same(out, want, "reduce_scatter_single of a matrix")


@case(2, 4, shm_only="gloo wants pieces of one size")
def reduce_scatter_uneven(rank, world_size):
    """Pieces whose sizes differ, and some that are empty."""
    for base in (0, 3, 40_000, 900_000):
        counts = [0 if to % 3 == 2 else base + 5 * to for to in range(world_size)]
        out = torch.zeros(counts[rank])
        pieces = [values(count, torch.float32, rank=rank, seed=to) for to, count in enumerate(counts)]
        dist.reduce_scatter(out, pieces)
        same(out, reduced("SUM", every(counts[rank], torch.float32, world_size, seed=rank)), "uneven", base)


@case(3, shm_only="gloo refuses these dtypes")
def reduce_scatter_other_integers(rank, world_size):
    for dtype in OTHER_INTEGERS:
        for op in ("SUM", "MAX", "BXOR"):
            want = reduced(op, every(1023, dtype, world_size, seed=rank, op=op))
            out = torch.zeros(1023, dtype=dtype)
            dist.reduce_scatter_single(
                out, torch.cat(_pieces(1023, dtype, rank=rank, world_size=world_size, op=op)), reduce_op(op)
            )
            same(out, want, "reduce_scatter_single", dtype, op)


def _means(rank: int, world_size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """They are rounded toward zero, also where the sum is negative."""
    for dtype in dtypes:
        inputs = every(1023, dtype, world_size)
        want = reduced("AVG", inputs)
        assert want.dtype == dtype
        assert not torch.equal(want.long() * world_size, reduced("SUM", inputs).long()), "nothing is rounded"
        mine = inputs[rank].clone()
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        same(mine, want, "all_reduce", dtype)
        mine = inputs[rank].clone()
        dist.reduce(mine, 0, dist.ReduceOp.AVG)
        if rank == 0:
            same(mine, want, "reduce", dtype)
        out = torch.zeros(1023, dtype=dtype)
        dist.reduce_scatter(out, _pieces(1023, dtype, rank=rank, world_size=world_size, op="AVG"), dist.ReduceOp.AVG)
        same(out, reduced("AVG", every(1023, dtype, world_size, seed=rank)), "reduce_scatter", dtype)


@case(2, 3, shm_only="gloo has no mean of integers")
def means_of_integers(rank, world_size):
    _means(rank, world_size, GLOO_INTEGERS)


@case(2, 3, shm_only="gloo refuses these dtypes")
def means_of_other_integers(rank, world_size):
    _means(rank, world_size, OTHER_INTEGERS)
