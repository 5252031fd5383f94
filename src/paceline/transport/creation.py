"""How a group is made: its ranks meet, and its collectives go through shared memory, between hosts, or over gloo."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.transport.c10d.process_group import ShmProcessGroup
from paceline.transport.hosts.rendezvous import HostMap, meet
from paceline.transport.hosts.several_hosts import SeveralHosts
from paceline.transport.plain_groups import new_plain_group
from paceline.transport.shm.kernel import Endpoint, control_nbytes
from paceline.transport.shm.one_host import OneHost
from paceline.transport.shm.segment import Segment
from paceline.transport.shm.terms import Terms

_logger = logging.getLogger("paceline")
_said: set[str] = set()


def new_group(backend_options: Any, group_options: Any = None) -> dist.ProcessGroup:
    """Make a group with backend ``shm``. c10d calls this, and it is a collective of the group's ranks."""
    store, rank, size = backend_options.store, backend_options.group_rank, backend_options.group_size
    timeout = backend_options.timeout
    # It is empty for the default group, whose ranks have the same numbers everywhere.
    names = backend_options.global_ranks_in_group or range(size)
    between = getattr(group_options, "between", "gloo")
    found = meet(store, rank=rank, size=size, timeout=timeout, names=names)
    if found.endpoint is not None and len(found.hosts) == 1:
        one_host = OneHost(found.endpoint, found.control)
        return ShmProcessGroup(store, rank=rank, size=size, timeout=timeout, carrier=one_host)
    if found.reason is None and len(found.hosts) < size:
        carrier = _carrier_between_hosts(found, rank=rank, size=size, timeout=timeout, names=names, between=between)
        return ShmProcessGroup(store, rank=rank, size=size, timeout=timeout, carrier=carrier)
    if found.reason is not None:
        _say(found, rank=rank)
        between = "gloo"
    return new_plain_group(found.store, rank=rank, size=size, timeout=timeout, backend=between)


def _carrier_between_hosts(
    found: HostMap, *, rank: int, size: int, timeout: timedelta, names: Sequence[int], between: str
) -> SeveralHosts:
    endpoint, control = _alone(names[rank]) if found.endpoint is None else (found.endpoint, found.control)
    carrier: SeveralHosts | None = None
    try:
        carrier = SeveralHosts(
            found.store,
            rank=rank,
            size=size,
            timeout=timeout,
            hosts=found.hosts,
            endpoint=endpoint,
            control=control,
            names=names,
            between=between,
        )
        # Leaders may still be connecting. A rank that uses the group, fails and leaves meanwhile would break their
        # connections, and they would not know why. This waits longer than a leader needs to find that another one
        # does not come, because that one is then to blame.
        carrier.barrier(Terms(2 * timeout.total_seconds(), inline=True)).wait()
    except BaseException:
        # The process lives on, and must not keep the lock, the file and the threads of a group that was not made.
        if carrier is not None:
            carrier.close()
        endpoint.close()
        if control is not None:
            control.close()
        raise
    return carrier


def _alone(name: int) -> tuple[Endpoint, Segment]:
    """The endpoint of a rank that is the only one of its host."""
    control = Segment.private(control_nbytes(1))
    endpoint = Endpoint(
        address=control.address, nbytes=control.nbytes, fd=-1, rank=0, size=1, create=True, names=[name]
    )
    return endpoint, control


def _say(found: HostMap, *, rank: int) -> None:
    """Log the reason, once per process, and only on the group's first rank, since all ranks know the same."""
    reason = found.reason or ""
    # It is the same news whichever rank it was, and however many bytes were free at that moment.
    news = re.sub(r"[\d,]+", "", reason.partition(": ")[2])
    if rank == 0 and news not in _said:
        _said.add(news)
        _logger.warning("paceline: ranks use gloo instead of shared memory: %s", reason)
