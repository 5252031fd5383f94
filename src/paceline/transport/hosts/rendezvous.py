"""How the ranks of a new group find out which of them share memory, and agree on using it.

Ranks agree over the group's store (``control.agree``), since there is no connection between them yet. Each brings three
words, one after another, and learns those of all ranks, so that all come to the same conclusion:

1. *hello*: the name of a small segment with a secret in it, and which kernel this rank has.
2. *view*: whose segment this rank could open and read the secret in. Ranks that see each other are a host; its lowest
   rank makes the host's control segment and names it here.
3. *acceptance*: the control segment is mapped and accepted, or why not.

Whatever goes wrong on any rank is a reason for all ranks to do without shared memory. Only a rank that says nothing at
all is an error, which is raised after the time-out.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch.distributed import PrefixStore, Store

from paceline.control.board import Board
from paceline.control.store_line import StoreLine
from paceline.control.store_thread import ANSWER_S, StoreThread
from paceline.control.waiter import Patience
from paceline.errors import DisagreementError, NoRoomError, PacelineError, RankLostError
from paceline.transport.shm import codes, kernel
from paceline.transport.shm.segment import Segment

W = TypeVar("W", bound=tuple[Any, ...])

_PROBE_BYTES = 4096
_TIMEOUT = timedelta(minutes=5)
_SECRET_BYTES = 16
_TEXT_CHARACTERS = 1000

# Two ranks that are threads of one process cannot use the transport, because record locks belong to the process. Ranks
# recognise such a case by this token.
_process = secrets.token_hex(_SECRET_BYTES)


def _become_another_process() -> None:
    global _process
    _process = secrets.token_hex(_SECRET_BYTES)


os.register_at_fork(after_in_child=_become_another_process)


class _Hello(NamedTuple):
    """What a rank says first."""

    problem: str
    """Why it cannot share memory; empty if it can."""
    abi: int
    process: str
    segment: str = ""
    secret: bytes = b""


class _View(NamedTuple):
    """What a rank says second."""

    seen: bytes
    control: str
    problem: str

    def ranks(self) -> tuple[int, ...]:
        """The ranks that it shares memory with. ``seen`` holds them as bytes, 4 for each rank."""
        return struct.unpack(f"<{len(self.seen) // 4}I", self.seen[: len(self.seen) // 4 * 4])


class _Acceptance(NamedTuple):
    """What a rank says last."""

    problem: str


@dataclass(frozen=True)
class HostMap:
    """Which ranks share memory, as they found out together. All ranks have the same, except for the last two fields."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of the group by host. A host's ranks are in order, and hosts are in the order of their lowest ranks."""
    reason: str | None
    """Why shared memory is not used, or None if it is."""
    store: Store
    """A store for this group alone, unlike the one that was given ([Note: names that come again])."""
    endpoint: kernel.Endpoint | None = None
    """This rank's end of its host's group. None without shared memory, and for a host with one rank of several."""
    control: Segment | None = None
    """The segment that the endpoint lives in."""


def meet(
    store: Store, *, rank: int, size: int, timeout: timedelta = _TIMEOUT, names: Sequence[int] | None = None
) -> HostMap:
    """Find the hosts of a group and open an endpoint on each. This is a collective of all ``size`` ranks.

    ``names`` is what the ranks are called in messages, usually their numbers among all processes.
    """
    names = names or range(size)
    talk = _Talk(store, rank=rank, size=size, timeout=timeout, names=names)
    with contextlib.ExitStack() as ends:
        hello, probe = _hello()
        if probe is not None:
            ends.enter_context(probe)
        hellos = talk.exchange(_Hello, hello)
        reason = _first([theirs.problem for theirs in hellos], names) or _incompatible(hellos, names)
        if reason is not None:
            # All ranks have heard the same words and know the reason, so nobody says anything further.
            return HostMap(hosts=_apart(size), reason=reason, store=talk.store)

        seen = [other for other in range(size) if other == rank or _is_seen(hellos[other])]
        opening = _Opening(rank=rank, ranks=seen, names=names)
        try:
            if len(seen) > 1 or size == 1:
                opening.create()
            views = talk.exchange(_View, _View(struct.pack(f"<{len(seen)}I", *seen), opening.name, opening.problem))
            hosts = _partition([view.ranks() for view in views])
            if hosts is None:
                return HostMap(hosts=_apart(size), reason=_disorder(views, names), store=talk.store)
            reason = _first([view.problem for view in views], names) or _unnamed(hosts, views, names)
            if reason is None:
                opening.join(views[seen[0]].control)
            acceptances = talk.exchange(_Acceptance, _Acceptance(opening.problem))
            reason = reason or _first([theirs.problem for theirs in acceptances], names)
            if reason is not None:
                return HostMap(hosts=hosts, reason=reason, store=talk.store)
            endpoint, control = opening.keep()
            return HostMap(hosts=hosts, reason=None, endpoint=endpoint, control=control, store=talk.store)
        finally:
            opening.end()


class _Talk:
    """Agreements about the making of a group. A rank that does not come is an error, which names it."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> None:
        self._timeout_s = timeout.total_seconds()
        self._names = names
        asking = StoreThread()
        # [Note: names that come again] A store may outlive a group and then serve the next group of the same name, as
        # in elastic restarts. Ranks of the new group must not take words and addresses of the old one for theirs. So
        # every rank counts its own groups. The counts are equal, since making a group is a collective.
        with _errors_explained():
            number = asking.run(store.add, f"shm/round/{rank}", 1, within_s=self._timeout_s + ANSWER_S)
        self.store = PrefixStore(f"shm/{number}", store)
        board = Board(self.store, name=f"shm/{number}", store_thread=asking)
        self._line = StoreLine(board, rank=rank, size=size, waiter=lambda topic, timeout_s: Patience(timeout_s))

    def exchange(self, kind: Callable[..., W], word: W) -> list[W]:
        """Everybody's ``word``, by rank."""
        with _errors_explained():
            found = self._line.agree(type(word).__name__, *word, timeout_s=self._timeout_s)
        if found.missing:
            silent = [self._names[rank] for rank in found.missing]
            raise RankLostError(
                f"rank {', '.join(map(str, silent))} did not come to the making of a process group within "
                f"its time-out of {self._timeout_s:.0f} s. Look at the output of that rank first.",
                rank=silent[0] if len(silent) == 1 else None,
            )
        return [kind(*theirs) for theirs in found.words if theirs is not None]


@contextlib.contextmanager
def _errors_explained() -> Iterator[None]:
    """Turn errors of the store into errors about the group that cannot be made."""
    try:
        yield
    except DisagreementError:
        raise
    except RuntimeError as error:
        raise RankLostError(f"a process group could not be made: {error}") from error


class _Opening:
    """The control segment and endpoint of this rank's host, as far as they have been made."""

    def __init__(self, *, rank: int, ranks: Sequence[int], names: Sequence[int]) -> None:
        self._names = [names[other] for other in ranks]
        self.name = ""
        self.problem = ""
        self._rank = rank
        self._ranks = ranks
        self._control: Segment | None = None
        self._endpoint: kernel.Endpoint | None = None

    def create(self) -> None:
        """On the host's lowest rank: make the segment and its endpoint, which others wait for."""
        if self._rank == self._ranks[0]:
            self._try(lambda: Segment.create(kernel.control_nbytes(len(self._ranks))), create=True)

    def join(self, name: str) -> None:
        """On the other ranks: map the segment. All ranks that do so have agreed on ``ranks``."""
        if self._control is None and name:
            self._try(
                lambda: Segment.open(name, nbytes=kernel.control_nbytes(len(self._ranks))),
                create=False,
            )

    def keep(self) -> tuple[kernel.Endpoint | None, Segment | None]:
        """Hand over the segment, which every rank has mapped, after taking its name away."""
        if self._control is not None:
            self._control.unlink()
        endpoint, control = self._endpoint, self._control
        self._endpoint = self._control = None
        return endpoint, control

    def end(self) -> None:
        """Undo what was not handed over."""
        if self._endpoint is not None:
            self._endpoint.abort()
        if self._control is not None:
            self._control.unlink()
            self._control.close()

    def _try(self, segment: Callable[[], Segment], *, create: bool) -> None:
        try:
            self._control = segment()
            self.name = self._control.name
            self._endpoint = kernel.Endpoint(
                address=self._control.address,
                nbytes=self._control.nbytes,
                fd=self._control.fd,
                rank=self._ranks.index(self._rank),
                size=len(self._ranks),
                create=create,
                names=self._names,
            )
        except (PacelineError, OSError) as error:
            self.problem = str(error)


def _hello() -> tuple[_Hello, Segment | None]:
    hello = _Hello(kernel.reason_unavailable() or "", codes.ABI, _process)
    if hello.problem:
        return hello, None
    try:
        probe = Segment.create(_PROBE_BYTES)
    except (NoRoomError, OSError) as error:
        return hello._replace(problem=str(error)), None
    secret = secrets.token_bytes(_SECRET_BYTES)
    probe.memory[:_SECRET_BYTES] = secret
    return hello._replace(segment=probe.name, secret=secret), probe


def _is_seen(hello: _Hello) -> bool:
    """Whether this rank shares memory with the one that said ``hello``."""
    try:
        probe = Segment.open(hello.segment, nbytes=_PROBE_BYTES)
    except (PacelineError, OSError):
        return False
    try:
        return bool(probe.memory[:_SECRET_BYTES] == hello.secret)
    finally:
        probe.close()


def _first(problems: Sequence[str], names: Sequence[int]) -> str | None:
    """The lowest rank's problem, with its rank."""
    told = zip(names, problems, strict=True)
    return next((f"rank {rank}: {problem[:_TEXT_CHARACTERS]}" for rank, problem in told if problem), None)


def _incompatible(hellos: Sequence[_Hello], names: Sequence[int]) -> str | None:
    processes: dict[str, int] = {}
    for rank, hello in zip(names, hellos, strict=True):
        if hello.abi != hellos[0].abi:
            return (
                f"rank {rank} has kernel version {hello.abi} and rank {names[0]} has {hellos[0].abi}; "
                "install the same paceline everywhere"
            )
        if hello.process in processes:
            return (
                f"ranks {processes[hello.process]} and {rank} are threads of one process; shared memory is for "
                "ranks that are processes"
            )
        processes[hello.process] = rank
    return None


def _partition(seen: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...] | None:
    """The hosts, or None if what ranks see does not divide them into hosts."""
    hosts = sorted({tuple(ranks) for ranks in seen})
    if any(rank not in ranks for rank, ranks in enumerate(seen)) or sum(map(len, hosts)) != len(seen):
        return None
    return tuple(hosts)


def _unnamed(hosts: Sequence[Sequence[int]], views: Sequence[_View], names: Sequence[int]) -> str | None:
    """The reason why ranks cannot join: a host's lowest rank has named no segment, and has told no problem."""
    leaders = [ranks[0] for ranks in hosts if len(ranks) > 1]
    return next(
        (f"rank {names[rank]} has named no control segment" for rank in leaders if not views[rank].control), None
    )


def _disorder(views: Sequence[_View], names: Sequence[int]) -> str:
    def sees(view: _View) -> str:
        # A rank that is broken may see anything.
        return str([names[other] if other < len(names) else f"{other}?" for other in view.ranks()[: len(names)]])

    said = ", ".join(f"rank {rank} sees {sees(view)}" for rank, view in zip(names, views, strict=True))
    return f"ranks do not agree on whose shared memory they see ({said})"


def _apart(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(size))
