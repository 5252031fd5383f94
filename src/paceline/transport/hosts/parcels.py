"""Pieces from each rank to each, across hosts: gather, scatter and all_to_all.

What stays in a host goes from rank to rank. The rest goes to the leader, in one bundle with what is for the leader
itself. Leaders exchange one bundle for each pair of hosts, and hand out what came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import DisagreementError
from paceline.transport.hosts.leaders import Leaders
from paceline.transport.hosts.limits import Limits
from paceline.transport.shm.codes import Kind
from paceline.transport.shm.one_host import OneHost

Route = Sequence[Sequence[int]]
"""The number of bytes from each rank to each other, by source and destination. It is the same on all ranks."""


def check_route(table: Tensor, names: Sequence[int], what: str) -> Route:
    """The route of an exchange. A row of ``table`` is a rank's: bytes to each, bytes from each, and its dtype."""
    size = len(names)
    sent, expected, dtypes = table[:, :size], table[:, size : 2 * size].t(), table[:, -1].tolist()
    if (sent < 0).any():
        source = int((sent < 0).any(dim=1).nonzero()[0])
        raise DisagreementError(f"{what}: rank {names[source]} says that it sends less than nothing")
    for source, destination in (sent != expected).nonzero().tolist():
        raise DisagreementError(
            f"{what}: rank {names[source]} sends {sent[source, destination]} bytes to rank {names[destination]}, "
            f"which expects {expected[source, destination]}"
        )
    busy = [rank for rank in range(size) if sent[rank].any() or expected[:, rank].any()]
    for rank in busy:
        if dtypes[rank] != dtypes[busy[0]]:
            raise DisagreementError(f"{what}: the tensors of ranks {names[busy[0]]} and {names[rank]} differ in dtype")
    return sent.tolist()


class Parcels:
    """One exchange, as rank ``rank`` of ``hosts[mine]`` takes part in it. Pieces are bytes, one for each rank."""

    def __init__(
        self,
        inside: OneHost,
        leaders: Leaders | None,
        *,
        hosts: Sequence[Sequence[int]],
        mine: int,
        rank: int,
        route: Route,
        kind: Kind,
        limits: Limits,
    ) -> None:
        self._inside = inside
        self._leaders = leaders
        self._hosts = hosts
        self._mine = mine
        self._local = hosts[mine]
        self._remote = sorted(rank for ranks in hosts for rank in ranks if rank not in self._local)
        self._rank = rank
        self._route = route
        self._kind = kind
        self._limits = limits

    def run(self, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> None:
        """Send ``sends[d]`` to each rank ``d``, receive ``recvs[s]`` from each rank ``s``."""
        due = self._lead(self._inside_host(sends, recvs))
        came = torch.empty(sum(self._route[source][self._rank] for source in self._remote), dtype=torch.uint8)
        nothing = came.new_empty(0)
        handed = [came] + [nothing] * (len(self._local) - 1)
        self._inside.exchange(due, handed, self._limits.after, kind=self._kind).wait()
        pieces = came.split([self._route[source][self._rank] for source in self._remote])
        for source, piece in zip(self._remote, pieces, strict=True):
            recvs[source].copy_(piece)

    def _inside_host(self, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> dict[int, dict[int, Tensor]]:
        """Exchange what stays in the host. On the leader, return what leaves it, by source and destination."""
        leader = self._local[0]
        bundle = torch.cat([sends[leader], *(sends[rank] for rank in self._remote)])
        here = [bundle, *(sends[rank] for rank in self._local[1:])]
        if self._leaders is None:
            came = [recvs[rank] for rank in self._local]
            self._inside.exchange(here, came, self._limits.inside, kind=self._kind).wait()
            return {}
        goals = [leader, *self._remote]
        nbytes = [[self._route[source][goal] for goal in goals] for source in self._local]
        came = [torch.empty(sum(sizes), dtype=torch.uint8) for sizes in nbytes]
        self._inside.exchange(here, came, self._limits.inside, kind=self._kind).wait()
        leaving = {}
        for source, found, sizes in zip(self._local, came, nbytes, strict=True):
            own, *pieces = found.split(sizes)
            recvs[source].copy_(own)
            leaving[source] = dict(zip(self._remote, pieces, strict=True))
        return leaving

    def _lead(self, leaving: dict[int, dict[int, Tensor]]) -> list[Tensor]:
        """Exchange with the other hosts. On the leader, return what is due to each rank of this host, by source."""
        nothing = torch.empty(0, dtype=torch.uint8)
        if self._leaders is None:
            return [nothing] * len(self._local)
        others = [[] if host == self._mine else ranks for host, ranks in enumerate(self._hosts)]
        sends = [torch.cat([nothing, *(leaving[s][d] for s in self._local for d in ranks)]) for ranks in others]
        sizes = [[self._route[s][d] for s in ranks for d in self._local] for ranks in others]
        found = self._leaders.exchange(sends, [sum(nbytes) for nbytes in sizes], timeout_s=self._limits.between_s)
        came: dict[tuple[int, int], Tensor] = {}
        for ranks, bundle, nbytes in zip(others, found, sizes, strict=True):
            routes = [(s, d) for s in ranks for d in self._local]
            came.update(zip(routes, bundle.split(nbytes), strict=True))
        return [torch.cat([nothing, *(came[s, d] for s in self._remote)]) for d in self._local]
