"""One wait of a rank for others: what it looks at meanwhile, and what it says when they do not come.

Nothing here runs in a step without trouble: the first look is taken when a wait has lasted `PATIENCE_S`, and others
follow at the same interval.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.control.waiter import Waiter
from paceline.control.whereabouts import Whereabouts, explain
from paceline.errors import RankLostError, StoreSilentError

if TYPE_CHECKING:
    from paceline.control.channel import Channel

PATIENCE_S = 0.25
# A rank that raised may catch its own exception and try again; it gets this long to take the news back.
GRACE_S = 1.0

_LAST_MOMENT_S = 1e-3


class PeerWait(Waiter):
    """A wait for the channel's other ranks; ``doing`` says where this rank waits."""

    def __init__(
        self,
        channel: Channel,
        doing: str,
        *,
        timeout_s: float,
        excuse: Callable[[], bool] | None = None,
        for_collective: bool = True,
        begun: float | None = None,
    ) -> None:
        self._channel = channel
        self._doing = doing
        self._timeout_s = timeout_s
        self._excuse = excuse
        self._for_collective = for_collective
        self._start = time.monotonic() if begun is None else begun
        self._told = channel.hang.mode == "off"
        self._heard_at: float | None = None
        self._gone: list[int] = []
        self._store_is_silent = False

    def keep(self, attempt: Callable[[float], bool], *, tried: bool = False) -> bool:
        """Repeat ``attempt(seconds)``, which may take that long, until it succeeds; return False at the deadline.

        It raises an error if something happens to another rank meanwhile, and whatever the attempt raises. A silent
        store counts as no news. After the time-out a silent store is an error as well, because nothing more can be
        learnt. If it was ``tried`` before, and in vain, this begins with a look at the others.
        """
        progress = self._channel.progress
        try:
            while tried or not self._try(attempt):
                tried = False
                if not progress.waiting_since:
                    progress.begin_wait(self._doing)
                self._look()
                if self._left_s() <= 0:
                    if self._store_is_silent:
                        raise self.expired()
                    return False
        finally:
            if progress.waiting_since:
                progress.end_wait()
        return True

    def _left_s(self) -> float:
        return self._start + self._timeout_s - time.monotonic()

    def _try(self, attempt: Callable[[float], bool]) -> bool:
        limit_s = max(min(PATIENCE_S, self._left_s()), _LAST_MOMENT_S)
        try:
            return attempt(limit_s)
        except StoreSilentError:
            time.sleep(limit_s)
            return False

    def _look(self) -> None:
        """Raise an error if something has happened to another rank."""
        now = time.monotonic()
        self._store_is_silent = False
        try:
            self._hear(now)
        except StoreSilentError:
            self._store_is_silent = True
        if self._excuse is not None and self._excuse():
            self._start = now
        self._look_for_gone()
        lasted_s = now - self._start
        if not self._told and lasted_s > self._channel.hang.after_s:
            self._told = True
            self._tell_of_hang(lasted_s)

    def _hear(self, now: float) -> None:
        failure = self._channel.news()
        if failure is None:
            self._heard_at = None
        elif failure.final or failure.lost or (self._heard_at is not None and now - self._heard_at > GRACE_S):
            self._channel.raise_news(self._doing)
        elif self._heard_at is None:
            self._heard_at = now
        if self._for_collective:
            self._channel.raise_replan(self._doing)

    def _look_for_gone(self) -> None:
        """Raise if a process had ended before the last attempt. Until then, what it sent last may still arrive."""
        before, self._gone = self._gone, self._channel.gone()
        lost = [rank for rank in self._gone if rank in before]
        if lost:
            who = f"rank {', '.join(map(str, lost))}"
            gone = f"{who.capitalize()} is gone: its process has ended"
            if len(lost) == 1:
                self._channel.give_up(lost[0], self._doing, gone)
            raise RankLostError(
                f"{gone}, and rank {self._channel.rank} was waiting for it in {self._doing}. Look at its output first.",
                rank=lost[0] if len(lost) == 1 else None,
            )

    def _tell_of_hang(self, waited_s: float) -> None:
        """Say who waits for whom: raise an error, or have the first rank that is not to blame print it on stderr."""
        channel = self._channel
        report = channel.inquiries.report()
        text = f"Rank {channel.rank} has waited {waited_s:.0f} s in {self._doing}. {report}"
        if channel.hang.mode == "enforce":
            if report.ranks:
                channel.give_up(report.ranks[0], self._doing, report.cause)
            raise RankLostError(text, rank=report.ranks[0] if report.ranks else None)
        if channel.rank == min(set(range(channel.size)) - set(report.ranks), default=0):
            print(f"paceline: {text}", file=sys.stderr, flush=True)

    # -- how it ends ---------------------------------------------------------------------------------

    def expired(self) -> RankLostError:
        """The error of a wait whose time-out has passed."""
        waited_s = time.monotonic() - self._start
        text = f"Rank {self._channel.rank} waited {waited_s:.0f} s (the group's time-out) in {self._doing}, and "
        silence = " The process group's store does not answer." if self._store_is_silent else ""
        stopped = self._channel.inquiries.stopped()
        if stopped:
            who = ", ".join(map(str, stopped))
            text += f"rank {who} is stopped (by SIGSTOP, or in a debugger).{silence}"
            return RankLostError(text, rank=stopped[0] if len(stopped) == 1 else None)
        if silence:
            return RankLostError(
                f"{text}could not learn which rank is missing.{silence} The store's host, which is rank 0 or the "
                "launcher, is stopped or cut off."
            )
        return RankLostError(f"{text}some rank never joined in. Look for the rank that stopped or took another path.")

    def broken(self, error: RuntimeError) -> RankLostError:
        """The error of a wait that a backend gave up, or in which the store broke.

        Either a rank is gone, or ranks took different paths.
        """
        channel = self._channel
        of_store = isinstance(error, (dist.DistStoreError, dist.DistNetworkError))
        deadline = time.monotonic() + GRACE_S
        store_answers = channel.is_watched
        try:
            channel.raise_news(self._doing)
            channel.sign_as_survivor()
        except dist.DistError:
            # The store may be gone as well, perhaps with the lost rank. Then only files and processes can tell.
            store_answers = False
        answers = channel.inquiries.ask(within_s=GRACE_S) if store_answers else channel.inquiries.read_files()
        report = explain(answers, channel.size)
        parted = report if report.parted else None
        lost = list(parted.ranks) if parted is not None else self._who_is_lost(answers, deadline, guess=not of_store)
        if len(lost) == 1:
            # The others hear it from here, because their own connections may be to ranks that go on waiting.
            gone = f"Rank {lost[0]} is gone: its process has ended, or its connection broke"
            channel.give_up(lost[0], self._doing, parted.cause if parted is not None else gone)
        who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
        if parted is not None:
            why = f"{parted}\nThe backend could not match them while"
        elif of_store:
            known = f"{who} is gone" if lost else "its host, which is rank 0 or the launcher, is probably gone"
            why = f"The connection to the process group's store broke: {known}, while"
        else:
            why = f"The connection to {who} broke while"
        remedy = "Make all ranks do the same." if parted else "That rank has probably ended; look at its output first."
        return RankLostError(
            f"{why} rank {channel.rank} was in {self._doing}: {_first_sentence(error)}. {remedy}",
            rank=lost[0] if len(lost) == 1 else None,
        )

    def _who_is_lost(self, answers: dict[int, Whereabouts | None], deadline: float, *, guess: bool) -> list[int]:
        """The ranks that are known to have ended. If there are none, ``guess`` takes those without a sign of life."""
        channel = self._channel
        others = [rank for rank in range(channel.size) if rank != channel.rank]
        while True:
            gone = channel.gone()
            if gone or (guess and len(others) == 1):
                return gone or others
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        answered = {rank for rank, answer in answers.items() if answer is not None and not answer.silent}
        known = answered.union(channel.survivors(), filter(channel.inquiries.is_running, others))
        return [rank for rank in others if rank not in known] if guess else []


def _first_sentence(error: Exception) -> str:
    """A backend's own words without the places in its source and the hints that follow them."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.rpartition("running the callback: ")[2]
    return text.rpartition("] ")[2].split(". ")[0].rstrip(".")
