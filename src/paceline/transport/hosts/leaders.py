"""``Leaders``: one rank of each host exchanges for all its ranks, over another backend. Each call blocks.

Each call begins with a comparison of what the hosts are about to do, in words (``what``). Backends do not compare:
where sizes differ gloo hangs or ends the process, and where dtypes do, the result is nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.control import wire
from paceline.control.tensor_line import TensorLine
from paceline.errors import DisagreementError
from paceline.transport.hosts.messages import close_connections
from paceline.transport.shm.codes import Op

_REDUCE_OPS = {
    Op.SUM: c10d.ReduceOp.SUM,
    Op.PRODUCT: c10d.ReduceOp.PRODUCT,
    Op.MIN: c10d.ReduceOp.MIN,
    Op.MAX: c10d.ReduceOp.MAX,
    Op.BAND: c10d.ReduceOp.BAND,
    Op.BOR: c10d.ReduceOp.BOR,
    Op.BXOR: c10d.ReduceOp.BXOR,
}
_FOLDS: dict[Op, Callable[..., Tensor]] = {
    Op.SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
# gloo cannot reduce the dtypes on the left. It reduces those on the right, and the bits that are kept are the same.
_STAND_IN_DTYPES = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


# The description of a collective is cut to fit into a row of the line, so that comparing takes one exchange.
_WHAT_BYTES = 128


class Leaders:
    """A leader among those of ``hosts``; ``names`` is what errors call the group's ranks."""

    def __init__(self, backend: Any, *, hosts: Sequence[Sequence[int]], names: Sequence[int]) -> None:
        self._backend = backend
        self._hosts = hosts
        self._names = [names[ranks[0]] for ranks in hosts]
        self._line = TensorLine(
            self._all_gather, name="leaders", rank=backend.rank(), size=len(hosts), limit_bytes=_WHAT_BYTES
        )

    def all_reduce(self, tensor: Tensor, *, op: Op, what: str, timeout_s: float) -> None:
        """Fold the leaders' tensors into all of them."""
        self._agree(what, timeout_s)
        options = _with(c10d.AllreduceOptions(), timeout_s, reduceOp=_REDUCE_OPS[op])
        self._reduced(tensor, lambda part: self._backend.allreduce([part], options).wait())

    def reduce(self, tensor: Tensor, *, root: int, op: Op, what: str, timeout_s: float) -> None:
        """Fold the leaders' tensors into the one of host ``root``; the others' are spoilt."""
        self._agree(what, timeout_s)
        options = _with(c10d.ReduceOptions(), timeout_s, reduceOp=_REDUCE_OPS[op], rootRank=root)
        self._reduced(tensor, lambda part: self._backend.reduce([part], options).wait())

    def broadcast(self, tensor: Tensor, *, root: int, what: str, timeout_s: float) -> None:
        """Give all leaders the tensor of host ``root``."""
        self._agree(what, timeout_s)
        options = _with(c10d.BroadcastOptions(), timeout_s, rootRank=root)
        self._backend.broadcast([_as_bytes(tensor)], options).wait()

    def barrier(self, *, timeout_s: float) -> None:
        """Wait until every host has come this far."""
        self._agree("barrier", timeout_s)

    def all_gather(self, whole: Tensor, block: Tensor, *, what: str, timeout_s: float) -> None:
        """Copy every host's rows ``block`` to ``whole``, each row to the place of its rank."""
        self._agree(what, timeout_s)
        if not whole.numel():
            return
        most = max(map(len, self._hosts))
        padded = block.new_zeros((most, *block.shape[1:]))
        padded[: len(block)] = block
        found = [torch.empty_like(padded) for _ in self._hosts]
        options = _with(c10d.AllgatherOptions(), timeout_s)
        self._backend.allgather([[_as_bytes(part) for part in found]], [_as_bytes(padded)], options).wait()
        for ranks, rows in zip(self._hosts, found, strict=True):
            for rank, row in zip(ranks, rows, strict=False):
                whole[rank].copy_(row.view_as(whole[rank]))

    def exchange(self, sends: Sequence[Tensor], recv_nbytes: Sequence[int], *, timeout_s: float) -> list[Tensor]:
        """Send bytes ``sends[h]`` to each host ``h``, and return what comes from each; its size is known."""
        got = torch.empty(sum(recv_nbytes), dtype=torch.uint8)
        nbytes = [piece.numel() for piece in sends]
        options = _with(c10d.AllToAllOptions(), timeout_s)
        self._backend.alltoall_base(got, torch.cat(list(sends)), list(recv_nbytes), nbytes, options).wait()
        return list(got.split(list(recv_nbytes)))

    def reduce_scatter(self, block: Tensor, rows: Tensor, *, op: Op, what: str, timeout_s: float) -> None:
        """Fold the leaders' ``rows``, one for each rank of the group, and keep those of this host in ``block``."""
        self._agree(what, timeout_s)
        if not rows.numel():
            return
        sends = [_as_bytes(rows[list(ranks)]) for ranks in self._hosts]
        found = self.exchange(sends, [block.nbytes] * len(self._hosts), timeout_s=timeout_s)
        parts = [part.view(block.dtype).view_as(block) for part in found]
        stand_in = _STAND_IN_DTYPES.get(block.dtype, block.dtype)
        total = parts[0].to(stand_in)
        for part in parts[1:]:
            total = _fold(total, part.to(stand_in), op)
        block.copy_(total)

    def hang_up(self) -> None:
        """Have those who wait for this host notice that nothing will come."""
        backend, self._backend = self._backend, _Silence()
        if isinstance(backend, _Silence):
            return
        if isinstance(backend, c10d.ProcessGroupGloo):
            close_connections(backend)
            return
        for end in ("abort", "shutdown"):
            try:
                getattr(backend, end)()
            except (AttributeError, RuntimeError):  # not every backend has both
                continue

    def _agree(self, what: str, timeout_s: float) -> None:
        found = self._line.agree("collective", wire.fitting(what, _WHAT_BYTES), timeout_s=timeout_s)
        if found.equal:
            return
        told = [str(word) if word is not None else "something else" for word in found.values]
        other = next((host for host, word in enumerate(told) if word != told[0]), 0)
        raise DisagreementError(
            f"ranks are in different collectives: rank {self._names[0]} in {told[0]}, rank {self._names[other]} in "
            f"{told[other]}; every rank has to call the same ones in the same order"
        )

    def _all_gather(self, mine: Tensor, everybodys: list[Tensor], timeout_s: float) -> None:
        self._backend.allgather([everybodys], [mine], _with(c10d.AllgatherOptions(), timeout_s)).wait()

    def _reduced(self, tensor: Tensor, exchange: Callable[[Tensor], object]) -> None:
        stand_in = _STAND_IN_DTYPES.get(tensor.dtype)
        if stand_in is None:
            exchange(tensor)
            return
        converted = tensor.to(stand_in)
        exchange(converted)
        tensor.copy_(converted)


class _Silence:
    """What takes the place of the backend after this rank has hung up. Every use of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this rank has hung up on the other hosts after an error, or has closed the group")


def _with(options: Any, timeout_s: float, **values: Any) -> Any:
    options.timeout = timedelta(seconds=timeout_s)
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes, so that dtypes travel which the backend does not know."""
    return tensor.view(-1).view(torch.uint8)


def _fold(one: Tensor, other: Tensor, op: Op) -> Tensor:
    if one.dtype is torch.bool and op in (Op.SUM, Op.PRODUCT):
        return torch.logical_or(one, other) if op is Op.SUM else torch.logical_and(one, other)
    return _FOLDS[op](one, other)
