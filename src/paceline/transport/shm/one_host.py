"""``OneHost``: carries collectives between ranks that share memory, by handing the kernel their tensors' addresses.

It is one of the two carriers (``c10d/carrier.py`` says what each verb does). The other one, for groups that span hosts,
uses it inside each host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.transport.shm.arena import Arenas
from paceline.transport.shm.codes import DTYPES, Kind, Op
from paceline.transport.shm.kernel import Endpoint, Job
from paceline.transport.shm.segment import Segment
from paceline.transport.shm.span import Span, span
from paceline.transport.shm.terms import Terms

_NOTHING = (0, 0)


class OneHost:
    """The ranks at ``endpoint``, which lives in the segment ``control``; a rank that is alone may have no segment."""

    def __init__(self, endpoint: Endpoint, control: Segment | None) -> None:
        self.endpoint = endpoint
        self.rank = endpoint.rank
        self.size = endpoint.size
        self.names: Sequence[int] = endpoint.names
        self.arenas = Arenas(endpoint)
        self.about = f"{self.size} ranks on one host, collectives through shared memory"
        # This is the endpoint's own method: a call in between would take a tenth of the time of a small all_reduce.
        self.all_reduce_here = endpoint.all_reduce_here
        self._control = control

    # -- reductions ------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Op, terms: Terms) -> Job:
        at = tensor.data_ptr()
        return self.endpoint.all_reduce(
            at,
            at,
            tensor.numel(),
            DTYPES[tensor.dtype],
            op,
            timeout_s=terms.timeout_s,
            inline=terms.inline,
            keep=tensor,
        )

    def reduce(self, tensor: Tensor, root: int, op: Op, terms: Terms) -> Job:
        counts = [0] * self.size
        counts[root] = tensor.numel()
        return self._fold([tensor] * self.size, counts, tensor, op, terms, kind=Kind.REDUCE, root=root)

    def reduce_scatter(self, output: Tensor, inputs: Iterable[Tensor], op: Op, terms: Terms) -> Job:
        pieces = list(inputs)
        counts = [piece.numel() for piece in pieces]
        return self._fold(pieces, counts, output, op, terms, kind=Kind.REDUCE_SCATTER, root=-1)

    def _fold(
        self,
        pieces: Sequence[Tensor],
        counts: Sequence[int],
        output: Tensor,
        op: Op,
        terms: Terms,
        *,
        kind: Kind,
        root: int,
    ) -> Job:
        return self.endpoint.reduce_exchange(
            [piece.data_ptr() for piece in pieces],
            counts,
            output.data_ptr(),
            dtype=DTYPES[output.dtype],
            op=op,
            kind=kind,
            root=root,
            timeout_s=terms.timeout_s,
            inline=terms.inline,
            keep=(pieces, output),
        )

    # -- exchanges -------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, terms: Terms) -> Job:
        sends = [span(tensor) if self.rank == root else _NOTHING]
        recvs = [_NOTHING] * self.size
        recvs[root] = span(tensor)
        return self._move(sends, recvs, (tensor,), terms, same=True, kind=Kind.BROADCAST, root=root)

    def all_gather(
        self, outputs: Iterable[Tensor], tensor: Tensor, terms: Terms, *, kind: Kind = Kind.ALL_GATHER
    ) -> Job:
        """If this is a part of another collective, ``kind`` is what the kernel compares and names in errors."""
        pieces = list(outputs)
        recvs = [span(piece) for piece in pieces]
        return self._move([span(tensor)], recvs, (tensor, *pieces), terms, same=True, kind=kind, root=-1)

    def exchange(
        self,
        sends: Sequence[Tensor | None],
        recvs: Sequence[Tensor | None],
        terms: Terms,
        *,
        kind: Kind,
        root: int = -1,
    ) -> Job:
        kept = [tensor for tensor in (*sends, *recvs) if tensor is not None]
        return self._move(_spans(sends), _spans(recvs), kept, terms, same=False, kind=kind, root=root)

    def gather_unequal(
        self, sent: Tensor, dtype: torch.dtype, terms: Terms, *, most_bytes: int
    ) -> tuple[Job, Callable[[], Sequence[Tensor]]]:
        job = self.endpoint.gather_unequal(
            *span(sent), kind=Kind.SPARSE_ALL_REDUCE, dtype=dtype, timeout_s=terms.timeout_s, keep=sent
        )
        return job, lambda: [_bytes_at(*job.part(rank)) for rank in range(self.size)]

    def barrier(self, terms: Terms) -> Job:
        return self.endpoint.barrier(timeout_s=terms.timeout_s, inline=terms.inline)

    def _move(
        self,
        sends: Sequence[Span],
        recvs: Sequence[Span],
        kept: Sequence[Tensor],
        terms: Terms,
        *,
        same: bool,
        kind: Kind,
        root: int,
    ) -> Job:
        return self.endpoint.exchange(
            sends,
            recvs,
            same=same,
            kind=kind,
            dtype=kept[0].dtype,
            root=root,
            timeout_s=terms.timeout_s,
            inline=terms.inline,
            keep=kept,
        )

    # -- messages --------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Job:
        return self.endpoint.send(*span(tensor), to, tag, timeout_s=timeout_s, keep=tensor)

    def recv(self, tensor: Tensor, frm: int | None, tag: int, timeout_s: float) -> Job:
        return self.endpoint.recv(*span(tensor), frm, tag, timeout_s=timeout_s, keep=tensor)

    # -- memory and the end ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, timeout_s: float, wait: Callable[[Job], None] | None) -> Tensor | None:
        return self.arenas.allocate(nbytes, timeout_s=timeout_s, wait=wait)

    def abort(self) -> None:
        self.endpoint.abort()

    def close(self) -> None:
        self.endpoint.close()
        self.arenas.close()

    def unmap(self) -> None:
        if self._control is not None:
            self._control.close()


def _spans(tensors: Sequence[Tensor | None]) -> list[Span]:
    return [_NOTHING if tensor is None else span(tensor) for tensor in tensors]


def _bytes_at(address: int, nbytes: int) -> Tensor:
    """Memory that belongs to a job, for as long as the job lives."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
