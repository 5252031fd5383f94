"""Tensors that are not one contiguous run of memory, and shapes that are not vectors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.errors import BadCollectiveError, DisagreementError

from ..conformance import case
from ..inputs import every, reduced, same, values

ROWS, COLUMNS = 37, 53


def _transposed(rank: int, seed: int = 0) -> torch.Tensor:
    return values(ROWS * COLUMNS, torch.float32, rank=rank, seed=seed).view(ROWS, COLUMNS).t().contiguous().t()


def _all(world_size: int, seed: int = 0) -> list[torch.Tensor]:
    return [t.view(ROWS, COLUMNS) for t in every(ROWS * COLUMNS, torch.float32, world_size, seed=seed)]


@case(2, 4)
def transposed_in_place(rank, world_size):
    mine = _transposed(rank)
    assert not mine.is_contiguous()
    dist.all_reduce(mine)
    same(mine, reduced("SUM", _all(world_size)), "all_reduce")
    mine = _transposed(rank)
    dist.broadcast(mine, 1)
    same(mine, _all(world_size)[1], "broadcast")
    mine = _transposed(rank)
    dist.reduce(mine, 1)
    if rank == 1:
        same(mine, reduced("SUM", _all(world_size)), "reduce")


@case()
def strided_lists(rank, world_size):
    """Columns of a matrix as inputs and outputs; what lies between them is untouched."""
    mine = values(5, torch.float32, rank=rank)
    grid = torch.full((5, 2 * world_size), -9.0)
    columns = [grid[:, 2 * index] for index in range(world_size)]
    dist.all_gather(columns, mine)
    for index, want in enumerate(every(5, torch.float32, world_size)):
        same(grid[:, 2 * index], want, "all_gather", index)
        same(grid[:, 2 * index + 1], torch.full((5,), -9.0), "between", index)


@case()
def strided_single(rank, world_size):
    source = torch.stack([values(6, torch.float32, rank=rank), torch.zeros(6)], dim=1)
    out = torch.full((12, 2), -9.0)
    dist.all_gather_single(out[:, 0], source[:, 0])
    same(out[:, 0], torch.cat(every(6, torch.float32, world_size)), "all_gather_single")
    same(out[:, 1], torch.full((12,), -9.0), "beside the output")
    out = torch.full((3, 2), -9.0)
    dist.reduce_scatter_single(out[:, 0], source[:, 0])
    want = reduced("SUM", every(6, torch.float32, world_size))[3 * rank : 3 * rank + 3]
    same(out[:, 0], want, "reduce_scatter_single")
    same(out[:, 1], torch.full((3,), -9.0), "beside the output")


def _column(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    grid = values(4 * 7, torch.float32, rank=rank).view(4, 7)
    return grid, grid[:, 1]


@case(2, shm_only="gloo takes the neighbours in memory for the elements of the column")
def strided_in_place(rank, world_size):
    grids = [_column(r)[0] for r in range(world_size)]

    def check(grid: torch.Tensor, column: torch.Tensor, what: str) -> None:
        want = grids[rank].clone()
        want[:, 1] = column
        same(grid, want, what)

    grid, column = _column(rank)
    dist.all_reduce(column)
    check(grid, reduced("SUM", [g[:, 1] for g in grids]), "all_reduce")
    grid, column = _column(rank)
    dist.broadcast(column, 1)
    check(grid, grids[1][:, 1], "broadcast")
    grid, column = _column(rank)
    dist.reduce(column, 1)
    if rank == 1:
        check(grid, reduced("SUM", [g[:, 1] for g in grids]), "reduce")
    grid, column = _column(rank)
    work = dist.all_reduce(column, async_op=True)
    work.wait()
    check(grid, reduced("SUM", [g[:, 1] for g in grids]), "asynchronous all_reduce")


@case(2, shm_only="gloo takes the neighbours in memory for the elements of the column")
def strided_lists_of_others(rank, world_size):
    source = torch.stack([values(5, torch.float32, rank=rank, seed=to) for to in range(world_size)], dim=1)
    outer = torch.full((5, 2), -9.0)
    pieces = [source[:, to] for to in range(world_size)]
    dist.reduce_scatter(outer[:, 0], pieces)
    same(outer[:, 0], reduced("SUM", every(5, torch.float32, world_size, seed=rank)), "reduce_scatter")
    same(outer[:, 1], torch.full((5,), -9.0), "beside the output of reduce_scatter")

    outer = torch.full((5, 2), -9.0)
    dist.scatter(outer[:, 0], pieces if rank == 0 else None, src=0)
    same(outer[:, 0], values(5, torch.float32, rank=0, seed=rank), "scatter")
    same(outer[:, 1], torch.full((5,), -9.0), "beside the output of scatter")

    grid = torch.full((5, 2 * world_size), -9.0)
    outs = [grid[:, 2 * index] for index in range(world_size)] if rank == 0 else None
    dist.gather(source[:, 0], outs)
    if rank == 0:
        for index in range(world_size):
            same(grid[:, 2 * index], values(5, torch.float32, rank=index), "gather", index)
            same(grid[:, 2 * index + 1], torch.full((5,), -9.0), "between", index)

    grid = torch.full((5, 2 * world_size), -9.0)
    dist.all_to_all([grid[:, 2 * f] for f in range(world_size)], pieces)
    for f in range(world_size):
        same(grid[:, 2 * f], values(5, torch.float32, rank=f, seed=rank), "all_to_all", f)
        same(grid[:, 2 * f + 1], torch.full((5,), -9.0), "between", f)

    # gloo refuses this one.
    flat = values(6, torch.float32, rank=rank)
    outer = torch.full((6, 2), -9.0)
    dist.all_to_all_single(outer[:, 0], torch.stack([flat, flat], dim=1)[:, 1])
    same(outer[:, 0], torch.cat([values(6, torch.float32, rank=f).chunk(2)[rank] for f in range(2)]), "single")
    same(outer[:, 1], torch.full((6,), -9.0), "beside the output of all_to_all_single")


@case()
def no_dimensions(rank, world_size):
    number = torch.tensor(float(rank + 1))
    dist.all_reduce(number)
    assert number.item() == sum(range(1, world_size + 1))
    outs = [torch.tensor(0.0) for _ in range(world_size)]
    dist.all_gather(outs, torch.tensor(float(rank)))
    assert [out.item() for out in outs] == [0.0, 1.0]
    number = torch.tensor(float(rank))
    dist.broadcast(number, 1)
    assert number.item() == 1.0


@case()
def offset_views(rank, world_size):
    """A slice that starts in the middle of a storage, at an odd address."""
    for dtype in (torch.uint8, torch.float16, torch.float32):
        storage = torch.zeros(1001, dtype=dtype)
        mine = storage[3:-3]
        mine.copy_(values(995, dtype, rank=rank))
        dist.all_reduce(mine)
        same(mine, reduced("SUM", every(995, dtype, world_size)), "all_reduce", dtype)
        assert not storage[:3].any()
        assert not storage[-3:].any()


@case()
def sparse(rank, world_size):
    """gloo adds sparse tensors; a group without that would break sparse embeddings of torch's DDP."""
    rows = torch.tensor([[rank, 3]])
    mine = torch.sparse_coo_tensor(rows, torch.full((2, 4), rank + 1.0), (5, 4), check_invariants=True).coalesce()
    dist.all_reduce(mine)
    want = torch.zeros(5, 4)
    want[0], want[1], want[3] = 1.0, 2.0, 3.0
    same(mine.to_dense(), want, "sparse all_reduce")


@case(2, 4, shm_only="gloo leaves complex ones as they are, in silence")
def sparse_complex(rank, world_size):
    """dist.all_reduce hands on a view as real numbers, whose rows are not those of the tensor it was made of."""
    values = torch.tensor([1 + 2j, 3 + 4j])
    mine = torch.sparse_coo_tensor([[0, 1 + rank]], (rank + 1) * values, (1 + world_size,), check_invariants=True)
    dist.all_reduce(mine)
    want = torch.zeros(1 + world_size, dtype=mine.dtype)
    for other in range(world_size):
        want[0] += (other + 1) * values[0]
        want[1 + other] = (other + 1) * values[1]
    same(mine.to_dense(), want, "complex sparse all_reduce")
    # A view of its base is refused as well.
    with pytest.raises(BadCollectiveError, match="pass a clone"):
        dist.all_reduce(mine[None].transpose(0, 1))


@case()
def sparse_views_of_complex(rank, world_size):
    """Callers who make the view by hand find the sum in it."""
    mine = torch.sparse_coo_tensor([[0, 1], [1, rank]], [1 + 2j, 3j], (2, 2), check_invariants=True).coalesce()
    want = torch.view_as_real(torch.tensor([[0, 2 + 4j], [3j, 3j]]))
    pairs, real = torch.view_as_real(mine.clone()), mine.clone().real
    dist.all_reduce(pairs)
    same(pairs.to_dense(), want, "a view as real numbers")
    dist.all_reduce(real)
    same(real.to_dense(), want[..., 0], "the real part")


@case(2, 4, shm_only="gloo does not add sparse bfloat16")
def sparse_asynchronous(rank, world_size):
    """Which rows there are differs between ranks; a rank that is early does not wait for that in the call."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8):
        rows = torch.arange(3 * rank)[None]
        mine = torch.sparse_coo_tensor(rows, torch.ones(3 * rank, 5), (9, 5), check_invariants=True).to(dtype)
        mine, dense = mine.coalesce(), values(7, torch.float32, rank=rank)
        if rank != 0:
            dist.recv(torch.zeros(1), 0)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (mine, dense)]
        if rank == 0:
            # Only now do the others come.
            for other in range(1, world_size):
                dist.send(torch.ones(1), other)
        for work in works:
            work.wait()
        want = torch.zeros(9, 5)
        for other in range(world_size):
            want[: 3 * other] += 1
        same(mine.to_dense(), want.to(dtype), "asynchronous sparse all_reduce", dtype)
        same(dense, reduced("SUM", every(7, torch.float32, world_size)), "the one behind it")


@case(2, 4, shm_only="gloo says so in other words")
def sparse_shapes_that_differ(rank, world_size):
    """Of one size in bytes, and not to be added."""
    mine = torch.sparse_coo_tensor([[0]], [1.0], (3 + rank,), check_invariants=True).coalesce()
    with pytest.raises(DisagreementError, match=r"ranks .* differ in shape"):
        dist.all_reduce(mine)


@case()
def requires_grad(rank, world_size):
    """Leaves that require a gradient are read and written as any other tensor."""
    mine = values(7, torch.float32, rank=rank).requires_grad_()
    with torch.no_grad():
        dist.all_reduce(mine)
    same(mine.detach(), reduced("SUM", every(7, torch.float32, world_size)), "all_reduce")
    mine = values(7, torch.float32, rank=rank).requires_grad_()
    outs = [torch.zeros(7) for _ in range(world_size)]
    dist.all_gather(outs, mine)
    same(torch.cat(outs), torch.cat(every(7, torch.float32, world_size)), "all_gather")
