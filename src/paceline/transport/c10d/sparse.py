"""Sums of sparse tensors. Rows differ from rank to rank, so every rank gets all of them and adds them up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline import _torch
from paceline.errors import BadCollectiveError, DisagreementError
from paceline.transport.shm.codes import Op

_MAX_DIMS = 16
# These precede a rank's indices and values: the numbers of rows, sparse and dense dimensions, and the shape.
_HEAD = 3 + _MAX_DIMS
# The head, the indices and the values each begin at a multiple of the largest element size.
_GRAIN = 16


class SparseSum:
    """One sum, on rank ``rank``; errors call ranks by ``names``. Its tensor travels as one piece of bytes, ``sent``."""

    def __init__(self, tensor: Tensor, *, op: int, rank: int, names: Sequence[int]) -> None:
        if tensor.layout is not torch.sparse_coo:
            raise BadCollectiveError(f"shm all_reduce: unsupported layout {tensor.layout}")
        if op != Op.SUM:
            raise BadCollectiveError(
                "shm all_reduce: unsupported reduction operation: sparse tensors can only be summed"
            )
        # A sparse tensor takes a sum by getting other rows. A view's new rows do not show in its base: both get them.
        self._view = tensor
        tensor = _behind(tensor)
        if tensor.dim() > _MAX_DIMS:
            raise BadCollectiveError(f"shm all_reduce: sparse tensors have at most {_MAX_DIMS} dimensions here")
        self._target = tensor
        self.dtype = tensor.dtype
        self._rank = rank
        self._names = names
        self.sent = _as_bytes(tensor.detach().coalesce())
        n_places = math.prod(tensor.shape[: tensor.sparse_dim()])
        in_all = (_HEAD * 8, n_places * tensor.sparse_dim() * 8, tensor.numel() * tensor.element_size())
        self.most_bytes = sum(map(_padded, in_all))
        """How long a piece can be, since no rank sends an index twice."""

    def finish(self, pieces: Sequence[Tensor]) -> None:
        """Add up what the ranks have sent, in rank order as gloo does, and leave the sum in the tensor."""
        parts = [self._part(rank, found) for rank, found in enumerate(pieces)]
        with torch.no_grad():
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            total = total.coalesce()
            self._target.copy_(total)
            if self._view is not self._target:
                self._view.copy_(torch.view_as_real(total))

    def _part(self, rank: int, found: Tensor) -> Tensor:
        """A rank's tensor, on the memory it came in. If ranks differ, all of them raise."""
        if found.numel() < _HEAD * 8:
            raise self._damaged(rank)
        head, mine = (part[: _HEAD * 8].view(torch.int64) for part in (found, self.sent))
        if not torch.equal(head[1:], mine[1:]):
            raise DisagreementError(
                f"all_reduce: the sparse tensors of ranks {self._names[self._rank]} and {self._names[rank]} differ "
                f"in shape or sparse dimensions ({_shape(mine)} and {_shape(head)})"
            )
        rows, sparse_dim, dense_dim = head[:3].tolist()
        shape = self._target.shape
        row_bytes = math.prod(shape[sparse_dim:]) * self._target.element_size()
        sizes = (_HEAD * 8, rows * sparse_dim * 8, rows * row_bytes)
        if rows < 0 or found.numel() != sum(map(_padded, sizes)):
            raise self._damaged(rank)
        begin, nbytes = _padded(_HEAD * 8), rows * sparse_dim * 8
        indices = found[begin : begin + nbytes].view(torch.int64).view(sparse_dim, rows)
        if not are_coalesced(indices, shape):
            raise self._damaged(rank)
        begin, of_row = begin + _padded(nbytes), shape[len(shape) - dense_dim :]
        nbytes = rows * row_bytes
        values = found[begin : begin + nbytes].view(self._target.dtype).view(rows, *of_row)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)

    def _damaged(self, rank: int) -> DisagreementError:
        return DisagreementError(
            f"all_reduce: the sparse tensor that came from rank {self._names[rank]} is damaged: its rows are not "
            "those that it announces, or its indices are out of range or out of order. Look at what that rank does "
            "differently."
        )


def are_coalesced(indices: Tensor, shape: Sequence[int]) -> bool:
    """Whether each column of ``indices`` is inside ``shape`` and comes after the one before it.

    Indices that another rank has sent have to be looked at: torch does not do it where it adds sparse tensors, and
    writes wherever they say. What torch checks on request takes a hundred times longer.
    """
    if not indices.shape[1]:
        return True
    sizes = shape[: len(indices)]
    low, high = (found.tolist() for found in indices.aminmax(dim=1))
    if not all(least >= 0 and most < size for least, most, size in zip(low, high, sizes, strict=True)):
        return False
    flat = indices[0] if sizes else indices.new_zeros(indices.shape[1])
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        flat = flat * size + index
    return bool((flat[1:] > flat[:-1]).all())


def _behind(tensor: Tensor) -> Tensor:
    """The tensor that the caller has: ``dist.*`` pass a complex one on as a view of pairs of real numbers."""
    base = _torch.behind_real_view(tensor)
    if base is None:
        return tensor
    pairs = torch.view_as_real(base)
    if pairs.shape != tensor.shape or not _torch.share_indices(pairs, tensor):
        raise BadCollectiveError(
            "shm all_reduce: a view of a complex sparse tensor cannot be summed in place: pass a clone of it"
        )
    return base


def _as_bytes(tensor: Tensor) -> Tensor:
    head = torch.zeros(_HEAD, dtype=torch.int64)
    about = [tensor.values().shape[0], tensor.sparse_dim(), tensor.dense_dim(), *tensor.shape]
    head[: len(about)] = torch.tensor(about)
    return torch.cat([_flat(head), _flat(tensor.indices()), _flat(tensor.values())])


def _flat(tensor: Tensor) -> Tensor:
    plain = tensor.contiguous().resolve_conj().resolve_neg().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(plain, (0, _padded(plain.numel()) - plain.numel()))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN


def _shape(head: Tensor) -> list[int]:
    dims = int(head[1]) + int(head[2])
    return head[3 : 3 + min(max(dims, 0), _MAX_DIMS)].tolist()
