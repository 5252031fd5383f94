"""``Calls``: c10d's methods of a process group, in all their forms, for whoever carries them.

Arguments are checked here, before anything is sent, and handed on in one form to the ``_do_...`` methods: of
``reductions`` and ``exchanges`` where ranks share memory, of ``spanning_reductions`` and ``spanning_exchanges`` where a
group spans hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.errors import BadCollectiveError
from paceline.transport import checks, forms

Gathered = Sequence[tuple[list[Tensor], Tensor]]
"""Where everybody's goes, and ours, for each tensor."""


class Calls:
    """What was asked, checked. (all_reduce is each carrier's own: there is nothing to take apart.)"""

    _rank: int
    _size: int

    # -- from one to all, from all to one --------------------------------------------------------------------

    def broadcast(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Any:
        opts = forms.options(c10d.BroadcastOptions, opts, default=forms.BROADCAST, timeout=timeout, root=root)
        tensor = checks.tensor(one(tensors, "broadcast"), "broadcast")
        return self._do_broadcast(tensor, checks.root(opts.rootRank, self._size, "broadcast"), opts)

    def reduce(
        self,
        tensors: Sequence[Tensor],
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        opts = forms.options(c10d.ReduceOptions, opts, default=forms.REDUCE, timeout=timeout, op=op, root=root)
        tensor = checks.tensor(one(tensors, "reduce"), "reduce")
        return self._do_reduce(tensor, checks.root(opts.rootRank, self._size, "reduce"), opts)

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
        return self._do_gather(tensor, outputs, target, opts)

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
        return self._do_scatter(tensor, inputs, source, opts)

    # -- from all to all -------------------------------------------------------------------------------------

    def allgather(
        self, output_tensors: Sequence[Any], input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        opts = forms.options(c10d.AllgatherOptions, opts, default=forms.ALLGATHER, timeout=timeout)
        tensor = checks.tensor(one(input_tensors, "all_gather"), "all_gather")
        outputs = _list_of(output_tensors, "all_gather")
        checks.pieces(outputs, tensor, size=self._size, what="all_gather", list_name="output")
        return self._do_all_gather([(list(outputs), tensor)], opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> Any:
        gathered = checks.gathered(output_lists, input_list, size=self._size)
        return self._do_all_gather(gathered, opts or forms.ALLGATHER)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        checks.wholes(outputs, inputs, size=self._size, what="all_gather_single")
        return self._do_all_gather_single(outputs, inputs, opts or forms.ALLGATHER)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> Any:
        opts = forms.options(c10d.ReduceScatterOptions, opts, default=forms.REDUCE_SCATTER, timeout=timeout, op=op)
        output = checks.tensor(one(output_tensors, "reduce_scatter"), "reduce_scatter")
        inputs = _list_of(input_tensors, "reduce_scatter")
        checks.same_type(inputs, "reduce_scatter")
        if len(inputs) != self._size:
            raise BadCollectiveError("invalid input tensor list size, must be world size")
        checks.pieces([inputs[self._rank]], output, size=1, what="reduce_scatter", list_name="input")
        return self._do_reduce_scatter(output, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        checks.wholes(inputs, outputs, size=self._size, what="reduce_scatter_single")
        return self._do_reduce_scatter_single(outputs, inputs, opts or forms.REDUCE_SCATTER)

    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for found, list_name in ((input_tensors, "input"), (output_tensors, "output")):
            if len(found) != self._size:
                raise BadCollectiveError(
                    f"shm all_to_all: {list_name} tensor list size {len(found)} does not match world size {self._size}"
                )
        checks.same_type([*input_tensors, *output_tensors], "all_to_all")
        return self._do_all_to_all(output_tensors, input_tensors, opts or forms.ALL_TO_ALL)

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
        output_rows = checks.splits(output_split_sizes, row_count(output), size=self._size)
        input_rows = checks.splits(input_split_sizes, row_count(input), size=self._size)
        return self._do_all_to_all_single(output, input, output_rows, input_rows, opts)

    # -- older names -----------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- for whoever carries them ----------------------------------------------------------------------------

    def _do_broadcast(self, tensor: Tensor, source: int, opts: Any) -> Any:
        raise NotImplementedError

    def _do_reduce(self, tensor: Tensor, target: int, opts: Any) -> Any:
        raise NotImplementedError

    def _do_gather(self, tensor: Tensor, outputs: Sequence[Tensor], target: int, opts: Any) -> Any:
        """``outputs`` is empty but on the target."""
        raise NotImplementedError

    def _do_scatter(self, tensor: Tensor, inputs: Sequence[Tensor], source: int, opts: Any) -> Any:
        """``inputs`` is empty but on the source."""
        raise NotImplementedError

    def _do_all_gather(self, gathered: Gathered, opts: Any) -> Any:
        raise NotImplementedError

    def _do_all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        raise NotImplementedError

    def _do_reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], opts: Any) -> Any:
        """The input of this rank is like ``output``; those of others may not be."""
        raise NotImplementedError

    def _do_reduce_scatter_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        raise NotImplementedError

    def _do_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        raise NotImplementedError

    def _do_all_to_all_single(
        self, output: Tensor, input: Tensor, output_rows: Sequence[int], input_rows: Sequence[int], opts: Any
    ) -> Any:
        raise NotImplementedError


def one(tensors: Any, what: str) -> Tensor:
    """The tensor of a call that takes one, given as such or in a list."""
    return tensors if isinstance(tensors, Tensor) else checks.single(tensors, what)


def row_count(tensor: Tensor) -> int:
    """How many rows an all_to_all_single divides."""
    return tensor.shape[0] if tensor.dim() else 1


def _list_of(tensors: Any, what: str) -> Sequence[Tensor]:
    """A list of tensors, given as such or in a list."""
    inside: Sequence[Tensor] = tensors
    return inside if not inside or isinstance(inside[0], Tensor) else checks.single(inside, what)
