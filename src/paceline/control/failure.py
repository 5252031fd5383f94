"""News of failure: one rank says that it failed and why; the others hear of it while they wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from paceline.control.board import Board
from paceline.control.user_code import line_of_traceback
from paceline.control.wire import Kind

MESSAGE_LIMIT = 2000
_FINAL, _LOST = 1, 2


@dataclass(frozen=True)
class Failure:
    """One rank's news: it raised, and why; or what the others found: it is gone."""

    rank: int
    where: str
    type: str
    message: str
    line: str = ""
    """Of the user's code: ``train.py:88 in load``."""
    final: bool = False
    """It ends the program: nobody will take it back."""
    lost: bool = False
    """The rank itself said nothing: others noticed that it is gone, or stuck, and the message says so in full."""

    def __str__(self) -> str:
        if self.lost:
            return self.message
        cause = f"{self.type}: {self.message}" if self.message else self.type
        return f"rank {self.rank} raised in {self.where}: {cause}" + (f" ({self.line})" if self.line else "")


def failure_of(rank: int, where: str, error: BaseException | None, *, final: bool = False) -> Failure:
    """The news of ``error``; None for one of which only is known that there was one."""
    if error is None:
        return Failure(rank, where, "an exception", "")
    return Failure(
        rank,
        where,
        type(error).__name__,
        str(error)[:MESSAGE_LIMIT],
        line_of_traceback(error.__traceback__)[:MESSAGE_LIMIT],
        final=final,
    )


class News:
    """The failures of a channel's ranks, in the order in which they were reported."""

    def __init__(self, board: Board, *, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._reports: list[int] = []
        self._nameless = False
        """The last report could not say which exception it was."""
        self._past = 0
        """Reports up to this number need no second look: they were taken back, or are this rank's own."""

    def report(self, failure: Failure, *, nameless: bool) -> None:
        """Tell the others that this rank raised; never raises itself."""
        try:
            if self._reports and (self._nameless or failure.final) and not nameless:
                # The same exception, now that it can be named: backward only knew that there was one.
                number = self._reports[-1]
            else:
                number = self._board.add("failures", 1)
                self._reports.append(number)
            self._nameless = nameless
            self._put(f"failure/{number}", failure)
        except dist.DistError:
            # The store's host may be gone: then the others see that by themselves.
            return

    def retract(self) -> None:
        """This rank goes on after all: the exception was caught and the step is being tried again."""
        self._nameless = False
        while self._reports:
            self._board.blank(f"failure/{self._reports.pop()}")

    def first(self) -> Failure | None:
        """The first failure of another rank that stands."""
        for number in range(self._past + 1, self._board.add("failures", 0) + 1):
            key = f"failure/{number}"
            failure = self._read(key)
            if failure is not None and failure.rank != self._rank:
                return failure
            # One that is counted and not there yet is still to come, and none after it may be forgotten.
            if number == self._past + 1 and (failure is not None or self._board.is_blank(key)):
                self._past = number
        # Whoever is to blame, this rank included: the others are not coming any more.
        return self._read("given_up")

    def give_up(self, failure: Failure) -> None:
        """This rank is about to raise because of ``failure``: from here on that cannot be taken back."""
        self._board.put_first("given_up", Kind.FAILURE, *_fields(failure))

    def is_given_up(self) -> bool:
        """Whether some rank has raised because of a failure of this one."""
        return bool(self._reports) and self._board.has("given_up")

    def _put(self, key: str, failure: Failure) -> None:
        self._board.put(key, Kind.FAILURE, *_fields(failure))

    def _read(self, key: str) -> Failure | None:
        match self._board.read(key, Kind.FAILURE):
            case (int(rank), str(where), str(type_), str(message), str(line), int(flags)):
                return Failure(rank, where, type_, message, line, bool(flags & _FINAL), bool(flags & _LOST))
        return None


def _fields(failure: Failure) -> tuple[int, str, str, str, str, int]:
    flags = _FINAL * failure.final | _LOST * failure.lost
    return failure.rank, failure.where, failure.type, failure.message, failure.line, flags
