"""``SpanningExchanges``: collectives of a group that spans hosts which move bytes and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.transport.calls import Gathered
from paceline.transport.codes import Kind, dtype_number
from paceline.transport.packing import Packing
from paceline.transport.parcels import Parcels, check_route
from paceline.transport.stages import Limits, Stages


class SpanningExchanges(Stages):
    """broadcast, gather, scatter, all_gather, all_to_all."""

    # -- from one to all, from all to one --------------------------------------------------------------------

    def _do_broadcast(self, tensor: Tensor, source: int, opts: Any) -> Any:
        packing = Packing()
        packed = packing.read(tensor) if self._rank == source else packing.write(tensor)
        home = self._host_of(source)

        def stages(limits: Limits) -> None:
            if self._mine == home:
                self._host.broadcast(packed, root=self._hosts[home].index(source), timeout_s=limits.inside_s)
            if self._leaders is not None:
                what = self._words("broadcast", tensor, root=source)
                self._leaders.broadcast(packed, root=home, what=what, timeout_s=limits.between_s)
            if self._mine != home:
                self._host.broadcast(packed, root=0, timeout_s=limits.after_s)

        return self._launch("broadcast", [tensor], [tensor], stages, opts, packing)

    def _do_gather(self, tensor: Tensor, outputs: Sequence[Tensor], target: int, opts: Any) -> Any:
        packing = Packing()
        recvs = [packing.write(output) for output in outputs]
        sends: list[Tensor | None] = [None] * self._size
        sends[target] = packing.read(tensor)
        return self._exchange(
            "gather", [tensor], outputs, sends, recvs, opts, kind=Kind.GATHER, root=target, packing=packing
        )

    def _do_scatter(self, tensor: Tensor, inputs: Sequence[Tensor], source: int, opts: Any) -> Any:
        packing = Packing()
        recvs: list[Tensor | None] = [None] * self._size
        recvs[source] = packing.write(tensor)
        sends = [packing.read(piece) for piece in inputs]
        return self._exchange(
            "scatter", inputs, [tensor], sends, recvs, opts, kind=Kind.SCATTER, root=source, packing=packing
        )

    # -- from all to all -------------------------------------------------------------------------------------

    def _do_all_gather(self, gathered: Gathered, opts: Any) -> Any:
        parts = [Packing().read(tensor) for _, tensor in gathered]
        wholes = [part.new_empty((self._size, *part.shape)) for part in parts]

        def stages(limits: Limits) -> None:
            for whole, part in zip(wholes, parts, strict=True):
                self._gather(whole, part, what=self._words("all_gather", part), limits=limits)

        def give_out() -> None:
            for (outputs, _), whole in zip(gathered, wholes, strict=True):
                for output, piece in zip(outputs, whole, strict=True):
                    output.copy_(piece)

        inputs = [tensor for _, tensor in gathered]
        results = [output for outputs, _ in gathered for output in outputs]
        return self._launch("all_gather", inputs, results, stages, opts, after=give_out)

    def _do_all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        packing = Packing()
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            packed = packing.write(output)
            pairs.append((packed.view(self._size, tensor.numel()), packing.read_apart(tensor, [packed]).view(-1)))

        def stages(limits: Limits) -> None:
            for whole, part in pairs:
                self._gather(whole, part, what=self._words("all_gather", part), limits=limits)

        return self._launch("all_gather", inputs, list(outputs), stages, opts, packing)

    def _do_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        packing = Packing()
        recvs = [packing.write(output) for output in outputs]
        sends = [packing.read_apart(piece, recvs) for piece in inputs]
        return self._exchange("all_to_all", inputs, outputs, sends, recvs, opts, kind=Kind.ALL_TO_ALL, packing=packing)

    def _do_all_to_all_single(
        self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int], opts: Any
    ) -> Any:
        packing = Packing()
        packed = packing.write(output)
        whole = packing.read_apart(input, [packed])
        sends = _rows(whole, input_rows)
        recvs = _rows(packed, output_rows)
        return self._exchange(
            "all_to_all", [input], [output], sends, recvs, opts, kind=Kind.ALL_TO_ALL, packing=packing
        )

    def _exchange(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sends: Sequence[Tensor | None],
        recvs: Sequence[Tensor | None],
        opts: Any,
        *,
        kind: Kind,
        root: int = -1,
        packing: Packing,
    ) -> Any:
        """``sends[d]`` to each rank ``d``, ``recvs[s]`` from each rank ``s``; no list is nothing for anybody."""
        outgoing, incoming = _as_pieces(sends, self._size), _as_pieces(recvs, self._size)
        dtype = dtype_number(packing.kept[-1].dtype)
        what = name if root < 0 else f"{name} root {self._names[root]}"

        def stages(limits: Limits) -> None:
            # Sizes first: leaders have to know those of ranks that they do not talk for.
            mine = torch.tensor([piece.numel() for piece in (*outgoing, *incoming)] + [dtype])
            table = torch.empty((self._size, *mine.shape), dtype=mine.dtype)
            self._gather(table, mine, kind=kind, what=what, limits=limits)
            Parcels(
                self._host,
                self._leaders,
                hosts=self._hosts,
                mine=self._mine,
                rank=self._rank,
                route=check_route(table, self._names, what),
                kind=kind,
                limits=limits,
            ).run(outgoing, incoming)

        return self._launch(name, inputs, list(outputs), stages, opts, packing)


def _as_pieces(tensors: Sequence[Tensor | None], size: int) -> list[Tensor]:
    """As bytes, one piece a rank."""
    nothing = torch.empty(0, dtype=torch.uint8)
    found = [nothing if tensor is None else tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
    return found or [nothing] * size


def _rows(tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Each rank's rows."""
    return list((tensor if tensor.dim() else tensor.view(1)).split(list(counts)))
