"""``Exchanges``: collectives that move bytes and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.errors import BadCollectiveError
from paceline.transport import checks, forms
from paceline.transport.codes import Kind
from paceline.transport.launcher import Launcher, one, one_after_another, same_length
from paceline.transport.packing import Packing, place

_NOTHING = (0, 0)


class Exchanges(Launcher):
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
        here = place(packed)
        recvs = [_NOTHING] * self._size
        recvs[source] = here
        sends = [here if self._rank == source else _NOTHING]
        start = self._exchange(sends, recvs, same=True, kind=Kind.BROADCAST, root=source, packing=packing)
        return self._launch("broadcast", [tensor], [tensor], start, opts, packing)

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
        places = [place(packing.write(output)) for output in outputs] or [_NOTHING] * self._size
        sends = [_NOTHING] * self._size
        sends[target] = place(packing.read_apart(tensor, outputs))
        start = self._exchange(sends, places, same=False, kind=Kind.GATHER, root=target, packing=packing)
        return self._launch("gather", [tensor], list(outputs), start, opts, packing)

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
        packed = packing.write(tensor)
        sends = [place(packing.read_apart(piece, [packed])) for piece in inputs] or [_NOTHING] * self._size
        recvs = [_NOTHING] * self._size
        recvs[source] = place(packed)
        start = self._exchange(sends, recvs, same=False, kind=Kind.SCATTER, root=source, packing=packing)
        return self._launch("scatter", list(inputs), [tensor], start, opts, packing)

    # -- from all to all -------------------------------------------------------------------------------------

    def allgather(
        self, output_tensors: Sequence[Any], input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        opts = forms.options(c10d.AllgatherOptions, opts, default=forms.ALLGATHER, timeout=timeout)
        tensor = checks.tensor(one(input_tensors, "all_gather"), "all_gather")
        if output_tensors and not isinstance(output_tensors[0], Tensor):
            checks.single(output_tensors, "all_gather")
            output_tensors = output_tensors[0]
        checks.pieces(output_tensors, tensor, size=self._size, what="all_gather", list_name="output")
        return self._all_gather([(list(output_tensors), tensor)], opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return self._all_gather(checks.gathered(output_lists, input_list, size=self._size), opts or forms.ALLGATHER)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or forms.ALLGATHER
        same_length(outputs, inputs, "all_gather_single")
        packing = Packing()
        starts = []
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole(output, tensor, size=self._size, what="all_gather_single")
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

    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for found, list_name in ((input_tensors, "input"), (output_tensors, "output")):
            if len(found) != self._size:
                raise BadCollectiveError(
                    f"shm all_to_all: {list_name} tensor list size {len(found)} does not match world size {self._size}"
                )
        checks.same_type([*input_tensors, *output_tensors], "all_to_all")
        packing = Packing()
        packed = [packing.write(output) for output in output_tensors]
        sends = [place(packing.read_apart(piece, packed)) for piece in input_tensors]
        recvs = [place(piece) for piece in packed]
        start = self._exchange(sends, recvs, same=False, kind=Kind.ALL_TO_ALL, root=-1, packing=packing)
        return self._launch("all_to_all", input_tensors, list(output_tensors), start, opts or forms.ALL_TO_ALL, packing)

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
        sends = _rows(whole, checks.splits(input_split_sizes, _row_count(input), size=self._size))
        recvs = _rows(packed, checks.splits(output_split_sizes, _row_count(output), size=self._size))
        start = self._exchange(sends, recvs, same=False, kind=Kind.ALL_TO_ALL, root=-1, packing=packing)
        return self._launch("all_to_all", [input], [output], start, opts, packing)

    def _all_gather(self, gathered: Sequence[tuple[list[Tensor], Tensor]], opts: Any) -> Any:
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

    # -- older names -----------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _rows(tensor: Tensor, splits: Sequence[int]) -> list[tuple[int, int]]:
    """Where each rank's rows are."""
    at, nbytes = place(tensor)
    row_bytes = nbytes // _row_count(tensor) if nbytes else 0
    begins = [0, *accumulate(splits)]
    return [(at + begin * row_bytes, rows * row_bytes) for begin, rows in zip(begins, splits, strict=False)]
