"""``Host``: the ranks of one host, as one side of a group that spans hosts. Calls return when they have ended."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.transport.codes import DTYPES, Kind, Op, Status
from paceline.transport.kernel import Channel
from paceline.transport.packing import place

_NOTHING = (0, 0)


class Host:
    """This rank's place among those of its host; rank 0 is the leader. A host of one rank has nothing to do."""

    def __init__(self, channel: Channel | None, *, size: int, rank: int) -> None:
        self._channel = channel
        self._size = size
        self.rank = rank

    def reduce(self, tensor: Tensor, *, op: Op, timeout_s: float) -> None:
        """Fold everybody's ``tensor`` into the leader's."""
        if self._channel is not None:
            counts = [tensor.numel()] + [0] * (self._size - 1)
            self._channel.reduce_exchange(
                [tensor.data_ptr()] * self._size,
                counts,
                tensor.data_ptr(),
                dtype=DTYPES[tensor.dtype],
                op=op,
                kind=Kind.REDUCE,
                root=0,
                timeout_s=timeout_s,
                inline=True,
                keep=tensor,
            ).wait()

    def broadcast(self, tensor: Tensor, *, root: int, timeout_s: float) -> None:
        """Give everybody the root's ``tensor``."""
        sends = [place(tensor) if self.rank == root else _NOTHING]
        recvs = [_NOTHING] * self._size
        recvs[root] = place(tensor)
        self._exchange(sends, recvs, tensor, same=True, kind=Kind.BROADCAST, root=root, timeout_s=timeout_s)

    def hand_over(self, tensor: Tensor, *, to: int, timeout_s: float) -> None:
        """Give rank ``to`` the leader's ``tensor``."""
        if to == 0:
            return
        sends = [_NOTHING] * self._size
        recvs = [_NOTHING] * self._size
        if self.rank == 0:
            sends[to] = place(tensor)
        if self.rank == to:
            recvs[0] = place(tensor)
        self._exchange(sends, recvs, tensor, same=False, kind=Kind.SCATTER, root=0, timeout_s=timeout_s)

    def scatter(self, part: Tensor, block: Tensor, *, timeout_s: float) -> None:
        """Give each rank its row of the leader's ``block``."""
        if self._channel is None:
            part.view(-1).copy_(block[0])
            return
        sends = [place(row) if self.rank == 0 else _NOTHING for row in block]
        recvs = [_NOTHING] * self._size
        recvs[0] = place(part)
        self._exchange(sends, recvs, part, block, same=False, kind=Kind.SCATTER, root=0, timeout_s=timeout_s)

    def all_gather(self, block: Tensor, part: Tensor, *, kind: Kind = Kind.ALL_GATHER, timeout_s: float) -> None:
        """Everybody's ``part`` into the rows of ``block``."""
        if self._channel is None:
            block[0].copy_(part)
            return
        recvs = [place(row) for row in block]
        self._exchange([place(part)], recvs, part, block, same=True, kind=kind, root=-1, timeout_s=timeout_s)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], *, kind: Kind, timeout_s: float) -> None:
        """Send ``sends[d]`` to each rank ``d``, receive ``recvs[s]`` from each rank ``s``."""
        if self._channel is None:
            recvs[0].copy_(sends[0])
            return
        places = [place(piece) for piece in sends], [place(piece) for piece in recvs]
        self._exchange(*places, *sends, *recvs, same=False, kind=kind, root=-1, timeout_s=timeout_s)

    def barrier(self, *, timeout_s: float) -> None:
        """Every rank of the host has come this far."""
        if self._channel is not None:
            self._channel.barrier(timeout_s=timeout_s, inline=True).wait()

    def give_up(self, cause: str, *, blamed: int | None, status: Status) -> None:
        """Make the others' calls fail, now and later."""
        if self._channel is not None:
            self._channel.poison(cause, blamed=blamed, status=status)

    def close(self) -> None:
        """Leave."""
        if self._channel is not None:
            self._channel.close()

    def _exchange(
        self,
        sends: list[tuple[int, int]],
        recvs: list[tuple[int, int]],
        *tensors: Tensor,
        same: bool,
        kind: Kind,
        root: int,
        timeout_s: float,
    ) -> None:
        if self._channel is not None:
            self._channel.exchange(
                sends,
                recvs,
                same=same,
                kind=kind,
                dtype=tensors[0].dtype,
                root=root,
                timeout_s=timeout_s,
                inline=True,
                keep=tensors,
            ).wait()
