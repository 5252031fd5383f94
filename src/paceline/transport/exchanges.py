"""``Exchanges``: collectives that move bytes and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from paceline.transport.calls import Gathered, row_count
from paceline.transport.codes import Kind
from paceline.transport.launcher import Launcher, one_after_another
from paceline.transport.packing import Packing, place

_NOTHING = (0, 0)


class Exchanges(Launcher):
    """broadcast, gather, scatter, all_gather, all_to_all."""

    # -- from one to all, from all to one --------------------------------------------------------------------

    def _do_broadcast(self, tensor: Tensor, source: int, opts: Any) -> Any:
        packing = Packing()
        packed = packing.read(tensor) if self._rank == source else packing.write(tensor)
        here = place(packed)
        recvs = [_NOTHING] * self._size
        recvs[source] = here
        sends = [here if self._rank == source else _NOTHING]
        start = self._exchange(sends, recvs, same=True, kind=Kind.BROADCAST, root=source, packing=packing)
        return self._launch("broadcast", [tensor], [tensor], start, opts, packing)

    def _do_gather(self, tensor: Tensor, outputs: Sequence[Tensor], target: int, opts: Any) -> Any:
        packing = Packing()
        places = [place(packing.write(output)) for output in outputs] or [_NOTHING] * self._size
        sends = [_NOTHING] * self._size
        sends[target] = place(packing.read_apart(tensor, outputs))
        start = self._exchange(sends, places, same=False, kind=Kind.GATHER, root=target, packing=packing)
        return self._launch("gather", [tensor], list(outputs), start, opts, packing)

    def _do_scatter(self, tensor: Tensor, inputs: Sequence[Tensor], source: int, opts: Any) -> Any:
        packing = Packing()
        packed = packing.write(tensor)
        sends = [place(packing.read_apart(piece, [packed])) for piece in inputs] or [_NOTHING] * self._size
        recvs = [_NOTHING] * self._size
        recvs[source] = place(packed)
        start = self._exchange(sends, recvs, same=False, kind=Kind.SCATTER, root=source, packing=packing)
        return self._launch("scatter", list(inputs), [tensor], start, opts, packing)

    # -- from all to all -------------------------------------------------------------------------------------

    def _do_all_gather(self, gathered: Gathered, opts: Any) -> Any:
        packing = Packing()
        starts = []
        for outputs, tensor in gathered:
            packed = [packing.write(output) for output in outputs]
            sends = [place(packing.read_apart(tensor, packed))]
            recvs = [place(piece) for piece in packed]
            starts.append(self._exchange(sends, recvs, same=True, kind=Kind.ALL_GATHER, root=-1, packing=packing))
        inputs = [tensor for _, tensor in gathered]
        results = [output for outputs, _ in gathered for output in outputs]
        return self._launch("all_gather", inputs, results, one_after_another(starts), opts, packing)

    def _do_all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        packing = Packing()
        starts = []
        for output, tensor in zip(outputs, inputs, strict=True):
            at, nbytes = place(packing.write(output))
            share = nbytes // self._size
            recvs = [(at + rank * share, share) for rank in range(self._size)]
            packed = packing.read(tensor)
            if packed.data_ptr() != at + self._rank * share:  # in place, as FSDP does it, needs no copy
                packed = packing.read_apart(packed, [output])
            starts.append(
                self._exchange([place(packed)], recvs, same=True, kind=Kind.ALL_GATHER, root=-1, packing=packing)
            )
        return self._launch("all_gather", inputs, list(outputs), one_after_another(starts), opts, packing)

    def _do_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        packing = Packing()
        packed = [packing.write(output) for output in outputs]
        sends = [place(packing.read_apart(piece, packed)) for piece in inputs]
        recvs = [place(piece) for piece in packed]
        start = self._exchange(sends, recvs, same=False, kind=Kind.ALL_TO_ALL, root=-1, packing=packing)
        return self._launch("all_to_all", inputs, list(outputs), start, opts, packing)

    def _do_all_to_all_single(
        self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int], opts: Any
    ) -> Any:
        packing = Packing()
        packed = packing.write(output)
        whole = packing.read_apart(input, [packed])
        sends = _rows(whole, input_rows)
        recvs = _rows(packed, output_rows)
        start = self._exchange(sends, recvs, same=False, kind=Kind.ALL_TO_ALL, root=-1, packing=packing)
        return self._launch("all_to_all", [input], [output], start, opts, packing)


def _rows(tensor: Tensor, splits: Sequence[int]) -> list[tuple[int, int]]:
    """Where each rank's rows are."""
    at, nbytes = place(tensor)
    row_bytes = nbytes // row_count(tensor) if nbytes else 0
    begins = [0, *accumulate(splits)]
    return [(at + begin * row_bytes, rows * row_bytes) for begin, rows in zip(begins, splits, strict=False)]
