"""``Reductions``: collectives that fold the ranks' elements, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.errors import BadCollectiveError
from paceline.transport import checks, forms
from paceline.transport.calls import one
from paceline.transport.checks import KERNEL_CODES
from paceline.transport.codes import Kind, Op
from paceline.transport.kernel import Job
from paceline.transport.launcher import Launcher, one_after_another
from paceline.transport.packing import Packing, bytes_at, is_plain, place
from paceline.transport.sparse import SparseSum
from paceline.transport.work import ENDED, ShmWork

_AllreduceOptions = c10d.AllreduceOptions
_STRIDED = torch.strided


class Reductions(Launcher):
    """all_reduce, under c10d's names; reduce, reduce_scatter."""

    # -- all_reduce ------------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, op: Any = None
    ) -> Any:
        # A few microseconds are all there is: no call that can be done without.
        if type(opts) is not _AllreduceOptions:
            opts = forms.options(_AllreduceOptions, opts, default=forms.ALLREDUCE, timeout=timeout, op=op)
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else one(tensors, "all_reduce")
        # ReduceOp has no cheaper name for the number it is.
        reduce_op = hash(opts.reduceOp)
        if opts.asyncOp or _torch.is_profiling():
            return self._all_reduce_any([tensor], reduce_op, opts)
        # Options that nobody gave a time-out have a negative one.
        timeout_s = self._timeout_s if opts.timeout.days < 0 else self._limit_s(opts)
        # Before it is tried: it counts also if it raises, as it does on ranks that come by the other way.
        self._sequence += 1
        if self.channel.all_reduce_here(tensor, reduce_op, timeout_s):
            return ENDED
        self._sequence -= 1
        return self._all_reduce_any([tensor], reduce_op, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or forms.ALLREDUCE_COALESCED
        checks.same_type(tensors, "all_reduce_coalesced")
        return self._all_reduce_any(tensors, hash(opts.reduceOp), opts)

    def all_reduce_scaled(self, tensor: Tensor, *, scale: float, async_op: bool = True) -> Any:
        """Sum ``tensor * scale`` over the ranks, in one pass: what a reducer wants of gradients."""
        at = checks.tensor(tensor, "all_reduce").data_ptr()
        code = KERNEL_CODES[Op.SUM].get(tensor.dtype)
        if code is None or not is_plain(tensor):
            raise BadCollectiveError(f"shm all_reduce: a {tensor.dtype} tensor that is not plain has no scale")
        job = self.channel.all_reduce(
            at,
            at,
            tensor.numel(),
            code,
            Op.SUM,
            scale=scale,
            timeout_s=self._timeout_s,
            inline=not async_op,
            keep=tensor,
        )
        if not async_op:
            job.wait()
            return ENDED
        return ShmWork((job,), [tensor], herald=self._herald)

    def _all_reduce_any(self, tensors: Sequence[Tensor], op: int, opts: Any) -> Any:
        if isinstance(tensors[0], Tensor) and tensors[0].layout is not _STRIDED and tensors[0].is_cpu:
            return self._all_reduce_sparse(checks.single(tensors, "all_reduce"), op, opts)
        packing = Packing()
        packed = [packing.update(checks.tensor(tensor, "all_reduce")) for tensor in tensors]
        code = KERNEL_CODES[op].get(packed[0].dtype)
        if code is None:
            raise checks.refuse_reduction(packed[0].dtype, op)

        def start(inline: bool, timeout_s: float) -> Sequence[Job]:
            return [
                self.channel.all_reduce(
                    part.data_ptr(),
                    part.data_ptr(),
                    part.numel(),
                    code,
                    op,  # type: ignore[arg-type]
                    scale=None,
                    timeout_s=timeout_s,
                    inline=inline,
                    keep=part,
                )
                for part in packed
            ]

        return self._launch("all_reduce", tensors, list(tensors), start, opts, packing)

    def _all_reduce_sparse(self, tensor: Tensor, op: int, opts: Any) -> Any:
        channel = self.channel
        total = SparseSum(tensor, op=op, rank=self._rank, names=channel.names)
        sent = total.sent
        begun: list[Job] = []

        def start(_: bool, timeout_s: float) -> Sequence[Job]:
            begun.append(
                channel.gather_unequal(
                    *place(sent), kind=Kind.SPARSE_ALL_REDUCE, dtype=total.dtype, timeout_s=timeout_s, keep=sent
                )
            )
            return begun

        def finish() -> None:
            total.finish([bytes_at(*begun[0].part(rank)) for rank in range(self._size)])

        return self._launch("sparse_all_reduce", [tensor], [tensor], start, opts, after=finish)

    # -- to one, to each a part ------------------------------------------------------------------------------

    def _do_reduce(self, tensor: Tensor, target: int, opts: Any) -> Any:
        packing = Packing()
        packed = packing.update(tensor) if self._rank == target else packing.read(tensor)
        counts = [0] * self._size
        counts[target] = packed.numel()
        sends = [packed.data_ptr()] * self._size
        start = self._reduce_exchange(sends, counts, packed, opts, kind=Kind.REDUCE, root=target, packing=packing)
        return self._launch("reduce", [tensor], [tensor], start, opts, packing)

    def _do_reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], opts: Any) -> Any:
        packing = Packing()
        packed = packing.write(output)
        pieces = [packing.read_apart(piece, [packed]) for piece in inputs]
        sends, counts = [piece.data_ptr() for piece in pieces], [piece.numel() for piece in pieces]
        start = self._reduce_exchange(sends, counts, packed, opts, kind=Kind.REDUCE_SCATTER, root=-1, packing=packing)
        return self._launch("reduce_scatter", inputs, [output], start, opts, packing)

    def _do_reduce_scatter_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Any:
        packing = Packing()
        starts = []
        for output, tensor in zip(outputs, inputs, strict=True):
            packed, count = packing.write(output), output.numel()
            whole = packing.read(tensor)
            share = whole.nbytes // self._size
            if packed.data_ptr() != whole.data_ptr() + self._rank * share:
                whole = packing.read_apart(whole, [packed])
            sends = [whole.data_ptr() + rank * share for rank in range(self._size)]
            counts = [count] * self._size
            starts.append(
                self._reduce_exchange(sends, counts, packed, opts, kind=Kind.REDUCE_SCATTER, root=-1, packing=packing)
            )
        return self._launch("reduce_scatter", inputs, list(outputs), one_after_another(starts), opts, packing)
