"""Which process each rank is: put up by the ranks themselves, so that others of its host can see how it is doing.

A rank signs when it joins (`paceline.init`) or makes its first channel, in the store of the default group. A signature
outlives its process, unlike a file that one that ends well takes away.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence

import torch.distributed as dist

from paceline import _torch
from paceline.control.board import Board
from paceline.control.errands import Errands, lines_of
from paceline.control.progress import Process, process_state, this_process
from paceline.control.wire import Kind


class Census:
    """The processes of a group's ranks."""

    def __init__(self, board: Board, *, ranks: Sequence[int]) -> None:
        """``ranks``: by their rank in the group, what they are called in the default group."""
        self._board = board
        self._ranks = ranks
        self._known: dict[int, Process] = {}

    def sign(self, rank: int) -> None:
        """This process is ``rank``; nothing but what others can know of it depends on that being told."""
        me = this_process()
        with contextlib.suppress(dist.DistError):
            self._board.put(f"process/{self._ranks[rank]}", Kind.PROCESS, me.pid, me.born, me.host)

    def state(self, rank: int) -> str:
        """``running``, ``stopped`` or ``gone``; empty if it is of another host, or has not signed."""
        if rank not in self._known:
            with contextlib.suppress(dist.DistError):
                match self._board.read(f"process/{self._ranks[rank]}", Kind.PROCESS):
                    case (int(pid), int(born), str(host)):
                        self._known[rank] = Process(pid, born, host)
        found = self._known.get(rank)
        return process_state(found) if found is not None else ""


def sign_in(group: dist.ProcessGroup) -> None:
    """Let others know which process this rank is, before it has a channel: they may wait for it to make one."""
    errands = lines_of(group).own
    with contextlib.suppress(dist.DistError):
        ranks = range(dist.get_world_size(group))
        census_of(group, errands.run(job_of, group), errands, ranks=ranks).sign(dist.get_rank(group))


def census_of(world: dist.ProcessGroup, job: str, errands: Errands, *, ranks: Sequence[int]) -> Census:
    """The census in the store of the default group, whose name is ``job``."""
    store = dist.PrefixStore("paceline", _torch.group_store(world))
    return Census(Board(store, name=job, errands=errands), ranks=ranks)


def job_of(group: dist.ProcessGroup) -> str:
    """A name that one rank of the group made up and all have."""
    store = dist.PrefixStore("paceline", _torch.group_store(group))
    name: bytes = store.compare_set("job", "", uuid.uuid4().hex)
    return name.decode()
