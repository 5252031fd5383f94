"""How the ranks of a new group find out which of them share memory, and agree on using it.

Everything goes through the group's store, as JSON, in three words a rank; every rank reads all of them, so all come to
the same conclusion:

1. *hello*: the name of a small segment with a secret in it, and which kernel this rank has.
2. *view*: whose segment this rank could open and read the secret in. Ranks that see each other are a host; its lowest
   rank makes the host's control segment and names it here.
3. *verdict*: the control segment is mapped and accepted, or why not.

Whatever goes wrong on any rank is a reason for all to do without shared memory; only a rank that says nothing at all is
an error (of the store, after its time-out).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store

from paceline.control.errands import ANSWER_S, Errands
from paceline.errors import NoRoomError, PacelineError, RankLostError, StoreSilentError
from paceline.transport import kernel, library
from paceline.transport.segment import Segment

T = TypeVar("T")

_PROBE_BYTES = 4096
_TIMEOUT = timedelta(minutes=5)
_SECRET_BYTES = 16

# Two ranks of one process (threads) cannot use the transport: a process has its record locks once. Ranks find that out
# by this.
_process = secrets.token_hex(_SECRET_BYTES)


def _become_another_process() -> None:
    global _process
    _process = secrets.token_hex(_SECRET_BYTES)


os.register_at_fork(after_in_child=_become_another_process)


@dataclass(frozen=True)
class Meeting:
    """What the ranks found out together; equal on all of them but for ``channel`` and ``control``."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of the group by host, each host's in order, hosts in the order of their lowest ranks."""
    reason: str | None
    """Why shared memory is not used, or None if it is."""
    store: Store
    """For this group alone, unlike the one it was given ([Note: names that come again])."""
    channel: kernel.Channel | None = None
    """This rank's end of its host's channel, if shared memory is used and the host has more ranks than this one."""
    control: Segment | None = None
    """What the channel lives in."""


def meet(
    store: Store, *, rank: int, size: int, timeout: timedelta = _TIMEOUT, names: Sequence[int] | None = None
) -> Meeting:
    """Find the hosts of a group and open a channel on each; a collective of all ``size`` ranks.

    ``names`` is what the ranks are called in messages: their numbers among all processes, say.
    """
    names = names or range(size)
    talk = _Talk(store, rank=rank, size=size, timeout=timeout, names=names)
    with contextlib.ExitStack() as ends:
        hello, probe = _hello()
        if probe is not None:
            ends.enter_context(probe)
        hellos = talk.exchange("hello", hello)
        reason = _first(hellos, "problem", names) or _incompatible(hellos, names)
        if reason is not None:
            # Known to all from the same words: nobody says anything further.
            return Meeting(hosts=_apart(size), reason=reason, store=talk.store)

        seen = [other for other in range(size) if other == rank or _is_seen(hellos[other])]
        opening = _Opening(rank=rank, ranks=seen, names=names)
        try:
            if len(seen) > 1 or size == 1:
                opening.create()
            views = talk.exchange("view", {"seen": seen, "control": opening.name, "problem": opening.problem})
            hosts = _partition([view["seen"] for view in views])
            if hosts is None:
                return Meeting(hosts=_apart(size), reason=_disorder(views, names), store=talk.store)
            reason = _first(views, "problem", names)
            if reason is None:
                opening.join(views[seen[0]]["control"])
            verdicts = talk.exchange("verdict", {"problem": opening.problem})
            reason = reason or _first(verdicts, "problem", names)
            if reason is not None:
                return Meeting(hosts=hosts, reason=reason, store=talk.store)
            channel, control = opening.keep()
            return Meeting(hosts=hosts, reason=None, channel=channel, control=control, store=talk.store)
        finally:
            opening.end()


class _Talk:
    """Words of all ranks, read by all ranks."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._names = names
        self._errands = Errands()
        # [Note: names that come again] A store may outlive a group and carry the next one of the same name (elastic
        # restarts do that), whose ranks must not take the old one's words and addresses for theirs. Every rank counts
        # its own groups; the counts are equal, since making a group is a collective.
        self.store = PrefixStore(f"shm/{self._ask(store.add, f'shm/round/{rank}', 1)}", store)

    def exchange(self, topic: str, word: dict[str, Any]) -> list[dict[str, Any]]:
        keys = [f"{topic}/{other}" for other in range(self._size)]
        self._ask(self.store.set, keys[self._rank], json.dumps(word))
        try:
            self._ask(self.store.wait, keys, self._timeout)
        except RankLostError:
            raise
        except RuntimeError as error:
            raise self._nobody_came(keys) from error
        words = [json.loads(found) for found in self._ask(lambda: [self.store.get(key) for key in keys])]
        if not all(isinstance(found, dict) for found in words):
            raise TypeError(f"a word of {topic!r} is not an object")
        return words

    def _ask(self, call: Callable[..., T], *args: Any) -> T:
        """By a thread: a store that is silent does not even heed its own time-out."""
        try:
            return self._errands.run(call, *args, within_s=self._timeout.total_seconds() + ANSWER_S)
        except StoreSilentError as error:
            raise RankLostError(f"a process group could not be made: {error}") from error

    def _nobody_came(self, keys: Sequence[str]) -> RankLostError:
        try:
            there = self._ask(lambda: [self.store.check([key]) for key in keys])
        except RankLostError as error:
            return error
        except RuntimeError as error:
            return RankLostError(f"a process group could not be made: {error}")
        silent = [name for name, came in zip(self._names, there, strict=True) if not came]
        return RankLostError(
            f"rank {', '.join(map(str, silent)) or 'unknown'} did not come to the making of a process group within "
            f"its time-out of {self._timeout.total_seconds():.0f} s. Look at the output of that rank first.",
            rank=silent[0] if len(silent) == 1 else None,
        )


class _Opening:
    """The control segment and channel of this rank's host, as far as they have come."""

    def __init__(self, *, rank: int, ranks: Sequence[int], names: Sequence[int]) -> None:
        self._names = [names[other] for other in ranks]
        self.name = ""
        self.problem: str | None = None
        self._rank = rank
        self._ranks = ranks
        self._control: Segment | None = None
        self._channel: kernel.Channel | None = None

    def create(self) -> None:
        """On the host's lowest rank: make the segment and its channel, which others wait for."""
        if self._rank == self._ranks[0]:
            self._try(lambda: Segment.create(kernel.control_nbytes(len(self._ranks))), create=True)

    def join(self, name: str) -> None:
        """On the other ranks: map the segment. All who do have agreed on ``ranks``."""
        if self._control is None and name:
            self._try(
                lambda: Segment.open(name, nbytes=kernel.control_nbytes(len(self._ranks))),
                create=False,
            )

    def keep(self) -> tuple[kernel.Channel | None, Segment | None]:
        """Every rank has mapped it: take its name away and hand it over."""
        if self._control is not None:
            self._control.unlink()
        channel, control = self._channel, self._control
        self._channel = self._control = None
        return channel, control

    def end(self) -> None:
        """Undo what was not handed over."""
        if self._channel is not None:
            self._channel.abort()
        if self._control is not None:
            self._control.unlink()
            self._control.close()

    def _try(self, segment: Callable[[], Segment], *, create: bool) -> None:
        try:
            self._control = segment()
            self.name = self._control.name
            self._channel = kernel.Channel(
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


def _hello() -> tuple[dict[str, Any], Segment | None]:
    hello: dict[str, Any] = {"problem": kernel.reason_unavailable(), "abi": library.ABI, "process": _process}
    if hello["problem"] is not None:
        return hello, None
    try:
        probe = Segment.create(_PROBE_BYTES)
    except (NoRoomError, OSError) as error:
        return hello | {"problem": str(error)}, None
    secret = secrets.token_bytes(_SECRET_BYTES)
    probe.memory[:_SECRET_BYTES] = secret
    return hello | {"segment": probe.name, "secret": secret.hex()}, probe


def _is_seen(hello: dict[str, Any]) -> bool:
    """Whether this rank shares memory with the one that said ``hello``."""
    try:
        probe = Segment.open(hello["segment"], nbytes=_PROBE_BYTES)
    except (PacelineError, OSError):
        return False
    try:
        return bool(probe.memory[:_SECRET_BYTES] == bytes.fromhex(hello["secret"]))
    finally:
        probe.close()


def _first(words: Sequence[dict[str, Any]], key: str, names: Sequence[int]) -> str | None:
    """The lowest rank's problem, with its rank."""
    for rank, word in zip(names, words, strict=True):
        if word.get(key):
            return f"rank {rank}: {word[key]}"
    return None


def _incompatible(hellos: Sequence[dict[str, Any]], names: Sequence[int]) -> str | None:
    processes: dict[str, int] = {}
    for rank, hello in zip(names, hellos, strict=True):
        if hello["abi"] != hellos[0]["abi"]:
            return (
                f"rank {rank} has kernel version {hello['abi']} and rank {names[0]} has {hellos[0]['abi']}; "
                "install the same paceline everywhere"
            )
        if hello["process"] in processes:
            return (
                f"ranks {processes[hello['process']]} and {rank} are threads of one process; shared memory is for "
                "ranks that are processes"
            )
        processes[hello["process"]] = rank
    return None


def _partition(seen: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...] | None:
    """The hosts, or None if what ranks see does not divide them into hosts."""
    hosts = sorted({tuple(ranks) for ranks in seen})
    if any(rank not in ranks for rank, ranks in enumerate(seen)) or sum(map(len, hosts)) != len(seen):
        return None
    return tuple(hosts)


def _disorder(views: Sequence[dict[str, Any]], names: Sequence[int]) -> str:
    said = ", ".join(
        f"rank {rank} sees {[names[other] for other in view['seen']]}" for rank, view in zip(names, views, strict=True)
    )
    return f"ranks do not see each other's shared memory alike ({said})"


def _apart(size: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(size))
