"""Sums of sparse tensors: rows differ from rank to rank, so everybody gets everybody's and adds them up."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import BadCollectiveError, DisagreementError
from paceline.transport.kernel import DTYPES, Channel, Job, Kind, Op

_MAX_DIMS = 16


class SparseSum:
    """One sum: the ranks' row counts are exchanged when it is made, the rows themselves by :meth:`start`'s job."""

    def __init__(self, channel: Channel, tensor: Tensor, *, op: int, timeout_s: float) -> None:
        if tensor.layout is not torch.sparse_coo:
            raise BadCollectiveError(f"shm all_reduce: unsupported layout {tensor.layout}")
        if op != Op.SUM:
            raise BadCollectiveError(
                "shm all_reduce: unsupported reduction operation: sparse tensors can be summed only"
            )
        if tensor.dim() > _MAX_DIMS:
            raise BadCollectiveError(f"shm all_reduce: sparse tensors have at most {_MAX_DIMS} dimensions here")
        self._channel = channel
        self._target = tensor
        mine = tensor.coalesce()
        self._indices, self._values = mine.indices().contiguous(), mine.values().contiguous()
        self._rows = self._agree(mine, timeout_s=timeout_s)
        self._all_indices = [self._indices.new_empty((self._indices.shape[0], rows)) for rows in self._rows]
        self._all_values = [self._values.new_empty((rows, *self._values.shape[1:])) for rows in self._rows]

    def start(self, *, inline: bool, timeout_s: float) -> list[Job]:
        """Send the rows."""
        jobs: list[Job] = []
        for mine, everybodys in ((self._indices, self._all_indices), (self._values, self._all_values)):
            jobs.append(
                self._channel.exchange(
                    [(mine.data_ptr(), mine.nbytes)],
                    [(part.data_ptr(), part.nbytes) for part in everybodys],
                    same=True,
                    kind=Kind.ALL_GATHER,
                    timeout_s=timeout_s,
                    inline=inline,
                    keep=(mine, everybodys),
                )
            )
        return jobs

    def finish(self) -> None:
        """Add them up in rank order, as gloo does, and leave the sum in the tensor."""
        with torch.no_grad():
            total: Tensor | None = None
            for indices, values in zip(self._all_indices, self._all_values, strict=True):
                part = torch.sparse_coo_tensor(
                    indices, values, self._target.shape, check_invariants=False, is_coalesced=True
                )
                total = part if total is None else total + part
            assert total is not None, "a group has at least one rank"
            self._target.copy_(total.coalesce())

    def _agree(self, mine: Tensor, *, timeout_s: float) -> list[int]:
        """Everybody's number of rows; raises on all ranks alike if the tensors do not fit together."""
        about = torch.full((4 + _MAX_DIMS,), -1, dtype=torch.int64)
        about[0] = len(self._values)
        about[1] = mine.sparse_dim()
        about[2] = mine.dense_dim()
        about[3] = DTYPES.get(mine.dtype, -1)
        about[4 : 4 + mine.dim()] = torch.tensor(mine.shape, dtype=torch.int64)
        everybodys = about.new_empty((self._channel.size, len(about)))
        self._channel.exchange(
            [(about.data_ptr(), about.nbytes)],
            [(row.data_ptr(), row.nbytes) for row in everybodys],
            same=True,
            kind=Kind.ALL_GATHER,
            timeout_s=timeout_s,
            inline=True,
            keep=(about, everybodys),
        ).wait()
        for rank, other in enumerate(everybodys):
            if not torch.equal(other[1:], everybodys[0, 1:]):
                raise DisagreementError(
                    f"all_reduce: the sparse tensors of ranks 0 and {rank} differ in shape, sparse dimensions or dtype"
                )
        return [int(rows) for rows in everybodys[:, 0]]
