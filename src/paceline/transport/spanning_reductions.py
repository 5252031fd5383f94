"""``SpanningReductions``: reductions of a group that spans hosts: inside each host first, then between them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.errors import BadCollectiveError
from paceline.transport import checks, forms
from paceline.transport.calls import one
from paceline.transport.checks import KERNEL_CODES
from paceline.transport.codes import Kind, Op, dtype_number
from paceline.transport.packing import Packing
from paceline.transport.sparse import SparseSum
from paceline.transport.stages import Limits, Stages


class SpanningReductions(Stages):
    """all_reduce, under c10d's names; reduce, reduce_scatter."""

    # -- all_reduce ------------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, op: Any = None
    ) -> Any:
        opts = forms.options(c10d.AllreduceOptions, opts, default=forms.ALLREDUCE, timeout=timeout, op=op)
        tensor = one(tensors, "all_reduce")
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided and tensor.is_cpu:
            return self._all_reduce_sparse(tensor, opts)
        return self._all_reduce([tensor], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        checks.same_type(tensors, "all_reduce_coalesced")
        return self._all_reduce(tensors, opts or forms.ALLREDUCE_COALESCED)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = _op(opts, tensors[0], "all_reduce")
        inside = Op.SUM if op is Op.AVG else op
        packing = Packing()
        packed = [packing.update(checks.tensor(tensor, "all_reduce")) for tensor in tensors]

        def stages(limits: Limits) -> None:
            for part in packed:
                self._host.reduce(part, op=inside, timeout_s=limits.inside_s)
                if self._leaders is not None:
                    what = self._words("all_reduce", part, op=op)
                    self._leaders.all_reduce(part, op=inside, what=what, timeout_s=limits.between_s)
                    if op is Op.AVG:
                        part.div_(self._size)
                self._host.broadcast(part, root=0, timeout_s=limits.after_s)

        return self._launch("all_reduce", tensors, list(tensors), stages, opts, packing)

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> Any:
        total = SparseSum(tensor, op=hash(opts.reduceOp), rank=self._rank, names=self._names)
        sent = total.sent
        kind, what = Kind.SPARSE_ALL_REDUCE, f"sparse all_reduce({str(total.dtype).removeprefix('torch.')})"

        def stages(limits: Limits) -> None:
            table = torch.empty(self._size, 2, dtype=torch.int64)
            mine = torch.tensor([sent.numel(), dtype_number(total.dtype)])
            self._gather(table, mine, kind=kind, what=what, limits=limits)
            nbytes, dtypes = table.t().tolist()
            total.compare_dtypes(dtypes)
            # Of one length, as leaders exchange rows.
            padded = sent.new_zeros(max(nbytes))
            padded[: sent.numel()] = sent
            whole = padded.new_empty((self._size, *padded.shape))
            self._gather(whole, padded, kind=kind, what=what, limits=limits)
            total.finish([row[:length] for row, length in zip(whole, nbytes, strict=True)])

        return self._launch("sparse_all_reduce", [tensor], [tensor], stages, opts)

    # -- to one, to each a part ------------------------------------------------------------------------------

    def _do_reduce(self, tensor: Tensor, target: int, opts: Any) -> Any:
        reduce_op = _op(opts, tensor, "reduce")
        inside = Op.SUM if reduce_op is Op.AVG else reduce_op
        packing = Packing()
        source = packing.read(tensor)
        packed = packing.update(tensor) if self._rank == target else source
        home = self._host_of(target)

        def stages(limits: Limits) -> None:
            # A leader that is not the root must not lose its own tensor.
            total = packed if self._rank == target else source.clone() if self._host.rank == 0 else source
            self._host.reduce(total, op=inside, timeout_s=limits.inside_s)
            if self._leaders is not None:
                what = self._words("reduce", tensor, op=reduce_op, root=target)
                self._leaders.reduce(total, root=home, op=inside, what=what, timeout_s=limits.between_s)
                if reduce_op is Op.AVG and self._mine == home:
                    total.div_(self._size)
            if self._mine == home:
                self._host.hand_over(total, to=self._hosts[home].index(target), timeout_s=limits.after_s)

        return self._launch("reduce", [tensor], [tensor], stages, opts, packing)

    def _do_reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], opts: Any) -> Any:
        checks.pieces(inputs, output, size=self._size, what="reduce_scatter", list_name="input")
        return self._reduce_scatter([output], [torch.stack([*inputs])], inputs, opts)

    def _do_reduce_scatter_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        # The sums are made in it, and what is read is not ours to change.
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
        return self._reduce_scatter(outputs, copies, inputs, opts)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], shown: Sequence[Tensor], opts: Any
    ) -> Any:
        packing = Packing()
        op = _op(opts, outputs[0], "reduce_scatter")
        inside = Op.SUM if op is Op.AVG else op
        packed = [packing.write(output) for output in outputs]

        def stages(limits: Limits) -> None:
            for part, whole in zip(packed, wholes, strict=True):
                rows = whole.view(self._size, part.numel())
                self._host.reduce(rows, op=inside, timeout_s=limits.inside_s)
                block = rows.new_empty((len(self._hosts[self._mine]), rows.shape[1]))
                if self._leaders is not None:
                    what = self._words("reduce_scatter", part, op=op)
                    self._leaders.reduce_scatter(block, rows, op=inside, what=what, timeout_s=limits.between_s)
                self._host.scatter(part, block, timeout_s=limits.after_s)
                if op is Op.AVG:
                    part.div_(self._size)

        return self._launch("reduce_scatter", shown, list(outputs), stages, opts, packing)


def _op(opts: Any, tensor: Tensor, what: str) -> Op:
    op = hash(opts.reduceOp)
    if checks.tensor(tensor, what).dtype not in KERNEL_CODES[op]:
        raise checks.refuse_reduction(tensor.dtype, op)
    if tensor.dtype is torch.uint64 and op in (Op.MIN, Op.MAX):
        raise BadCollectiveError(f"{Op(op).name} of torch.uint64 cannot be taken between hosts: use torch.int64")
    return Op(op)
