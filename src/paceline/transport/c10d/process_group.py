"""``ShmProcessGroup``: the process group that c10d calls, whichever way its ranks are connected.

Its methods are c10d's, by their names; ``dist.*``, functional collectives, compiled graphs and torch's DDP and FSDP all
end there. Each one checks its arguments (``checks``), makes plain tensors of them (``packing``), has the group's
carrier begin the collective (``carrier``) and returns a ``Work``. A synchronous call runs on the calling thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.errors import BadCollectiveError
from paceline.transport.c10d import checks
from paceline.transport.c10d import short_forms as forms
from paceline.transport.c10d.carrier import Carrier, Pending
from paceline.transport.c10d.group_facts import GroupFacts
from paceline.transport.c10d.herald import Herald
from paceline.transport.c10d.packing import Packing
from paceline.transport.c10d.sparse import SparseSum
from paceline.transport.c10d.work import ENDED, ShmWork
from paceline.transport.shm.codes import Kind
from paceline.transport.shm.segment import hold, release
from paceline.transport.shm.terms import Terms

_AllreduceOptions = c10d.AllreduceOptions


class ShmProcessGroup(GroupFacts):
    """A group with backend ``shm``; made by :func:`paceline.transport.creation.new_group`."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout: timedelta, carrier: Carrier) -> None:
        super().__init__(store, rank=rank, size=size, timeout=timeout)
        self.carrier = carrier
        self._all_reduce_here = carrier.all_reduce_here
        self._herald = Herald()
        # A group that nobody refers to any more leaves nothing behind, even without destroy_process_group. This does
        # not run at exit: there, tensors may outlive us, and the end of the process is what tells the others.
        hold(carrier)
        self._ending = weakref.finalize(self, _end, carrier, self._herald, os.getpid())
        self._ending.atexit = False

    @property
    def carried(self) -> str:
        """How collectives travel, for people."""
        return self.carrier.about

    def allocate_shared(self, nbytes: int, wait: Callable[[dist.Work], None] | None) -> Tensor | None:
        """Bytes that all ranks have mapped; see :func:`paceline.transport.allocate`."""
        wait_for_job = None if wait is None else lambda job: wait(ShmWork((job,), [], herald=None))
        return self.carrier.allocate(nbytes, timeout_s=self._timeout_s, wait=wait_for_job)

    def shutdown(self) -> None:
        """Finish what was started and leave. ``destroy_process_group`` calls this. It may be called again."""
        self._ending()

    def abort(self) -> None:
        """Leave at once; whatever is under way fails, here and on the other ranks."""
        self.carrier.abort()
        self._ending()

    # -- all_reduce ------------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, op: Any = None
    ) -> Any:
        # This has a few microseconds in all, so it makes no call that it can do without.
        if type(opts) is not _AllreduceOptions:
            opts = forms.options(_AllreduceOptions, opts, timeout=timeout, op=op)
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else checks.one(tensors, "all_reduce")
        # This is the cheapest way to get a ReduceOp's number.
        reduce_op = hash(opts.reduceOp)
        if opts.asyncOp or _torch.is_profiling():
            return self._all_reduce([tensor], opts)
        # Options that nobody gave a time-out have a negative one.
        timeout_s = self._timeout_s if opts.timeout.days < 0 else self._limit_s(opts)
        # This comes before the attempt: one that raises counts, too, as it does on ranks that take the other path.
        self._sequence += 1
        if self._all_reduce_here(tensor, reduce_op, timeout_s):
            return ENDED
        self._sequence -= 1
        return self._all_reduce([tensor], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        checks.same_type(tensors, "all_reduce_coalesced")
        return self._all_reduce(tensors, opts or forms.default(c10d.AllreduceCoalescedOptions))

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        first = tensors[0]
        if isinstance(first, Tensor) and first.layout is not torch.strided and first.is_cpu:
            return self._all_reduce_sparse(checks.single(tensors, "all_reduce"), opts)
        packing = Packing()
        packed = [packing.update(checks.tensor(tensor, "all_reduce")) for tensor in tensors]
        op = checks.reduction(opts.reduceOp, first.dtype)

        def start(terms: Terms) -> Sequence[Pending]:
            return [self.carrier.all_reduce(part, op, terms) for part in packed]

        return self._launch("all_reduce", tensors, list(tensors), start, opts, packing)

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> Any:
        total = SparseSum(tensor, op=hash(opts.reduceOp), rank=self._rank, names=self.carrier.names)
        found: Callable[[], Sequence[Tensor]]

        def start(terms: Terms) -> Sequence[Pending]:
            nonlocal found
            pending, found = self.carrier.gather_unequal(total.sent, total.dtype, terms, most_bytes=total.most_bytes)
            return [pending]

        return self._launch("sparse_all_reduce", [tensor], [tensor], start, opts, after=lambda: total.finish(found()))

    # -- from one to all, from all to one --------------------------------------------------------------------

    def broadcast(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Any:
        opts = forms.options(c10d.BroadcastOptions, opts, timeout=timeout, root=root)
        tensor = checks.tensor(checks.one(tensors, "broadcast"), "broadcast")
        source = checks.root(opts.rootRank, self._size, "broadcast")
        packing = Packing()
        packed = packing.read(tensor) if self._rank == source else packing.write(tensor)

        def start(terms: Terms) -> Sequence[Pending]:
            return [self.carrier.broadcast(packed, source, terms)]

        return self._launch("broadcast", [tensor], [tensor], start, opts, packing)

    def reduce(
        self,
        tensors: Sequence[Tensor],
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        opts = forms.options(c10d.ReduceOptions, opts, timeout=timeout, op=op, root=root)
        tensor = checks.tensor(checks.one(tensors, "reduce"), "reduce")
        target = checks.root(opts.rootRank, self._size, "reduce")
        packing = Packing()
        packed = packing.update(tensor) if self._rank == target else packing.read(tensor)
        reduce_op = checks.reduction(opts.reduceOp, tensor.dtype)

        def start(terms: Terms) -> Sequence[Pending]:
            return [self.carrier.reduce(packed, target, reduce_op, terms)]

        return self._launch("reduce", [tensor], [tensor], start, opts, packing)

    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        opts = forms.options(c10d.GatherOptions, opts, timeout=timeout, root=root)
        tensor = checks.tensor(checks.one(input_tensors, "gather"), "gather")
        target = checks.root(opts.rootRank, self._size, "gather")
        outputs = checks.root_list(
            output_tensors, tensor, is_root=self._rank == target, size=self._size, what="gather", list_name="output"
        )
        packing = Packing()
        recvs = [packing.write(output) for output in outputs]
        sends: list[Tensor | None] = [None] * self._size
        sends[target] = packing.read_apart(tensor, recvs)
        return self._exchange(Kind.GATHER, [tensor], outputs, sends, recvs, opts, packing, root=target)

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        opts = forms.options(c10d.ScatterOptions, opts, timeout=timeout, root=root)
        tensor = checks.tensor(checks.one(output_tensors, "scatter"), "scatter")
        source = checks.root(opts.rootRank, self._size, "scatter")
        inputs = checks.root_list(
            input_tensors, tensor, is_root=self._rank == source, size=self._size, what="scatter", list_name="input"
        )
        packing = Packing()
        recvs: list[Tensor | None] = [None] * self._size
        recvs[source] = packed = packing.write(tensor)
        sends = [packing.read_apart(piece, [packed]) for piece in inputs]
        return self._exchange(Kind.SCATTER, inputs, [tensor], sends, recvs, opts, packing, root=source)

    # -- from all to all -------------------------------------------------------------------------------------

    def allgather(
        self, output_tensors: Sequence[Any], input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        opts = forms.options(c10d.AllgatherOptions, opts, timeout=timeout)
        tensor = checks.tensor(checks.one(input_tensors, "all_gather"), "all_gather")
        outputs = checks.list_of(output_tensors, "all_gather")
        checks.pieces(outputs, tensor, size=self._size, what="all_gather", list_name="output")
        return self._all_gather([outputs], [tensor], opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> Any:
        outputs = checks.gathered(output_lists, input_list, size=self._size)
        return self._all_gather(outputs, input_list, opts or forms.default(c10d.AllgatherOptions))

    def _all_gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Any:
        packing = Packing()
        pairs = []
        for everybodys, mine in zip(outputs, inputs, strict=True):
            packed = [packing.write(output) for output in everybodys]
            pairs.append((packed, packing.read_apart(mine, packed)))
        results = [output for everybodys in outputs for output in everybodys]
        return self._launch("all_gather", inputs, results, partial(self._start_gathers, pairs), opts, packing)

    def _start_gathers(self, pairs: Sequence[tuple[Sequence[Tensor] | Tensor, Tensor]], terms: Terms) -> list[Pending]:
        return [self.carrier.all_gather(*pair, terms) for pair in pairs]

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        checks.wholes(outputs, inputs, size=self._size, what="all_gather_single")
        packing = Packing()
        pairs = []
        for output, mine in zip(outputs, inputs, strict=True):
            rows = packing.write(output).view(self._size, mine.numel())
            packed = packing.read(mine)
            if packed.data_ptr() != rows[self._rank].data_ptr():  # in place, as FSDP does it, needs no copy
                packed = packing.read_apart(packed, [rows])
            pairs.append((rows, packed))
        start = partial(self._start_gathers, pairs)
        return self._launch(
            "all_gather", inputs, list(outputs), start, opts or forms.default(c10d.AllgatherOptions), packing
        )

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> Any:
        opts = forms.options(c10d.ReduceScatterOptions, opts, timeout=timeout, op=op)
        output = checks.tensor(checks.one(output_tensors, "reduce_scatter"), "reduce_scatter")
        inputs = checks.list_of(input_tensors, "reduce_scatter")
        checks.same_type(inputs, "reduce_scatter")
        if len(inputs) != self._size:
            raise BadCollectiveError("invalid input tensor list size, must be world size")
        checks.pieces([inputs[self._rank]], output, size=1, what="reduce_scatter", list_name="input")
        packing = Packing()
        packed = packing.write(output)
        pieces = [packing.read_apart(piece, [packed]) for piece in inputs]
        reduce_op = checks.reduction(opts.reduceOp, output.dtype)

        def start(terms: Terms) -> Sequence[Pending]:
            return [self.carrier.reduce_scatter(packed, pieces, reduce_op, terms)]

        return self._launch("reduce_scatter", inputs, [output], start, opts, packing)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        opts = opts or forms.default(c10d.ReduceScatterOptions)
        checks.wholes(inputs, outputs, size=self._size, what="reduce_scatter_single")
        packing = Packing()
        triples = []
        for output, whole in zip(outputs, inputs, strict=True):
            packed = packing.write(output)
            rows = packing.read(whole).view(self._size, output.numel())
            if packed.data_ptr() != rows[self._rank].data_ptr():
                rows = packing.read_apart(rows, [packed])
            triples.append((packed, rows, checks.reduction(opts.reduceOp, output.dtype)))

        def start(terms: Terms) -> Sequence[Pending]:
            return [self.carrier.reduce_scatter(*triple, terms) for triple in triples]

        return self._launch("reduce_scatter", inputs, list(outputs), start, opts, packing)

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
        opts = opts or forms.default(c10d.AllToAllOptions)
        return self._exchange(Kind.ALL_TO_ALL, input_tensors, output_tensors, sends, recvs, opts, packing)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        opts = forms.options(c10d.AllToAllOptions, opts, timeout=timeout)
        checks.same_type([input, output], "all_to_all_single")
        packing = Packing()
        packed = packing.write(output)
        recvs = checks.split(packed, output_split_sizes, size=self._size)
        sends = checks.split(packing.read_apart(input, [packed]), input_split_sizes, size=self._size)
        return self._exchange(Kind.ALL_TO_ALL, [input], [output], sends, recvs, opts, packing)

    def _exchange(
        self,
        kind: Kind,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        sends: Sequence[Tensor | None],
        recvs: Sequence[Tensor | None],
        opts: Any,
        packing: Packing,
        *,
        root: int = -1,
    ) -> Any:
        """Begin an exchange. An empty list means that there is nothing for (or from) anybody."""
        nothing = [None] * self._size

        def start(terms: Terms) -> Sequence[Pending]:
            return [self.carrier.exchange(sends or nothing, recvs or nothing, terms, kind=kind, root=root)]

        return self._launch(kind.name.lower(), inputs, list(outputs), start, opts, packing)

    # torch's older names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- barrier, messages -----------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = forms.options(c10d.BarrierOptions, opts, timeout=timeout)
        return self._launch("barrier", [], [], lambda terms: [self.carrier.barrier(terms)], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come; every barrier of ours does."""
        # Here zero means no time at all, while to the kernel it means no limit.
        limit_s = self._timeout_s if timeout is None else max(timeout.total_seconds(), 1e-6)
        self.carrier.barrier(Terms(limit_s, inline=True)).wait()

    _wait_for_pending_works = monitored_barrier

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Any:
        tensor = checks.tensor(checks.one(tensors, "send"), "send")
        to = checks.peer(dstRank, me=self._rank, size=self._size, what="send")
        packed = Packing().read(tensor)
        pending = self.carrier.send(packed, to, checks.tag(tag), self._timeout_s)
        return self._message("send", tensor, pending, None)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Any:
        frm = checks.peer(srcRank, me=self._rank, size=self._size, what="recv")
        return self._recv("recv", tensors, frm, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        return self._recv("recvAnySource", tensors, None, tag)

    def _recv(self, what: str, tensors: Sequence[Tensor], frm: int | None, tag: int) -> Any:
        tensor = checks.tensor(checks.one(tensors, what), what)
        packing = Packing()
        pending = self.carrier.recv(packing.write(tensor), frm, checks.tag(tag), self._timeout_s)
        return self._message(what, tensor, pending, packing.unpack if packing else None)

    def _message(self, what: str, tensor: Tensor, pending: Pending, after: Callable[[], None] | None) -> Any:
        on_end = _torch.start_profiler_range(f"shm:{what}", [tensor]) if _torch.is_profiling() else None
        return ShmWork((pending,), [tensor], herald=None, after=after, on_end=on_end)

    # -- how a collective is started -------------------------------------------------------------------------

    def _limit_s(self, opts: Any) -> float:
        asked = opts.timeout.total_seconds()
        return asked if asked > 0 else self._timeout_s

    def _launch(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        start: Callable[[Terms], Sequence[Pending]],
        opts: Any,
        packing: Packing | None = None,
        after: Callable[[], None] | None = None,
    ) -> Any:
        """Begin a collective. ``after`` is called when it has ended well; by default it unpacks the results."""
        self._sequence += 1
        if packing:
            after = packing.unpack
        on_end = _torch.start_profiler_range(f"shm:{name}", inputs) if _torch.is_profiling() else None
        inline = not opts.asyncOp
        try:
            pending = start(Terms(self._limit_s(opts), inline))
            if not inline:
                work = ShmWork(pending, outputs, herald=self._herald, after=after, on_end=on_end)
                if after is not None or on_end is not None:
                    # Somebody may look at the result without having waited through this work.
                    self._herald.watch(work)
                return work
            for each in pending:
                each.wait()
        except BaseException:
            if on_end is not None:
                on_end()
            raise
        if after is not None:
            after()
        if on_end is not None:
            on_end()
        return ENDED


def _end(carrier: Carrier, herald: Herald, pid: int) -> None:
    if os.getpid() != pid:
        # A fork is not the rank; it only lets go of its copy of the memory.
        carrier.unmap()
        return
    carrier.close()
    herald.close()
    carrier.unmap()
    release(carrier)
