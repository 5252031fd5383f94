"""Ranks that talk while they compile: short notes from everybody to everybody.

Over a group of their own, so that no collective of the training is among them, and with a connection that breaks when
a rank ends. A note is six numbers; a text follows if the texts differ. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.compiler import shapes
from paceline.control import Channel
from paceline.errors import (
    DisagreementError,
    PacelineError,
    PeerFailedError,
    RankLostError,
    StateError,
    StoreSilentError,
)

# "PCL" and the version of the notes.
MAGIC = 0x50434C01
BODY_LIMIT_BYTES = 16 * 2**20
# How long a rank waits is decided here and not by the backend: compiling may take any time.
_BACKEND_TIMEOUT = timedelta(days=7)


class Kind(enum.IntEnum):
    """What a note is about."""

    GUARDS = 1
    """A compiled frame is about to run: do its guards hold?"""
    FRAME = 2
    """A frame was traced to its end: what it has seen."""
    GRAPH = 3
    """A frame is compiled, or has failed to."""
    NODE = 4
    """The first node in which graphs differ."""
    OFFER = 5
    """Whether ranks could use each other's artifacts."""
    ARTIFACTS = 6
    """The artifacts that one rank has made."""


_KINDS = frozenset(map(int, Kind))


@dataclass(frozen=True)
class Note:
    """What one rank said."""

    kind: Kind
    flag: int
    body: bytes


class Meeting:
    """Where the ranks of a group exchange notes. All ranks of the group make theirs in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        is_part = len(ranks) < dist.get_world_size()
        self._side = dist.new_group(ranks, backend="gloo", timeout=_BACKEND_TIMEOUT, use_local_synchronization=is_part)
        self.channel = Channel(self._side)
        self.rank = self.channel.rank
        self.size = self.channel.size
        self.timeout_s = _torch.group_timeout_s(group)
        self.store = dist.PrefixStore("paceline/meeting", _torch.group_store(self._side))
        self.has_ended = False
        """Something went wrong in it: ranks do not hear each other any more."""
        self._n_exchanges = 0
        # How often this rank has begun to compile a frame since the last exchange.
        self._n_begun: Counter[str] = Counter()

    def is_alive(self) -> bool:
        return _torch.group_is_alive(self._side)

    def exchange(
        self, kind: Kind, *, doing: str, flag: int = 0, body: bytes = b"", frame: str = "", patient: bool = False
    ) -> list[Note]:
        """Everybody's note, by rank. Ranks may bring notes of different kinds: then texts stay where they are.

        ``frame`` is what others may give up while this rank waits for them there. ``patient``: all others are known to
        be compiling, so that they may take any time.
        """
        if self.has_ended:
            raise StateError(
                f"Ranks cannot talk about {doing}: an exchange before it failed on rank {self.rank}, and others may be "
                "waiting in it still. Leave paceline.compiler.agreement, and make the process group anew."
            )
        self._n_exchanges = number = self._n_exchanges + 1
        n_begun = self._n_begun[frame]
        self._n_begun.clear()
        digest = int.from_bytes(hashlib.sha256(body).digest()[:8], "little", signed=True)
        mine = torch.tensor([MAGIC, number, kind, flag, digest, len(body)], dtype=torch.int64, device="cpu")
        heads = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(heads, mine, group=self._side, async_op=True)
        self._wait(work, doing, frame=frame, n_begun=n_begun, patient=patient)
        rows: list[list[int]] = [head.tolist() for head in heads]
        for rank, row in enumerate(rows):
            if row[0] != MAGIC or row[1] != number or row[2] not in _KINDS or not 0 <= row[5] <= BODY_LIMIT_BYTES:
                raise DisagreementError(
                    f"What rank {rank} said about {doing} cannot be understood on rank {self.rank}: {row}. "
                    "Run the same version of Paceline on every rank."
                )
        bodies = [body] * self.size
        if len({row[2] for row in rows}) == 1 and len({(row[4], row[5]) for row in rows}) > 1:
            bodies = self._bodies(body, [row[5] for row in rows], doing)
        return [Note(Kind(row[2]), row[3], text) for row, text in zip(rows, bodies, strict=True)]

    def exchange_alike(
        self, kind: Kind, *, doing: str, flag: int = 0, body: bytes = b"", patient: bool = False
    ) -> list[Note]:
        """The same where all ranks must say the same kind of note; an error on all of them if they do not."""
        notes = self.exchange(kind, doing=doing, flag=flag, body=body, patient=patient)
        if any(note.kind is not kind for note in notes):
            self.has_ended = True
            raise DisagreementError(f"Ranks are out of step in {doing}: {[note.kind.name for note in notes]}.")
        return notes

    def _bodies(self, mine: bytes, lengths: Sequence[int], doing: str) -> list[bytes]:
        padded = _as_tensor(mine.ljust(max(lengths), b"\0"))
        found = [torch.empty_like(padded) for _ in lengths]
        self._wait(dist.all_gather(found, padded, group=self._side, async_op=True), doing)
        return [bytes(text.numpy())[:length] for text, length in zip(found, lengths, strict=True)]

    def broadcast(self, data: bytes, *, n_bytes: int, doing: str) -> bytes:
        """Rank 0's ``data`` of ``n_bytes``, on every rank."""
        tensor = _as_tensor(data) if self.rank == 0 else torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        self._wait(dist.broadcast(tensor, group=self._side, group_src=0, async_op=True), doing)
        return bytes(tensor.numpy())

    # -- waiting -------------------------------------------------------------------------------------

    def say_compiling(self, frame: str) -> None:
        """Others that wait for this rank shall know that it compiles (empty: no more), which may take any time."""
        if frame:
            self._n_begun[frame] += 1
        self._say("compiling", frame)

    def say_given_up(self, frame: str, why: str) -> None:
        """Others that wait in this frame shall know that this rank will not come there."""
        told = [self._n_exchanges, frame, self._n_begun[frame], why]
        self._say("given_up", json.dumps(told))

    def _wait(self, work: dist.Work, doing: str, *, frame: str = "", n_begun: int = 0, patient: bool = False) -> None:
        number, start, said = self._n_exchanges, time.monotonic(), False

        def excuse() -> bool:
            nonlocal said, start
            late: list[int] = []
            excused = patient
            # A store that is silent excuses nobody.
            with contextlib.suppress(StoreSilentError):
                if not said:
                    self.ask("set", f"waiting/{self.rank}", str(number))
                    said = True
                if frame:
                    self._raise_given_up(number - 1, frame, n_begun)
                late = [rank for rank in range(self.size) if self._says(f"waiting/{rank}") != str(number)]
                excused = excused or any(self._says(f"compiling/{rank}") for rank in late)
            if excused:
                start = time.monotonic()
                return True
            if time.monotonic() - start > self.timeout_s:
                raise self._nobody_came(late or self.channel.inquiries.stopped(), doing)
            return False

        try:
            self.channel.wait(work, doing, excuse=excuse)
        except PacelineError:
            self.has_ended = True
            raise

    def _nobody_came(self, late: list[int], doing: str) -> RankLostError:
        who = f"rank {', '.join(map(str, late))}" if late else "another rank"
        return RankLostError(
            f"Rank {self.rank} waited {self.timeout_s:.0f} s in {doing} for {who}, which is not compiling and did "
            "not come. Inside paceline.compiler.agreement all ranks must call the same compiled functions in the "
            "same order.",
            rank=late[0] if len(late) == 1 else None,
        )

    def _raise_given_up(self, n_exchanges: int, frame: str, n_begun: int) -> None:
        """Raise if a rank that has come as far as this one has given up ``frame``.

        Having given it up when all did, before this rank began it ``n_begun`` times, is no reason: it may come yet.
        """
        for rank in range(self.size):
            told = self._says(f"given_up/{rank}") if rank != self.rank else ""
            match shapes.read_json(told.encode(), rank) if told else None:
                case [int(number), str(theirs), int(times), str(why)]:
                    pass
                case _:
                    continue
            if (number, theirs) == (n_exchanges, frame) and times >= n_begun:
                error = PeerFailedError(f"rank {rank} does not compile {frame}: {why}", rank=rank)
                # That rank goes on uncompiled, and is to hear of it where it next waits for this one.
                self.channel.report(f"compiling {frame}", error)
                raise error

    def _says(self, key: str) -> str:
        return self.ask("get", key).decode() if self.ask("check", [key]) else ""

    def _say(self, key: str, text: str) -> None:
        """What others read while they wait for this rank; they do without if the store is silent."""
        with contextlib.suppress(StoreSilentError):
            self.ask("set", f"{key}/{self.rank}", text)

    def ask(self, what: str, *args: Any) -> Any:
        """Something of the meeting's store; raises ``StoreSilentError`` if it does not answer."""
        return self.channel.errands.run(getattr(self.store, what), *args)


def _as_tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Meeting] = weakref.WeakKeyDictionary()


def meeting_of(group: dist.ProcessGroup) -> Meeting:
    """The meeting of ``group``; made once, by all its ranks together."""
    meeting = _meetings.get(group)
    if meeting is None or not meeting.is_alive():
        meeting = _meetings[group] = Meeting(group)
    return meeting
