"""``HostsProcessGroup``: a group that spans hosts.

Inside a host ranks share memory; between hosts one rank of each, its *leader* (its lowest rank), talks for all. So what
a host sends is what one rank would. Collectives that have no better way than everybody to everybody (messages, gather,
scatter, all_to_all) go over a gloo group of all ranks.

A collective here is stages: shared memory, leaders, shared memory. When a stage fails, the rank tells its host, and a
leader tells the others (``lines``) and hangs up on them, so that nobody waits for what cannot come and all know why.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.errors import PacelineError
from paceline.transport import checks, forms
from paceline.transport.checks import KERNEL_CODES
from paceline.transport.codes import Op
from paceline.transport.conductor import Conductor
from paceline.transport.herald import Herald
from paceline.transport.host import Host
from paceline.transport.kernel import Channel
from paceline.transport.leaders import Leaders
from paceline.transport.lines import Lines, Report
from paceline.transport.packing import Packing
from paceline.transport.segment import Segment, hold, release
from paceline.transport.work import ENDED, ShmWork

# How long a leader waits for the others to say why: all are to know within 2 s.
_CAUSE_S = 1.2


class HostsProcessGroup(_torch.PythonProcessGroup):  # type: ignore[misc]
    """Shared memory inside hosts, another backend between them."""

    adds_sparse = True  # over gloo

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        hosts: Sequence[Sequence[int]],
        channel: Channel | None,
        control: Segment | None,
        names: Sequence[int],
        between: str = "gloo",
    ) -> None:
        """``names`` is what the ranks are called in messages: their numbers among all processes."""
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._hosts = hosts
        self._name = names[rank]
        self._timeout_s = timeout.total_seconds()
        mine = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self._mine = mine
        _torch.adopt_backend(
            self, _torch.new_gloo(dist.PrefixStore("everybody/", store), rank=rank, size=size, timeout=timeout)
        )
        self._host = Host(channel, size=len(hosts[mine]), rank=hosts[mine].index(rank))
        self._leaders: Leaders | None = None
        self._lines: Lines | None = None
        if self._host.rank == 0:
            backend = _torch.new_backend(
                between, dist.PrefixStore("leaders/", store), rank=mine, size=len(hosts), timeout=timeout
            )
            self._leaders = Leaders(backend, rank=mine, hosts=hosts)
            self._lines = Lines(store, rank=mine, leaders=[names[ranks[0]] for ranks in hosts])
        self._herald = Herald()
        self._conductor = Conductor()
        self.carried = (
            f"{size} ranks on {len(hosts)} hosts, collectives through shared memory inside hosts and over {between} "
            "between them"
        )
        used = (self._host, control)
        hold(used)
        between_hosts = (self._leaders, self._lines)
        self._ending = weakref.finalize(self, _end, used, between_hosts, self._conductor, self._herald, os.getpid())
        self._ending.atexit = False

    def getBackendName(self) -> str:
        return "shm"

    def set_timeout(self, timeout: timedelta) -> None:
        """For collectives from now on."""
        self._timeout_s = timeout.total_seconds()
        super().set_timeout(timeout)

    def shutdown(self) -> None:
        """Finish what was started and leave. May be repeated."""
        if self._ending.alive:
            self._ending()
            super().shutdown()

    def abort(self) -> None:
        """Leave at once; whatever is under way fails, here and on the other ranks."""
        self._give_up(Report(rank=self._name, lost=False, said=f"rank {self._name} has aborted the group"))
        self.shutdown()

    # -- collectives -----------------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, op: Any = None
    ) -> Any:
        opts = forms.options(c10d.AllreduceOptions, opts, default=forms.ALLREDUCE, timeout=timeout, op=op)
        tensor = _one(tensors, "all_reduce")
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            return super().allreduce([tensor], opts)
        return self._all_reduce([tensor], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        checks.same_type(tensors, "all_reduce_coalesced")
        return self._all_reduce(tensors, opts or forms.ALLREDUCE_COALESCED)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        op = _op(opts, tensors[0], "all_reduce")
        inside = Op.SUM if op is Op.AVG else op
        packing = Packing()
        packed = [packing.update(checks.tensor(tensor, "all_reduce")) for tensor in tensors]

        def stages(limit_s: float) -> None:
            for part in packed:
                self._host.reduce(part, op=inside, timeout_s=limit_s)
                if self._leaders is not None:
                    self._leaders.all_reduce(part, op=inside, timeout_s=limit_s)
                    if op is Op.AVG:
                        part.div_(self._size)
                self._host.broadcast(part, root=0, timeout_s=limit_s)

        return self._launch("all_reduce", tensors, list(tensors), stages, opts, packing)

    def broadcast(
        self, tensors: Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> Any:
        opts = forms.options(c10d.BroadcastOptions, opts, default=forms.BROADCAST, timeout=timeout, root=root)
        tensor = checks.tensor(_one(tensors, "broadcast"), "broadcast")
        source = checks.root(opts.rootRank, self._size, "broadcast")
        packing = Packing()
        packed = packing.read(tensor) if self._rank == source else packing.write(tensor)
        home = self._host_of(source)

        def stages(limit_s: float) -> None:
            if self._mine == home:
                self._host.broadcast(packed, root=self._hosts[home].index(source), timeout_s=limit_s)
            if self._leaders is not None:
                self._leaders.broadcast(packed, root=home, timeout_s=limit_s)
            if self._mine != home:
                self._host.broadcast(packed, root=0, timeout_s=limit_s)

        return self._launch("broadcast", [tensor], [tensor], stages, opts, packing)

    def reduce(
        self,
        tensors: Sequence[Tensor],
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        opts = forms.options(c10d.ReduceOptions, opts, default=forms.REDUCE, timeout=timeout, op=op, root=root)
        tensor = checks.tensor(_one(tensors, "reduce"), "reduce")
        target = checks.root(opts.rootRank, self._size, "reduce")
        reduce_op = _op(opts, tensor, "reduce")
        inside = Op.SUM if reduce_op is Op.AVG else reduce_op
        packing = Packing()
        source = packing.read(tensor)
        packed = packing.update(tensor) if self._rank == target else source
        home = self._host_of(target)

        def stages(limit_s: float) -> None:
            # A leader that is not the root must not lose its own tensor.
            total = packed if self._rank == target else source.clone() if self._host.rank == 0 else source
            self._host.reduce(total, op=inside, timeout_s=limit_s)
            if self._leaders is not None:
                self._leaders.reduce(total, root=home, op=inside, timeout_s=limit_s)
                if reduce_op is Op.AVG and self._mine == home:
                    total.div_(self._size)
            if self._mine == home:
                self._host.hand_over(total, to=self._hosts[home].index(target), timeout_s=limit_s)

        return self._launch("reduce", [tensor], [tensor], stages, opts, packing)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = forms.options(c10d.BarrierOptions, opts, default=forms.BARRIER, timeout=timeout)

        def stages(limit_s: float) -> None:
            self._host.barrier(timeout_s=limit_s)
            if self._leaders is not None:
                self._leaders.barrier(timeout_s=limit_s)
            self._host.barrier(timeout_s=limit_s)

        return self._launch("barrier", [], [], stages, opts)

    def allgather(
        self, output_tensors: Sequence[Any], input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        opts = forms.options(c10d.AllgatherOptions, opts, default=forms.ALLGATHER, timeout=timeout)
        tensor = checks.tensor(_one(input_tensors, "all_gather"), "all_gather")
        if output_tensors and not isinstance(output_tensors[0], Tensor):
            output_tensors = checks.single(output_tensors, "all_gather")  # type: ignore[assignment]
        checks.pieces(output_tensors, tensor, size=self._size, what="all_gather", list_name="output")
        outputs = list(output_tensors)
        packed = Packing().read(tensor)
        whole = packed.new_empty((self._size, *packed.shape))

        def stages(limit_s: float) -> None:
            self._gather(whole, packed, limit_s)

        def give_out() -> None:
            with torch.no_grad():
                for output, piece in zip(outputs, whole, strict=True):
                    output.copy_(piece)

        return self._launch("all_gather", [tensor], outputs, stages, opts, after=give_out)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        packing = Packing()
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole(output, tensor, size=self._size, what="all_gather_single")
            packed = packing.write(output)
            pairs.append((packed.view(self._size, -1), packing.read_apart(tensor, [packed]).view(-1)))

        def stages(limit_s: float) -> None:
            for whole, part in pairs:
                self._gather(whole, part, limit_s)

        return self._launch("all_gather", inputs, list(outputs), stages, opts or forms.ALLGATHER, packing)

    def _gather(self, whole: Tensor, part: Tensor, limit_s: float) -> None:
        """Everybody's ``part`` into the rows of ``whole``, by rank."""
        if not part.numel():
            self._host.barrier(timeout_s=limit_s)
            return
        block = part.new_empty((len(self._hosts[self._mine]), *part.shape))
        self._host.all_gather(block, part, timeout_s=limit_s)
        if self._leaders is not None:
            self._leaders.all_gather(whole, block, timeout_s=limit_s)
        self._host.broadcast(whole, root=0, timeout_s=limit_s)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        op: Any = None,
    ) -> Any:
        opts = forms.options(c10d.ReduceScatterOptions, opts, default=forms.REDUCE_SCATTER, timeout=timeout, op=op)
        output = checks.tensor(_one(output_tensors, "reduce_scatter"), "reduce_scatter")
        if input_tensors and not isinstance(input_tensors[0], Tensor):
            input_tensors = checks.single(input_tensors, "reduce_scatter")  # type: ignore[assignment]
        checks.pieces(input_tensors, output, size=self._size, what="reduce_scatter", list_name="input")
        return self._reduce_scatter([output], [torch.stack([*input_tensors])], input_tensors, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            checks.whole(tensor, output, size=self._size, what="reduce_scatter_single")
        # The sums are made in it, and what is read is not ours to change.
        copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
        return self._reduce_scatter(outputs, copies, inputs, opts or forms.REDUCE_SCATTER)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], shown: Sequence[Tensor], opts: Any
    ) -> Any:
        packing = Packing()
        op = _op(opts, outputs[0], "reduce_scatter")
        inside = Op.SUM if op is Op.AVG else op
        packed = [packing.write(output) for output in outputs]

        def stages(limit_s: float) -> None:
            for part, whole in zip(packed, wholes, strict=True):
                rows = whole.view(self._size, -1)
                self._host.reduce(rows, op=inside, timeout_s=limit_s)
                block = rows.new_empty((len(self._hosts[self._mine]), rows.shape[1]))
                if self._leaders is not None:
                    self._leaders.reduce_scatter(block, rows, op=inside, timeout_s=limit_s)
                self._host.scatter(part, block, timeout_s=limit_s)
                if op is Op.AVG:
                    part.div_(self._size)

        return self._launch("reduce_scatter", shown, list(outputs), stages, opts, packing)

    # -- older names -----------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- how they are started --------------------------------------------------------------------------------

    def _host_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self._hosts) if rank in ranks)

    def _launch(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        stages: Callable[[float], None],
        opts: Any,
        packing: Packing | None = None,
        after: Callable[[], None] | None = None,
    ) -> Any:
        if packing:
            after = packing.unpack
        asked_s = opts.timeout.total_seconds()
        limit_s = asked_s if asked_s > 0 else self._timeout_s
        on_end = _torch.start_profiler_range(f"shm:{name}", inputs) if _torch.is_profiling() else None

        def run() -> None:
            try:
                with torch.no_grad():
                    stages(limit_s)
                    if after is not None:
                        after()
            except Exception as error:
                raise self._failed(name, error) from error
            except BaseException:
                # Ctrl-C: the others are not left waiting.
                self._give_up(Report(rank=self._name, lost=False, said=f"rank {self._name} was interrupted in {name}"))
                raise
            finally:
                if on_end is not None:
                    on_end()

        inline = not opts.asyncOp
        task = self._conductor.submit(run, inline=inline)
        if inline:
            task.wait()
            return ENDED
        return ShmWork((task,), outputs, herald=self._herald)

    def _failed(self, name: str, error: Exception) -> Exception:
        """Find out why, and tell: the group cannot go on."""
        if isinstance(error, PacelineError):
            self._give_up(Report.of(error, name, rank=self._name))
            return error
        report = self._cause(name, error)
        self._give_up(report)
        return report.error()

    def _cause(self, name: str, error: Exception) -> Report:
        """Why the exchange with the other leaders has failed."""
        assert self._leaders is not None, "only leaders exchange"
        assert self._lines is not None, "leaders have lines"
        # First, as who waits for this host should find out as well, and may be the one who knows.
        self._leaders.hang_up()
        found = self._lines.find(_CAUSE_S)
        if found is not None:
            return found
        silent = self._lines.silent()
        said = f"{name}: the exchange with the other hosts failed, and ranks {silent} of them say nothing: {error}"
        return Report(rank=silent[0] if len(silent) == 1 else None, lost=True, said=said)

    def _give_up(self, report: Report) -> None:
        if self._lines is not None:
            self._lines.tell(report)
        if self._leaders is not None:
            self._leaders.hang_up()
        self._host.give_up(report.said, blamed=report.rank, is_lost=report.lost)


def _end(
    used: tuple[Host, Segment | None],
    between_hosts: tuple[Leaders | None, Lines | None],
    conductor: Conductor,
    herald: Herald,
    pid: int,
) -> None:
    host, control = used
    leaders, lines = between_hosts
    if os.getpid() == pid:
        conductor.close()
        herald.close()
        host.close()
        if leaders is not None:
            leaders.hang_up()
        if lines is not None:
            lines.close()
    if control is not None:
        control.close()
    if os.getpid() == pid:
        release(used)


def _one(tensors: Any, what: str) -> Tensor:
    return tensors if isinstance(tensors, Tensor) else checks.single(tensors, what)


def _op(opts: Any, tensor: Tensor, what: str) -> Op:
    op = hash(opts.reduceOp)
    if checks.tensor(tensor, what).dtype not in KERNEL_CODES[op]:
        raise checks.refuse_reduction(tensor.dtype, op)
    return Op(op)
