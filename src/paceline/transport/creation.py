"""How a group comes to be: the ranks meet, and get shared memory, hosts in between, or gloo."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from paceline import _torch
from paceline.transport.hosts import HostsProcessGroup
from paceline.transport.process_group import ShmProcessGroup
from paceline.transport.rendezvous import Meeting, meet

_logger = logging.getLogger("paceline")
_said: set[str] = set()


def new_group(backend_options: Any, group_options: Any = None) -> dist.ProcessGroup:
    """What c10d calls for a group with backend ``shm``: a collective of its ranks."""
    store, rank, size = backend_options.store, backend_options.group_rank, backend_options.group_size
    timeout = backend_options.timeout
    # Empty for the default group, whose ranks are called by the same numbers everywhere.
    names = backend_options.global_ranks_in_group or range(size)
    between = getattr(group_options, "between", "gloo")
    meeting = meet(store, rank=rank, size=size, timeout=timeout, names=names)
    if meeting.channel is not None and meeting.control is not None and len(meeting.hosts) == 1:
        return ShmProcessGroup(
            store, rank=rank, size=size, timeout=timeout, channel=meeting.channel, control=meeting.control
        )
    if meeting.reason is None and len(meeting.hosts) < size:
        try:
            return HostsProcessGroup(
                meeting.store,
                rank=rank,
                size=size,
                timeout=timeout,
                hosts=meeting.hosts,
                channel=meeting.channel,
                control=meeting.control,
                names=names,
                between=between,
            )
        except BaseException:
            # The process lives on, and must not keep the lock and the file of a group that there is not.
            for part in (meeting.channel, meeting.control):
                if part is not None:
                    part.close()
            raise
    if meeting.reason is not None:
        _say(meeting, rank=rank)
        between = "gloo"
    return PlainGroup(meeting.store, rank=rank, size=size, timeout=timeout, backend=between)


class PlainGroup(_torch.PythonProcessGroup):  # type: ignore[misc]
    """A group with backend ``shm`` whose ranks do not share memory, or are one a host: another backend alone."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout: Any, backend: str) -> None:
        super().__init__(rank, size)
        made = _torch.new_backend(
            backend, dist.PrefixStore(f"{backend}/", store), rank=rank, size=size, timeout=timeout
        )
        _torch.adopt_backend(self, made)
        self.carried = f"{size} ranks, collectives over {backend}"
        self.adds_sparse = backend == dist.Backend.GLOO


def _say(meeting: Meeting, *, rank: int) -> None:
    """Once a process, on the group's first rank: all ranks know the same."""
    reason = meeting.reason or ""
    # Which rank it was may differ from group to group, and is the same news.
    news = reason.partition(": ")[2]
    if rank == 0 and news not in _said:
        _said.add(news)
        _logger.warning("paceline: shared memory is not used between ranks, gloo is: %s", reason)
