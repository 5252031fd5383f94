"""Sums of sparse tensors where the backend has none: the same as where it has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.control import Channel
from paceline.reduction.exchange import Exchange


def _sparse(rows, shape, sparse_dim, rank):
    """``rows`` (with repetitions, perhaps) of a tensor of ``shape``, filled with numbers of the rank's own."""
    index = torch.tensor(rows, dtype=torch.long).view(len(rows), sparse_dim).t()
    generator = torch.Generator().manual_seed(rank + 1)
    values = torch.randint(1, 100, (len(rows), *shape[sparse_dim:]), generator=generator).double()
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True).coalesce()


def _sums(rank, world_size, rows_of_rank, shape, sparse_dim):
    tensor = _sparse(rows_of_rank[rank], shape, sparse_dim, rank)
    before = tensor.to_dense()
    delivered = []
    exchange = Exchange(dist.group.WORLD, Channel(dist.group.WORLD))
    finish = exchange.gather_sparse(tensor, "a table", delivered.append)
    assert not delivered
    finish()
    (got,) = delivered
    assert torch.equal(tensor.to_dense(), before)
    want = tensor.clone()
    dist.all_reduce(want)
    assert got.is_coalesced()
    assert got.shape == want.shape
    assert got.sparse_dim() == sparse_dim
    assert torch.equal(got.indices(), want.coalesce().indices())
    assert torch.equal(got.to_dense(), want.to_dense())


@pytest.mark.parametrize(
    ("rows_of_rank", "shape", "sparse_dim"),
    [
        ([[0, 3, 3], [3, 5]], (6, 4), 1),
        ([[1, 2], [4, 0]], (6, 4), 1),
        ([[5], [0, 1, 2, 3, 4, 5]], (6, 4), 1),
        ([[0], []], (6, 4), 1),
        ([[], []], (6, 4), 1),
        ([[(0, 1), (2, 2)], [(2, 2), (0, 0), (1, 1)]], (3, 3), 2),
        ([[0, 1], [1], [2, 1, 0]], (3, 2), 1),
    ],
    ids=["overlapping", "apart", "uneven", "one has none", "none", "every dimension sparse", "three ranks"],
)
def test_sums_of_sparse_tensors(ranks, rows_of_rank, shape, sparse_dim):
    ranks(_sums, rows_of_rank, shape, sparse_dim, world_size=len(rows_of_rank))
