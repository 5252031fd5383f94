"""Which process each rank is. Every rank puts this up itself, so that others of its host can see how it is doing.

A rank signs when it joins (`paceline.init`) or makes its first channel, in the store of the default group. A signature
outlives its process, unlike the file of a rank that ends well.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence

import torch.distributed as dist

from paceline import _torch
from paceline.control import seal
from paceline.control.board import Board
from paceline.control.processes import Process, process_state, this_process
from paceline.control.store_thread import StoreThread, store_threads_of
from paceline.control.wire import MessageKind


class Census:
    """The processes of a group's ranks."""

    def __init__(self, board: Board, *, ranks: Sequence[int]) -> None:
        """``ranks`` gives, by the rank in the group, the rank in the default group."""
        self._board = board
        self._ranks = ranks
        self._known: dict[int, Process] = {}

    def sign(self, rank: int) -> None:
        """Tell the others that this process is ``rank``. If that fails, they only know less about it."""
        me = this_process()
        with contextlib.suppress(dist.DistError):
            self._board.put(f"process/{self._ranks[rank]}", MessageKind.PROCESS, me.pid, me.born, me.host)

    def state(self, rank: int) -> str:
        """``running``, ``stopped`` or ``gone``; empty if the rank is on another host, or has not signed."""
        if rank not in range(len(self._ranks)):
            # Another rank may have blamed a rank that does not exist.
            return ""
        if rank not in self._known:
            with contextlib.suppress(dist.DistError):
                match self._board.read(f"process/{self._ranks[rank]}", MessageKind.PROCESS):
                    case (int(pid), int(born), str(host)) if pid > 0:
                        self._known[rank] = Process(pid, born, host)
        found = self._known.get(rank)
        return process_state(found) if found is not None else ""


def sign_in(group: dist.ProcessGroup) -> None:
    """Let others know which process this rank is, before it has a channel: they may wait for it to make one."""
    store_thread = store_threads_of(group).own
    with contextlib.suppress(dist.DistError):
        ranks = range(dist.get_world_size(group))
        census_of(group, store_thread.run(job_of, group), store_thread, ranks=ranks).sign(dist.get_rank(group))


def census_of(world: dist.ProcessGroup, job: str, store_thread: StoreThread, *, ranks: Sequence[int]) -> Census:
    """The census in the store of the default group, whose name is ``job``."""
    store = dist.PrefixStore("paceline", _torch.group_store(world))
    return Census(Board(store, name=job, store_thread=store_thread), ranks=ranks)


def job_of(group: dist.ProcessGroup) -> str:
    """The name of the group's job. One rank made it up, and all ranks share it."""
    store = dist.PrefixStore("paceline", _torch.group_store(group))
    said: bytes = store.compare_set("job", "", uuid.uuid4().hex)
    # Files are called after it. Somebody else may have put up anything, but cannot choose what comes out of the secret.
    return seal.make("job", said)[seal.MARK_BYTES :].hex()
