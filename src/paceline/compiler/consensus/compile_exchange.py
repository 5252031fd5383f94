"""Ranks that talk while they compile: short notes from everybody to everybody.

They talk over a group of their own, so that no collective of the training comes between their notes, and over a
connection that breaks when a rank ends. A note is a few numbers and a digest of a text; the texts follow if they
differ. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.control import Channel
from paceline.control.agree import Word
from paceline.control.board import Board
from paceline.control.tensor_line import TensorLine, bytes_of
from paceline.control.wire import Item, MessageKind
from paceline.errors import (
    DisagreementError,
    PacelineError,
    PeerFailedError,
    RankLostError,
    StateError,
    StoreSilentError,
)

BODY_LIMIT_BYTES = 16 * 2**20
# A note is three numbers and a digest.
_NOTE_BYTES = 128
# How long a rank waits is decided here and not by the backend: compiling may take any time.
_BACKEND_TIMEOUT = timedelta(days=7)


class NoteKind(enum.IntEnum):
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


_KINDS = frozenset(map(int, NoteKind))


@dataclass(frozen=True)
class Note:
    """What one rank said."""

    kind: NoteKind
    flag: int
    body: bytes


class CompileExchange:
    """Where the ranks of a group exchange notes. All ranks of the group make theirs in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        is_part = len(ranks) < dist.get_world_size()
        self._side = dist.new_group(ranks, backend="gloo", timeout=_BACKEND_TIMEOUT, use_local_synchronization=is_part)
        self.channel = Channel(self._side)
        self.rank = self.channel.rank
        self.global_ranks = dist.get_process_group_ranks(self._side)
        self.size = self.channel.size
        self.timeout_s = _torch.group_timeout_s(group)
        name = f"{self.channel.job}/exchange"
        store = dist.PrefixStore("paceline/exchange", _torch.group_store(self._side))
        self._board = Board(store, name=name, store_thread=self.channel.store_thread)
        # A peer says how long its word is, and all ranks make room for it.
        line = partial(TensorLine, self._all_gather, name=name, rank=self.rank, size=self.size)
        self._notes, self._bodies = line(limit_bytes=_NOTE_BYTES), line(limit_bytes=BODY_LIMIT_BYTES)
        self._waiting: Callable[[dist.Work], None]
        """How this rank waits for the others in the agreement that is under way."""
        self.has_ended = False
        """Whether something went wrong in an agreement, so that ranks do not hear each other any more."""
        self._n_exchanges = 0
        # How often this rank has begun to compile a frame since the last exchange.
        self._n_begun: Counter[str] = Counter()

    def is_alive(self) -> bool:
        return _torch.group_is_alive(self._side)

    def gather(
        self, kind: NoteKind, *, doing: str, flag: int = 0, body: bytes = b"", frame: str = "", patient: bool = False
    ) -> list[Note]:
        """Everybody's note, by rank. If ranks bring notes of different kinds, their texts are not exchanged.

        ``frame`` names the frame that this rank waits in. Others may give it up meanwhile. ``patient`` says that all
        others are known to be compiling, so that they may take any time.
        """
        if self.has_ended:
            raise StateError(
                f"Ranks cannot talk about {doing}: an exchange before it failed on rank {self.rank}, and others may be "
                "waiting in it still. Leave paceline.compiler.agreement, and make the process group anew."
            )
        self._n_exchanges += 1
        n_begun = self._n_begun[frame]
        self._n_begun.clear()
        self._waiting = partial(self._wait, doing=doing, frame=frame, n_begun=n_begun, patient=patient)
        digest = hashlib.sha256(body).digest()
        heads = self._agree(self._notes, doing, int(kind), int(flag), digest, len(body))
        notes = [self._note(head, rank, doing) for rank, head in enumerate(heads)]
        bodies = [body] * self.size
        if len({note.kind for note in notes}) == 1 and len({head[2:] for head in heads}) > 1:
            self._waiting = partial(self._wait, doing=doing)
            words = self._agree(self._bodies, doing, body)
            bodies = [self._body(*told, rank, doing) for rank, told in enumerate(zip(heads, words, strict=True))]
        return [replace(note, body=text) for note, text in zip(notes, bodies, strict=True)]

    def _agree(self, line: TensorLine, doing: str, *word: Item) -> list[Word]:
        # How long ranks wait is decided by ``_wait``.
        found = line.agree("notes" if line is self._notes else "bodies", *word, timeout_s=self.timeout_s)
        return [self._refuse(rank, doing) if theirs is None else theirs for rank, theirs in enumerate(found.words)]

    def _note(self, head: Word, rank: int, doing: str) -> Note:
        match head:
            case (int(kind), int(flag), bytes(), int(n_bytes)) if kind in _KINDS and 0 <= n_bytes <= BODY_LIMIT_BYTES:
                return Note(NoteKind(kind), flag, b"")
        self._refuse(rank, doing)

    def _body(self, head: Word, word: Word, rank: int, doing: str) -> bytes:
        match word:
            case (bytes(text),) if head[2:] == (hashlib.sha256(text).digest(), len(text)):
                return text
        self._refuse(rank, doing)

    def _refuse(self, rank: int, doing: str) -> NoReturn:
        raise DisagreementError(
            f"What rank {rank} said about {doing} cannot be understood on rank {self.rank}. "
            "Run the same version of Paceline on every rank."
        )

    def _all_gather(self, mine: Tensor, everybodys: list[Tensor], timeout_s: float) -> None:
        self._waiting(dist.all_gather(everybodys, mine, group=self._side, async_op=True))

    def gather_alike(
        self, kind: NoteKind, *, doing: str, flag: int = 0, body: bytes = b"", patient: bool = False
    ) -> list[Note]:
        """Gather notes where all ranks must bring the same kind. If they do not, all of them raise."""
        notes = self.gather(kind, doing=doing, flag=flag, body=body, patient=patient)
        if any(note.kind is not kind for note in notes):
            self.has_ended = True
            raise DisagreementError(f"Ranks are out of step in {doing}: {[note.kind.name for note in notes]}.")
        return notes

    def broadcast(self, data: bytes, *, n_bytes: int, doing: str) -> bytes:
        """Rank 0's ``data`` of ``n_bytes``, on every rank."""
        tensor = _as_tensor(data) if self.rank == 0 else torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        self._wait(dist.broadcast(tensor, group=self._side, group_src=0, async_op=True), doing=doing)
        return bytes_of(tensor)

    # -- waiting -------------------------------------------------------------------------------------

    def say_compiling(self, frame: str) -> None:
        """Tell others that wait for this rank that it compiles ``frame``, or with "" that it has ended."""
        if frame:
            self._n_begun[frame] += 1
        self._say("compiling", frame)

    def say_given_up(self, frame: str, why: str) -> None:
        """Tell others that wait in this frame that this rank will not come there."""
        self._say("given_up", self._n_exchanges, frame, self._n_begun[frame], why)

    def _wait(self, work: dist.Work, *, doing: str, frame: str = "", n_begun: int = 0, patient: bool = False) -> None:
        number, start, said = self._n_exchanges, time.monotonic(), False

        def excuse() -> bool:
            nonlocal said, start
            late: list[int] = []
            excused = patient
            # A store that is silent excuses nobody.
            with contextlib.suppress(StoreSilentError):
                if not said:
                    self.put(f"waiting/{self.rank}", number)
                    said = True
                if frame:
                    self._raise_given_up(number - 1, frame, n_begun)
                late = [rank for rank in range(self.size) if self.read(f"waiting/{rank}") != (number,)]
                excused = excused or any(map(self._is_compiling, late))
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

    def _is_compiling(self, rank: int) -> bool:
        match self.read(f"compiling/{rank}"):
            case (str(frame),):
                return bool(frame)
        return False

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

        This rank has begun the frame ``n_begun`` times. A rank that had begun it less often when it gave it up may
        still come: that was an earlier time, at which all ranks gave it up.
        """
        for rank in range(self.size):
            match self.read(f"given_up/{rank}") if rank != self.rank else ():
                case (int(number), str(theirs), int(times), str(why)):
                    pass
                case _:
                    continue
            if (number, theirs) == (n_exchanges, frame) and times >= n_begun:
                error = PeerFailedError(f"rank {rank} does not compile {frame}: {why}", rank=rank)
                # That rank goes on uncompiled. It hears of this error where it next waits for this rank.
                self.channel.report(f"compiling {frame}", error)
                raise error

    def _say(self, key: str, *word: Item) -> None:
        """Leave a word that others read while they wait for this rank. If the store is silent, they do without."""
        with contextlib.suppress(StoreSilentError):
            self.put(f"{key}/{self.rank}", *word)

    def put(self, key: str, *word: Item) -> None:
        """Put a word into the store; raises ``StoreSilentError`` if it does not answer."""
        self._board.put(key, MessageKind.WORD, word)

    def read(self, key: str) -> Word:
        """The word that was put under ``key``; an empty one if there is none."""
        match self._board.read(key, MessageKind.WORD):
            case (tuple(word),):
                return word
        return ()


def _as_tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, CompileExchange] = weakref.WeakKeyDictionary()


def exchange_of(group: dist.ProcessGroup) -> CompileExchange:
    """The exchange of ``group``; made once, by all its ranks together."""
    exchange = _exchanges.get(group)
    if exchange is None or not exchange.is_alive():
        exchange = _exchanges[group] = CompileExchange(group)
    return exchange
