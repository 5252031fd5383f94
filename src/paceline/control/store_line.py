"""The line over the store, in two hops: each rank puts up its word, and the group's rank 0 puts up the *verdict*.

The verdict says who was there and with what. A rank that has waited for it past the deadline makes one itself, of the
words that are there. The first verdict stands (``compare_set``), so that ranks never learn different things. That holds
for a rank that comes late, too: it learns that it was too late.

What the store holds stays bounded: an agreement that all ranks took part in proves that all have read the one before
it, which is then deleted.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch.distributed as dist

from paceline.control import wire
from paceline.control.agree import Line
from paceline.control.board import Board
from paceline.control.waiter import LONGEST_PAUSE_S, Waiter
from paceline.control.wire import MessageKind

_FIRST_PAUSE_S = 0.2e-3
# Beyond this the verdict says only who was there, and ranks read the words themselves.
_CARRIED_BYTES = wire.LIMIT_BYTES // 2


class StoreLine(Line):
    """The agreements of one board; ``waiter`` makes the `Waiter` for a topic and a number of seconds."""

    def __init__(self, board: Board, *, rank: int, size: int, waiter: Callable[[str, float], Waiter]) -> None:
        super().__init__(name=f"{board.name}/agree", rank=rank, size=size)
        self._board = board
        self._waiter = waiter

    def gather(self, topic: str, turn: int, word: bytes, *, timeout_s: float) -> list[bytes | None]:
        """Everybody's bytes within ``timeout_s``; None for ranks that did not come by then."""
        waiter = self._waiter(topic, timeout_s)
        key = f"agree/{topic}/{turn}"
        waiter.insist(lambda: self._board.set(f"{key}/{self.rank}", word))
        if self.rank == 0:
            words = [f"{key}/{rank}" for rank in range(self.size)]
            waiter.keep(self._soon(lambda: self._board.has(*words)))
            is_to_decide = True
        else:
            is_to_decide = not waiter.keep(self._soon(lambda: self._is_decided(key)))

        def conclude() -> list[bytes | None]:
            if is_to_decide:
                self._decide(key)
            return self._verdict(key, word)

        found = waiter.insist(lambda: self._board.in_one_go(conclude))
        if turn and None not in found:
            with contextlib.suppress(dist.DistError):
                self._board.in_one_go(self._clear, f"agree/{topic}/{turn - 1}")
        return found

    def _soon(self, is_there: Callable[[], bool]) -> Callable[[float], bool]:
        """An attempt that looks whether something is there until its time is over."""
        pause_s = _FIRST_PAUSE_S

        def attempt(timeout_s: float) -> bool:
            nonlocal pause_s
            end = time.monotonic() + timeout_s
            # This polls: waits with a time-out differ between stores, and TCPStore writes warnings when one ends.
            while not is_there():
                if time.monotonic() > end:
                    return False
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
            return True

        return attempt

    def _is_decided(self, key: str) -> bool:
        """Whether there is a verdict. A forged one does not count, unless rank 0's own word is refused as well."""
        if not self._board.has(f"{key}/verdict"):
            return False
        if self._board.read(f"{key}/verdict", MessageKind.VERDICT) is not None:
            return True
        # Rank 0 puts up its word before its verdict.
        word = self._board.get(f"{key}/0")
        self.refuse_other_secrets([word])
        return word is not None and self._board.read(f"{key}/0", MessageKind.WORD) is None

    def _decide(self, key: str) -> None:
        """Make the verdict out of what is there; nothing happens if there is one already."""
        found = [self._board.get(f"{key}/{rank}") for rank in range(self.size)]
        came = bytes(word is not None for word in found)
        carried = tuple(word for word in found if word is not None)
        if sum(map(len, carried)) > _CARRIED_BYTES:
            carried = ()
        self._board.put_first(f"{key}/verdict", MessageKind.VERDICT, came, carried)

    def _verdict(self, key: str, mine: bytes) -> list[bytes | None]:
        match self._board.read(f"{key}/verdict", MessageKind.VERDICT):
            case (bytes(came), tuple(carried)) if (
                len(came) == self.size and set(came) <= {0, 1} and len(carried) in (0, sum(came))
            ):
                brought = (word if isinstance(word, bytes) else None for word in carried)
                get = self._board.get
                ranks = range(self.size)
                words = [(next(brought) if carried else get(f"{key}/{rank}")) if came[rank] else None for rank in ranks]
                # A verdict that was copied here from earlier has what this rank said then.
                if words[self.rank] in (None, mine):
                    return words
        # These bytes are not a verdict of ours, so that only this rank is known to have come.
        return [mine if rank == self.rank else None for rank in range(self.size)]

    def _clear(self, key: str) -> None:
        self._board.delete(f"{key}/{self.rank}")
        if self.rank == 0:
            self._board.delete(f"{key}/verdict")
