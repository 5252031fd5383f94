"""``SeveralHosts``: carries the collectives of a group that spans hosts.

Inside a host ranks share memory; between hosts one rank of each, its *leader* (its lowest rank), talks for all. So a
host sends no more than one rank would. A collective runs in *stages*: inside hosts, between leaders, inside hosts
again. The stages of one collective run in one go, on the calling thread or on that of the ``stage_queue``. Messages go
from rank to rank, over gloo (``messages``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.errors import BadCollectiveError, DisagreementError
from paceline.transport.c10d import checks
from paceline.transport.hosts.connecting import connect
from paceline.transport.hosts.giving_up import GivingUp
from paceline.transport.hosts.leaders import Leaders
from paceline.transport.hosts.limits import Limits
from paceline.transport.hosts.messages import Message, Messages
from paceline.transport.hosts.parcels import Parcels, check_route
from paceline.transport.hosts.peer_reports import PeerReports
from paceline.transport.hosts.stage_queue import StageQueue, Task
from paceline.transport.shm.codes import Kind, Op, dtype_number
from paceline.transport.shm.kernel import Endpoint
from paceline.transport.shm.one_host import OneHost
from paceline.transport.shm.segment import Segment
from paceline.transport.shm.terms import Terms


class SeveralHosts:
    """This rank's connection to the others. ``hosts`` lists the ranks by host; leaders use the backend ``between``."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        size: int,
        timeout: timedelta,
        hosts: Sequence[Sequence[int]],
        endpoint: Endpoint,
        control: Segment | None,
        names: Sequence[int],
        between: str,
    ) -> None:
        self.names = names
        self.about = (
            f"{size} ranks on {len(hosts)} hosts, collectives through shared memory inside hosts and over {between} "
            "between them"
        )
        self._rank = rank
        self._size = size
        self._hosts = hosts
        self._mine = self._host_of(rank)
        self._inside = OneHost(endpoint, control)
        everybody = _torch.new_gloo(dist.PrefixStore("everybody/", store), rank=rank, size=size, timeout=timeout)
        self._reports = PeerReports(everybody, rank=rank, names=names)
        self._giving_up = GivingUp(self._reports, endpoint, me=names[rank])
        self._leaders: Leaders | None = None
        try:
            self._connect(between, store, timeout)
        except BaseException:
            self._reports.close()
            raise
        self._queue = StageQueue()

    def _connect(self, between: str, store: Store, timeout: timedelta) -> None:
        """Make connections for messages between all ranks, and those between leaders. All ranks get them or none."""
        try:
            posts = dist.PrefixStore("messages/", store)
            by_post = connect(
                lambda: _torch.new_gloo(posts, rank=self._rank, size=self._size, timeout=timeout), self._reports
            )
            self._messages = Messages(by_post)
            self._giving_up.connections.append(self._messages)
            # A rank that fails from here on hangs up, which would break connections that another is still making.
            limits = Limits(timeout.total_seconds())
            self._inside.barrier(limits.inside).wait()
            all_here = c10d.BarrierOptions()
            all_here.timeout = timedelta(seconds=limits.between_s)
            by_post.barrier(all_here).wait()
            if self._inside.rank == 0:
                address = dist.PrefixStore("leaders/", store)
                count = len(self._hosts)
                made = connect(
                    lambda: _torch.new_backend(between, address, rank=self._mine, size=count, timeout=timeout),
                    self._reports,
                )
                self._leaders = Leaders(made, hosts=self._hosts, names=self.names)
                self._giving_up.connections.append(self._leaders)
        except Exception as error:
            found = self._giving_up.of_connecting(error)
            if found is error:
                raise
            raise found from error
        except BaseException:
            self._giving_up.of_this_rank("was interrupted while it made a group")
            raise

    # -- reductions ------------------------------------------------------------------------------------------

    def all_reduce_here(self, tensor: Tensor, op: int, timeout_s: float) -> bool:
        """Return False: there is no such short cut between hosts."""
        return False

    def all_reduce(self, tensor: Tensor, op: Op, terms: Terms) -> Task:
        fold = _fold_of(op, tensor)

        def stages(limits: Limits) -> None:
            self._inside.reduce(tensor, 0, fold, limits.inside).wait()
            if self._leaders is not None:
                what = self._words("all_reduce", tensor, op=op)
                self._leaders.all_reduce(tensor, op=fold, what=what, timeout_s=limits.between_s)
                if op is Op.AVG:
                    _divide(tensor, self._size)
            self._inside.broadcast(tensor, 0, limits.after).wait()

        return self._submit("all_reduce", stages, terms)

    def reduce(self, tensor: Tensor, root: int, op: Op, terms: Terms) -> Task:
        fold = _fold_of(op, tensor)
        home = self._host_of(root)

        def stages(limits: Limits) -> None:
            # A leader that is not the root must not lose its own tensor.
            is_spoilt = self._inside.rank == 0 and self._rank != root
            total = tensor.clone() if is_spoilt else tensor
            self._inside.reduce(total, 0, fold, limits.inside).wait()
            if self._leaders is not None:
                what = self._words("reduce", tensor, op=op, root=root)
                self._leaders.reduce(total, root=home, op=fold, what=what, timeout_s=limits.between_s)
                if op is Op.AVG and self._mine == home:
                    _divide(total, self._size)
            to = self._hosts[home].index(root)
            if self._mine == home and to != 0:
                pieces = [total if local == to else None for local in range(self._inside.size)]
                self._hand_out(pieces, total if self._rank == root else total.view(-1)[:0], limits)

        return self._submit("reduce", stages, terms)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor] | Tensor, op: Op, terms: Terms) -> Task:
        fold = _fold_of(op, output)
        if not isinstance(inputs, Tensor):
            checks.pieces(inputs, output, size=self._size, what="reduce_scatter", list_name="input")
        # The sums are made in this copy, because the inputs are not ours to change.
        whole = inputs.detach().clone() if isinstance(inputs, Tensor) else torch.stack([*inputs]).detach()

        def stages(limits: Limits) -> None:
            rows = whole.view(self._size, output.numel())
            self._inside.reduce(rows, 0, fold, limits.inside).wait()
            block = rows.new_empty((self._inside.size, rows.shape[1]))
            if self._leaders is not None:
                what = self._words("reduce_scatter", output, op=op)
                self._leaders.reduce_scatter(block, rows, op=fold, what=what, timeout_s=limits.between_s)
            self._hand_out(list(block), output, limits)
            if op is Op.AVG:
                _divide(output, self._size)

        return self._submit("reduce_scatter", stages, terms)

    def _hand_out(self, pieces: Sequence[Tensor | None], mine: Tensor, limits: Limits) -> None:
        """Give each rank of this host its piece of the leader's."""
        nothing: list[Tensor | None] = [None] * self._inside.size
        sends = pieces if self._inside.rank == 0 else nothing
        self._inside.exchange(sends, [mine, *nothing[1:]], limits.after, kind=Kind.SCATTER, root=0).wait()

    # -- exchanges -------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, terms: Terms) -> Task:
        home = self._host_of(root)

        def stages(limits: Limits) -> None:
            if self._mine == home:
                self._inside.broadcast(tensor, self._hosts[home].index(root), limits.inside).wait()
            if self._leaders is not None:
                what = self._words("broadcast", tensor, root=root)
                self._leaders.broadcast(tensor, root=home, what=what, timeout_s=limits.between_s)
            if self._mine != home:
                self._inside.broadcast(tensor, 0, limits.after).wait()

        return self._submit("broadcast", stages, terms)

    def all_gather(self, outputs: Sequence[Tensor] | Tensor, tensor: Tensor, terms: Terms) -> Task:
        whole = outputs if isinstance(outputs, Tensor) else tensor.new_empty((self._size, *tensor.shape))

        def stages(limits: Limits) -> None:
            self._gather(whole, tensor, what=self._words("all_gather", tensor), limits=limits)
            if whole is not outputs:
                for output, piece in zip(outputs, whole, strict=True):
                    output.copy_(piece)

        return self._submit("all_gather", stages, terms)

    def exchange(
        self,
        sends: Sequence[Tensor | None],
        recvs: Sequence[Tensor | None],
        terms: Terms,
        *,
        kind: Kind,
        root: int = -1,
    ) -> Task:
        outgoing, incoming = _as_pieces(sends), _as_pieces(recvs)
        dtype = next(dtype_number(tensor.dtype) for tensor in (*sends, *recvs) if tensor is not None)
        name = kind.name.lower()
        what = name if root < 0 else f"{name} root {self.names[root]}"

        def stages(limits: Limits) -> None:
            # Sizes are exchanged first, because leaders have to know those of ranks that they do not talk for.
            mine = torch.tensor([piece.numel() for piece in (*outgoing, *incoming)] + [dtype])
            table = torch.empty((self._size, *mine.shape), dtype=mine.dtype)
            self._gather(table, mine, kind=kind, what=what, limits=limits)
            Parcels(
                self._inside,
                self._leaders,
                hosts=self._hosts,
                mine=self._mine,
                rank=self._rank,
                route=check_route(table, self.names, what),
                kind=kind,
                limits=limits,
            ).run(outgoing, incoming)

        return self._submit(name, stages, terms)

    def gather_unequal(
        self, sent: Tensor, dtype: torch.dtype, terms: Terms, *, most_bytes: int
    ) -> tuple[Task, Callable[[], Sequence[Tensor]]]:
        kind, what = Kind.SPARSE_ALL_REDUCE, f"sparse all_reduce({str(dtype).removeprefix('torch.')})"
        found: list[Tensor] = []

        def stages(limits: Limits) -> None:
            table = torch.empty(self._size, 2, dtype=torch.int64)
            mine = torch.tensor([sent.numel(), dtype_number(dtype)])
            self._gather(table, mine, kind=kind, what=what, limits=limits)
            nbytes, dtypes = table.t().tolist()
            for name, other in zip(self.names, dtypes, strict=True):
                if other != dtypes[0]:
                    raise DisagreementError(
                        f"all_reduce: the sparse tensors of ranks {self.names[0]} and {name} differ in dtype"
                    )
            for name, announced in zip(self.names, nbytes, strict=True):
                if not 0 <= announced <= most_bytes:
                    raise DisagreementError(
                        f"all_reduce: rank {name} announces a sparse tensor of {announced} bytes, and here one has at "
                        f"most {most_bytes}: do the tensors of ranks differ in shape?"
                    )
            # All parts get the same length, as leaders exchange rows.
            padded = sent.new_zeros(max(nbytes))
            padded[: sent.numel()] = sent
            whole = padded.new_empty((self._size, *padded.shape))
            self._gather(whole, padded, kind=kind, what=what, limits=limits)
            found.extend(row[:length] for row, length in zip(whole, nbytes, strict=True))

        return self._submit("sparse_all_reduce", stages, terms), lambda: found

    def barrier(self, terms: Terms) -> Task:
        def stages(limits: Limits) -> None:
            self._inside.barrier(limits.inside).wait()
            if self._leaders is not None:
                self._leaders.barrier(timeout_s=limits.between_s)
            self._inside.barrier(limits.after).wait()

        return self._submit("barrier", stages, terms)

    def _gather(self, whole: Tensor, part: Tensor, *, kind: Kind = Kind.ALL_GATHER, what: str, limits: Limits) -> None:
        """Copy everybody's ``part`` to the rows of ``whole``, by rank."""
        block = part.new_empty((self._inside.size, *part.shape))
        self._inside.all_gather(block, part, limits.inside, kind=kind).wait()
        if self._leaders is not None:
            self._leaders.all_gather(whole, block, what=what, timeout_s=limits.between_s)
        self._inside.broadcast(whole, 0, limits.after).wait()

    # -- messages --------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int, timeout_s: float) -> Message:
        """``timeout_s`` is not used: messages have the time-out that gloo was made with."""
        return self._message("send", [to], lambda: self._messages.send(_as_bytes(tensor), to, tag))

    def recv(self, tensor: Tensor, frm: int | None, tag: int, timeout_s: float) -> Message:
        if frm is not None:
            return self._message("recv", [frm], lambda: self._messages.recv(_as_bytes(tensor), frm, tag))
        # gloo goes on waiting when a rank is lost that the message might have come from. So a report makes us hang up.
        self._reports.alert(self._messages.hang_up)
        everybody = range(self._size)
        return self._message("recvAnySource", everybody, lambda: self._messages.recv(_as_bytes(tensor), None, tag))

    def _message(self, what: str, suspects: Sequence[int], begin: Callable[[], Any]) -> Message:
        def explain(error: Exception) -> Exception:
            return self._giving_up.of_exchange(suspects, f"{what} failed: {error}")

        try:
            return Message(begin(), explain)
        except RuntimeError as error:
            raise explain(error) from error

    # -- memory and the end ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, timeout_s: float, wait: Callable[[Any], None] | None) -> None:
        """Return None: there is no memory that all ranks have mapped."""
        return None

    def abort(self) -> None:
        self._giving_up.of_this_rank("has aborted the group")

    def close(self) -> None:
        self._queue.close()
        self._inside.close()
        if self._leaders is not None:
            self._leaders.hang_up()
        self._reports.close()

    def unmap(self) -> None:
        self._inside.unmap()

    # -- how stages are run ----------------------------------------------------------------------------------

    def _submit(self, name: str, stages: Callable[[Limits], None], terms: Terms) -> Task:
        limits = Limits(terms.timeout_s)

        def run() -> None:
            try:
                with torch.no_grad():
                    stages(limits)
            except Exception as error:
                leaders = [ranks[0] for ranks in self._hosts]
                raise self._giving_up.of_collective(name, error, leaders=leaders) from error
            except BaseException:
                # After Ctrl-C, the others must not be left waiting.
                self._giving_up.of_this_rank(f"was interrupted in {name}")
                raise

        return self._queue.submit(run, inline=terms.inline)

    def _host_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self._hosts) if rank in ranks)

    def _words(self, name: str, tensor: Tensor, *, op: Op | None = None, root: int | None = None) -> str:
        """What a rank is about to do, for the comparison between hosts."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        # As inside a host, the dtype of an empty tensor does not count: it is often made without thinking of one.
        moved = f"{tensor.numel()} x {dtype}" if tensor.numel() or op is not None else "nothing"
        of_root = "" if root is None else f" root {self.names[root]}"
        return f"{name}({'' if op is None else f'{op.name}, '}{moved}){of_root}"


def _fold_of(op: Op, tensor: Tensor) -> Op:
    """What stages do for ``op``: a mean is a sum that is divided at the end."""
    if tensor.dtype is torch.uint64 and op in (Op.MIN, Op.MAX, Op.AVG):
        raise BadCollectiveError(f"{op.name} of torch.uint64 cannot be taken between hosts: use torch.int64")
    return Op.SUM if op is Op.AVG else op


def _divide(total: Tensor, by: int) -> None:
    """Make a mean of a sum. Integers are rounded toward zero, as they are inside a host."""
    if total.is_floating_point() or total.is_complex():
        total.div_(by)
    else:
        # torch does not divide all kinds of integers.
        total.copy_(total.long().div_(by, rounding_mode="trunc"))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes, since gloo does not know all dtypes."""
    return tensor.detach().view(-1).view(torch.uint8)


def _as_pieces(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8)
    return [nothing if tensor is None else _as_bytes(tensor) for tensor in tensors]
