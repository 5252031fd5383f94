"""``HostsProcessGroup``: a group that spans hosts.

Inside a host ranks share memory; between hosts one rank of each, its *leader* (its lowest rank), talks for all. So what
a host sends is what one rank would. Only messages go from rank to rank, over gloo (``messages``). How collectives are
run and how they end is in ``stages``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed import distributed_c10d as c10d

from paceline import _torch
from paceline.transport import checks, forms
from paceline.transport.calls import one
from paceline.transport.conductor import Conductor
from paceline.transport.connecting import connect
from paceline.transport.herald import Herald
from paceline.transport.host import Host
from paceline.transport.kernel import Channel
from paceline.transport.leaders import Leaders
from paceline.transport.lines import Lines, Report
from paceline.transport.messages import Message, Messages
from paceline.transport.packing import Packing
from paceline.transport.segment import Segment, hold, release
from paceline.transport.spanning_exchanges import SpanningExchanges
from paceline.transport.spanning_reductions import SpanningReductions
from paceline.transport.stages import Limits
from paceline.transport.work import ShmWork


class HostsProcessGroup(SpanningReductions, SpanningExchanges, _torch.PythonProcessGroup):  # type: ignore[misc]
    """Shared memory inside hosts, another backend between them."""

    adds_sparse = True

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
        self._names = names
        self._timeout_s = timeout.total_seconds()
        self._mine = self._host_of(rank)
        everybody = _torch.new_gloo(dist.PrefixStore("everybody/", store), rank=rank, size=size, timeout=timeout)
        _torch.adopt_backend(self, everybody)
        self._lines = Lines(everybody, rank=rank, names=names)
        self._host = Host(channel, size=len(hosts[self._mine]), rank=hosts[self._mine].index(rank))
        self._connect(between, store, timeout)
        self._herald = Herald()
        self._conductor = Conductor()
        self.carried = (
            f"{size} ranks on {len(hosts)} hosts, collectives through shared memory inside hosts and over {between} "
            "between them"
        )
        used = (self._host, control)
        hold(used)
        ends = (self._conductor, self._herald, self._leaders, self._lines)
        self._ending = weakref.finalize(self, _end, used, ends, os.getpid())
        self._ending.atexit = False
        # Leaders may still be at it. A rank that uses the group, fails and leaves meanwhile would break their
        # connections, and they would not know why.
        here = c10d.BarrierOptions()
        here.asyncOp = False
        # Longer than it takes a leader to find that another does not come: it is that one who is to blame.
        here.timeout = 2 * timeout
        self.barrier(here)

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
        me = self._names[self._rank]
        self._give_up(Report(rank=me, why="failed", said=f"rank {me} has aborted the group"))
        self.shutdown()

    def _connect(self, between: str, store: Store, timeout: timedelta) -> None:
        """Make the connections for messages, of all ranks, and those between leaders. All or nobody has them."""
        self._connections = []
        self._leaders = None
        me = self._names[self._rank]
        try:
            posts = dist.PrefixStore("messages/", store)
            by_post = connect(
                lambda: _torch.new_gloo(posts, rank=self._rank, size=self._size, timeout=timeout), self._lines
            )
            self._messages = Messages(by_post)
            self._connections.append(self._messages)
            # Who fails from here on hangs up, which would break connections that another rank is still making.
            limits = Limits(timeout.total_seconds())
            self._host.barrier(timeout_s=limits.inside_s)
            all_here = c10d.BarrierOptions()
            all_here.timeout = timedelta(seconds=limits.between_s)
            by_post.barrier(all_here).wait()
            if self._host.rank == 0:
                meeting = dist.PrefixStore("leaders/", store)
                count = len(self._hosts)
                made = connect(
                    lambda: _torch.new_backend(between, meeting, rank=self._mine, size=count, timeout=timeout),
                    self._lines,
                )
                self._leaders = Leaders(made, hosts=self._hosts, names=self._names)
                self._connections.append(self._leaders)
        except Exception as error:
            found = self._not_connected(error)
            if found is error:
                raise
            raise found from error
        except BaseException:
            self._give_up(Report(rank=me, why="failed", said=f"rank {me} was interrupted while it made a group"))
            raise

    # -- barrier, messages -----------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        opts = forms.options(c10d.BarrierOptions, opts, default=forms.BARRIER, timeout=timeout)

        def stages(limits: Limits) -> None:
            self._host.barrier(timeout_s=limits.inside_s)
            if self._leaders is not None:
                self._leaders.barrier(timeout_s=limits.between_s)
            self._host.barrier(timeout_s=limits.after_s)

        return self._launch("barrier", [], [], stages, opts)

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Any:
        tensor = checks.tensor(one(tensors, "send"), "send")
        to = checks.peer(dstRank, me=self._rank, size=self._size, what="send")
        return self._message("send", tensor, to, tag, Packing())

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Any:
        tensor = checks.tensor(one(tensors, "recv"), "recv")
        frm = checks.peer(srcRank, me=self._rank, size=self._size, what="recv")
        return self._message("recv", tensor, frm, tag, Packing())

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        # gloo does not say that there is one less to wait for.
        self._lines.alert(self._messages.hang_up)
        tensor = checks.tensor(one(tensors, "recvAnySource"), "recvAnySource")
        return self._message("recvAnySource", tensor, None, tag, Packing())

    def _message(self, what: str, tensor: Tensor, peer: int | None, tag: int, packing: Packing) -> Any:
        suspects = range(self._size) if peer is None else [peer]
        tag = checks.tag(tag)
        packed = packing.read(tensor) if what == "send" else packing.write(tensor)
        # As bytes: gloo does not know all dtypes.
        carried = packed.detach().view(-1).view(torch.uint8)

        def explain(error: Exception) -> Exception:
            report = self._cause(suspects, f"{what} failed: {error}")
            self._give_up(report)
            return report.error()

        on_end = _torch.start_profiler_range(f"shm:{what}", [tensor]) if _torch.is_profiling() else None
        try:
            if what == "send" and peer is not None:
                work = self._messages.send(carried, peer, tag)
            else:
                work = self._messages.recv(carried, peer, tag)
        except RuntimeError as error:
            raise explain(error) from error
        after = packing.unpack if packing else None
        return ShmWork((Message(work, explain),), [tensor], herald=None, after=after, on_end=on_end, name_source=int)


def _end(used: tuple[Host, Segment | None], ends: tuple[Any, ...], pid: int) -> None:
    host, control = used
    conductor, herald, leaders, lines = ends
    if os.getpid() == pid:
        conductor.close()
        herald.close()
        host.close()
        if leaders is not None:
            leaders.hang_up()
        lines.close()
    if control is not None:
        control.close()
    if os.getpid() == pid:
        release(used)
