"""*Agree*: everybody contributes a value, and everybody learns the same of all of them, or who is missing.

Over the store, two hops: each rank sets its contribution; the group's rank 0 collects them and sets the *verdict*, who
was there and with what. A rank that has waited for the verdict past the deadline makes one itself, of whoever is there.
The first verdict stands (``compare_set``), so that ranks never learn different things, a late one included: it learns
that it was too late.

What the store holds stays bounded: an agreement that all ranks took part in proves that all have read the one before
it, which is deleted then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist

from paceline.control import wire
from paceline.control.board import Board
from paceline.control.wire import Kind
from paceline.errors import BadArgumentError, BadTypeError

Value = int | bytes
T = TypeVar("T")

VALUE_LIMIT_BYTES = wire.LIMIT_BYTES - 64

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2e-3, 20e-3
# Beyond this the verdict says only who was there, and ranks read the contributions themselves.
_CARRIED_BYTES = wire.LIMIT_BYTES // 2


@dataclass(frozen=True)
class Agreement:
    """What the ranks of a group brought to one `Channel.agree`; the same on all of them."""

    topic: str
    values: tuple[Value | None, ...]
    """By rank; None for a rank that did not come in time, or whose message was refused."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that are not in it."""
        return tuple(rank for rank, value in enumerate(self.values) if value is None)

    @property
    def equal(self) -> bool:
        """Whether all ranks came, with the same value."""
        return None not in self.values and len(set(self.values)) == 1

    @property
    def differing(self) -> tuple[int, ...]:
        """The ranks whose value is not that of the lowest rank that came."""
        came = [value for value in self.values if value is not None]
        return tuple(rank for rank, value in enumerate(self.values) if value is not None and value != came[0])

    def reduce(self, how: Callable[[list[int]], int]) -> int:
        """``sum``, ``min`` or ``max`` of the numbers of those that came."""
        return how([value for value in self.values if isinstance(value, int)])


class Waiter(Protocol):
    """Somebody with patience, a deadline and an eye on the other ranks: a `Vigil`."""

    def keep(self, attempt: Callable[[float], bool]) -> bool:
        """Make the attempt, which may take so many seconds, until it succeeds; False after the deadline."""

    def insist(self, call: Callable[[], T]) -> T:
        """What ``call``, which asks the store, returns once the store answers."""


class Agreements:
    """The agreements of one channel, over its board."""

    def __init__(self, board: Board, *, rank: int, size: int) -> None:
        self._board = board
        self._rank = rank
        self._size = size
        self._rounds: dict[str, int] = {}

    def agree(self, topic: str, value: Value, waiter: Waiter) -> Agreement:
        """See `Channel.agree`; ``waiter`` waits for the others, and for the store."""
        _check(topic, value)
        if self._size == 1:
            return Agreement(topic, (value,))
        turn = self._rounds.get(topic, 0)
        self._rounds[topic] = turn + 1
        key = f"agree/{topic}/{turn}"
        waiter.insist(lambda: self._board.put(f"{key}/{self._rank}", Kind.VALUE, (value,)))
        if self._rank == 0:
            waiter.keep(self._are_there([f"{key}/{rank}" for rank in range(self._size)]))
            to_decide = True
        else:
            to_decide = not waiter.keep(self._are_there([f"{key}/verdict"]))

        def conclude() -> tuple[Value | None, ...]:
            if to_decide:
                self._decide(key)
            return self._verdict(key, value)

        result = Agreement(topic, waiter.insist(lambda: self._board.in_one_go(conclude)))
        if turn and not result.missing:
            with contextlib.suppress(dist.DistError):
                self._board.in_one_go(self._clear, f"agree/{topic}/{turn - 1}")
        return result

    def _are_there(self, keys: list[str]) -> Callable[[float], bool]:
        """An attempt to find all ``keys``."""
        pause_s = _FIRST_PAUSE_S

        def attempt(timeout_s: float) -> bool:
            nonlocal pause_s
            end = time.monotonic() + timeout_s
            # Polled: a wait with a time-out is not the same in all stores, and TCPStore writes warnings when one ends.
            while not self._board.has(*keys):
                if time.monotonic() > end:
                    return False
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            return True

        return attempt

    def _decide(self, key: str) -> None:
        """Make the verdict out of what is there; nothing happens if there is one already."""
        found = [self._contribution(key, rank) for rank in range(self._size)]
        came = bytes(value is not None for value in found)
        carried = tuple(value for value in found if value is not None)
        if sum(8 if isinstance(value, int) else len(value) for value in carried) > _CARRIED_BYTES:
            carried = ()
        self._board.put_first(f"{key}/verdict", Kind.VERDICT, came, carried)

    def _verdict(self, key: str, mine: Value) -> tuple[Value | None, ...]:
        match self._board.read(f"{key}/verdict", Kind.VERDICT):
            case (bytes(came), tuple(carried)) if len(came) == self._size and len(carried) in (0, sum(came)):
                if not carried:
                    return tuple(self._contribution(key, rank) if came[rank] else None for rank in range(self._size))
                brought = map(_value, carried)
                return tuple(next(brought) if came[rank] else None for rank in range(self._size))
        # Somebody else's bytes: of nobody but this rank can it be said that it came.
        return tuple(mine if rank == self._rank else None for rank in range(self._size))

    def _contribution(self, key: str, rank: int) -> Value | None:
        match self._board.read(f"{key}/{rank}", Kind.VALUE):
            case ((value,),):
                return _value(value)
        return None

    def _clear(self, key: str) -> None:
        self._board.delete(f"{key}/{self._rank}")
        if self._rank == 0:
            self._board.delete(f"{key}/verdict")


def _value(field: int | str | bytes) -> Value | None:
    return None if isinstance(field, str) else field


def _check(topic: str, value: Value) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, bytes)):
        raise BadTypeError(f"Ranks agree on an int or on bytes, not on a {type(value).__name__} ({topic}).")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise BadArgumentError(f"{value} does not fit into 64 bits; ranks cannot agree on it ({topic}).")
    if isinstance(value, bytes) and len(value) > VALUE_LIMIT_BYTES:
        raise BadArgumentError(
            f"Ranks can agree on {VALUE_LIMIT_BYTES} bytes, not on {len(value)} ({topic}). Agree on a digest of them."
        )
