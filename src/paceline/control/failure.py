"""News of failure: one rank says that it failed and why; the others hear of it while they wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from paceline.control.board import Board
from paceline.control.user_code import line_of_traceback
from paceline.control.wire import MessageKind

MESSAGE_LIMIT = 2000
_FINAL, _LOST, _LONE_FORWARD = 1, 2, 4
# Anybody can count up the number of reports, which has no seal. A look must not take long, however many are claimed.
_READ_AT_ONCE = 256


@dataclass(frozen=True)
class Failure:
    """News about one rank: it raised, and why; or the others found that it is gone."""

    rank: int
    where: str
    type: str
    message: str
    line: str = ""
    """The line of the user's code, such as ``train.py:88 in load``."""
    final: bool = False
    """The exception ends the program, so that nobody will take the news back."""
    lost: bool = False
    """The rank itself said nothing: others noticed that it is gone, or stuck, and the message says so in full."""
    is_lone_forward: bool = False
    """Nobody is lost: one rank called the wrapper's forward, and others did not."""

    def __str__(self) -> str:
        if self.lost:
            return self.message
        cause = f"{self.type}: {self.message}" if self.message else self.type
        return f"rank {self.rank} raised in {self.where}: {cause}" + (f" ({self.line})" if self.line else "")


def failure_of(rank: int, where: str, error: BaseException | None, *, final: bool = False) -> Failure:
    """The news of ``error``. None stands for an unknown exception."""
    if error is None:
        return Failure(rank, where, "an exception", "")
    return Failure(
        rank,
        where,
        type(error).__name__[:MESSAGE_LIMIT],
        str(error)[:MESSAGE_LIMIT],
        line_of_traceback(error.__traceback__)[:MESSAGE_LIMIT],
        final=final,
    )


class News:
    """The failures of a channel's ranks, in the order in which they were reported."""

    def __init__(self, board: Board, *, rank: int, size: int) -> None:
        self._board = board
        self._rank = rank
        self._size = size
        self._reports: list[int] = []
        self._nameless = False
        """The last report could not say which exception it was."""
        self._past = 0
        """Reports up to this number need no second look: they were taken back, or are this rank's own."""

    def report(self, failure: Failure, *, nameless: bool) -> None:
        """Tell the others that this rank raised; never raises itself."""
        try:
            if self._reports and (self._nameless or failure.final) and not nameless:
                # This is the same exception, which can be named now: backward only knew that there was one.
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
        """Take the reports back: the exception was caught, the step is being tried again, and this rank goes on."""
        self._nameless = False
        while self._reports:
            self._board.blank(f"failure/{self._reports.pop()}")

    def first(self) -> Failure | None:
        """The first failure of another rank that has not been taken back."""
        count = min(self._board.add("failures", 0), self._past + _READ_AT_ONCE)
        for number in range(self._past + 1, count + 1):
            key = f"failure/{number}"
            failure = self._read(key)
            if failure is not None and failure.rank != self._rank:
                return failure
            # A report that is counted but not there yet is still to come, so that ``_past`` must not move beyond it.
            if number == self._past + 1 and (failure is not None or self._board.is_blank(key)):
                self._past = number
        # This counts even if this rank is to blame, because the others are not coming any more.
        return self._read("given_up")

    def give_up(self, failure: Failure) -> None:
        """Tell the others that this rank is about to raise because of ``failure``, which can then not be taken back."""
        self._board.put_first("given_up", MessageKind.FAILURE, *_fields(failure))

    def is_given_up(self) -> bool:
        """Whether some rank has raised because of a failure of this one."""
        return bool(self._reports) and self._read("given_up") is not None

    def _put(self, key: str, failure: Failure) -> None:
        self._board.put(key, MessageKind.FAILURE, *_fields(failure))

    def _read(self, key: str) -> Failure | None:
        match self._board.read(key, MessageKind.FAILURE):
            case (int(rank), str(where), str(type_), str(message), str(line), int(flags)) if 0 <= rank < self._size:
                told = (bool(flags & flag) for flag in (_FINAL, _LOST, _LONE_FORWARD))
                return Failure(rank, where, type_, message, line, *told)
        return None


def _fields(failure: Failure) -> tuple[int, str, str, str, str, int]:
    flags = _FINAL * failure.final | _LOST * failure.lost | _LONE_FORWARD * failure.is_lone_forward
    return failure.rank, failure.where, failure.type, failure.message, failure.line, flags
