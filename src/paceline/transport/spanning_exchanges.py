"""``SpanningExchanges``: collectives of a group that spans hosts which move bytes and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.errors import BadCollectiveError
from paceline.transport import checks, forms
from paceline.transport.codes import Kind, dtype_number
from paceline.transport.launcher import one
from paceline.transport.packing import Packing
from paceline.transport.parcels import Parcels, check_route
from paceline.transport.stages import Limits, Stages


class SpanningExchanges(Stages):
    """broadcast, gather, scatter, all_gather, all_to_all, under c10d's names."""

    # -- from one to all, from all to one --------------------------------------------------------------------

    def broadcast(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Any:
        opts = forms.options(c10d.BroadcastOptions, opts, default=forms.BROADCAST, timeout=timeout, root=root)
        tensor = checks.tensor(one(tensors, "broadcast"), "broadcast")
        source = checks.root(opts.rootRank, self._size, "broadcast")
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

    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        opts = forms.options(c10d.GatherOptions, opts, default=forms.GATHER, timeout=timeout, root=root)
        tensor = checks.tensor(one(input_tensors, "gather"), "gather")
        target = checks.root(opts.rootRank, self._size, "gather")
        outputs = checks.root_list(
            output_tensors, tensor, is_root=self._rank == target, size=self._size, what="gather", list_name="output"
        )
        packing = Packing()
        recvs = [packing.write(output) for output in outputs]
        sends: list[Tensor | None] = [None] * self._size
        sends[target] = packing.read(tensor)
        return self._exchange(
            "gather", [tensor], outputs, sends, recvs, opts, kind=Kind.GATHER, root=target, packing=packing
        )

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        opts = forms.options(c10d.ScatterOptions, opts, default=forms.SCATTER, timeout=timeout, root=root)
        tensor = checks.tensor(one(output_tensors, "scatter"), "scatter")
        source = checks.root(opts.rootRank, self._size, "scatter")
        inputs = checks.root_list(
            input_tensors, tensor, is_root=self._rank == source, size=self._size, what="scatter", list_name="input"
        )
        packing = Packing()
        recvs: list[Tensor | None] = [None] * self._size
        recvs[source] = packing.write(tensor)
        sends = [packing.read(piece) for piece in inputs]
        return self._exchange(
            "scatter", inputs, [tensor], sends, recvs, opts, kind=Kind.SCATTER, root=source, packing=packing
        )

    # -- from all to all -------------------------------------------------------------------------------------

    def allgather(
        self, output_tensors: Sequence[Any], input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        opts = forms.options(c10d.AllgatherOptions, opts, default=forms.ALLGATHER, timeout=timeout)
        tensor = checks.tensor(one(input_tensors, "all_gather"), "all_gather")
        if output_tensors and not isinstance(output_tensors[0], Tensor):
            output_tensors = checks.single(output_tensors, "all_gather")  # type: ignore[assignment]
        checks.pieces(output_tensors, tensor, size=self._size, what="all_gather", list_name="output")
        return self._all_gather_lists([(list(output_tensors), tensor)], opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> Any:
        gathered = checks.gathered(output_lists, input_list, size=self._size)
        return self._all_gather_lists(gathered, opts or forms.ALLGATHER)

    def _all_gather_lists(self, gathered: Sequence[tuple[list[Tensor], Tensor]], opts: Any) -> Any:
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

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        packing = Packing()
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole(output, tensor, size=self._size, what="all_gather_single")
            packed = packing.write(output)
            pairs.append((packed.view(self._size, tensor.numel()), packing.read_apart(tensor, [packed]).view(-1)))

        def stages(limits: Limits) -> None:
            for whole, part in pairs:
                self._gather(whole, part, what=self._words("all_gather", part), limits=limits)

        return self._launch("all_gather", inputs, list(outputs), stages, opts or forms.ALLGATHER, packing)

    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for found, list_name in ((input_tensors, "input"), (output_tensors, "output")):
            if len(found) != self._size:
                raise BadCollectiveError(
                    f"shm all_to_all: {list_name} tensor list size {len(found)} does not match world size {self._size}"
                )
        checks.same_type([*input_tensors, *output_tensors], "all_to_all")
        packing = Packing()
        recvs = [packing.write(output) for output in output_tensors]
        sends = [packing.read_apart(piece, recvs) for piece in input_tensors]
        return self._exchange(
            *("all_to_all", input_tensors, output_tensors, sends, recvs, opts or forms.ALL_TO_ALL),
            kind=Kind.ALL_TO_ALL,
            packing=packing,
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        opts = forms.options(c10d.AllToAllOptions, opts, default=forms.ALL_TO_ALL, timeout=timeout)
        checks.same_type([input, output], "all_to_all_single")
        packing = Packing()
        packed = packing.write(output)
        whole = packing.read_apart(input, [packed])
        sends = _rows(whole, input_split_sizes, size=self._size)
        recvs = _rows(packed, output_split_sizes, size=self._size)
        return self._exchange(
            "all_to_all", [input], [output], sends, recvs, opts, kind=Kind.ALL_TO_ALL, packing=packing
        )

    # -- older names -----------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single

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


def _rows(tensor: Tensor, splits: Sequence[int], *, size: int) -> list[Tensor]:
    rows = tensor if tensor.dim() else tensor.view(1)
    return list(rows.split(list(checks.splits(splits, rows.shape[0], size=size))))
