"""One wait of a rank for others: what it looks at meanwhile, and what it says when they do not come.

Nothing here runs in a step without trouble: the first look is taken when a wait has lasted `PATIENCE_S`, and others
follow at the same interval.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.control.diagnosis import LONE_FORWARD, Diagnosis, explain, explain_finished
from paceline.control.waiter import Waiter
from paceline.control.whereabouts import Whereabouts, of_this_rank
from paceline.errors import DisagreementError, LoneForwardError, PeerError, RankLostError, StoreSilentError

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
                    progress.end_wait()
                    return False
        except KeyboardInterrupt:
            # The file keeps what this rank waited for, so that the doctor can tell the person who pressed Ctrl-C.
            raise
        except BaseException:
            progress.end_wait()
            raise
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
        except PeerError as error:
            if explained := self.explained(error):
                raise explained from error
            raise

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
            self.tell_of_hang(lasted_s)

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
            if self._heard_at is not None:
                # A rank has said what it raised. If it is gone, it cannot take that back any more.
                self._channel.raise_news(self._doing)
            who = f"rank {', '.join(map(str, lost))}"
            gone = f"{who.capitalize()} is gone: its process has ended"
            if finished := self._finished(lost):
                raise self._error(finished, f"{finished.cause} This rank was waiting in {self._doing}.")
            if len(lost) == 1:
                self._channel.give_up(lost[0], self._doing, gone)
            raise RankLostError(
                f"{gone}, and rank {self._channel.rank} was waiting for it in {self._doing}. Look at its output first.",
                rank=lost[0] if len(lost) == 1 else None,
            )

    def tell_of_hang(self, waited_s: float) -> None:
        """Say who waits for whom: raise an error, or have the first rank that is not to blame print it on stderr."""
        channel = self._channel
        report = self._report()
        text = f"Rank {channel.rank} has waited {waited_s:.0f} s in {self._doing}. {report}"
        channel.progress.note_report(text)
        if channel.hang.mode == "enforce":
            raise self._error(report, text)
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
        report = self._report()
        return self._error(report, f"{text}not all ranks came. {report}")

    def _report(self) -> Diagnosis:
        """Where the ranks are, seen by this one, which knows whether it evaluates."""
        channel = self._channel
        with self._seen_to_wait():
            report = channel.inquiries.report()
        others = [rank for rank in report.ranks if rank != channel.rank]
        if not channel.progress.evaluates or report.parted or not others:
            return report
        cause = f"{report.cause} Rank {channel.rank} is in a forward that does not train. {LONE_FORWARD}"
        return replace(report, cause=cause, is_lone_forward=True)

    @contextlib.contextmanager
    def _seen_to_wait(self) -> Iterator[None]:
        """Show this rank as waiting, even if its wait has just ended, or was too short to be recorded."""
        progress = self._channel.progress
        is_over = not progress.waiting_since
        if is_over:
            progress.begin_wait(self._doing)
        yield
        if is_over:
            progress.end_wait()

    def _finished(self, lost: list[int]) -> Diagnosis | None:
        """Why this wait is in vain, if one of the ranks that are ``lost`` has in fact ended well; None otherwise."""
        channel = self._channel
        for rank in lost:
            if (theirs := channel.inquiries.finished(rank)) is not None:
                evaluates, mine = channel.progress.evaluates, of_this_rank(channel.progress)
                return explain_finished(rank, theirs, me=channel.rank, mine=mine, evaluates=evaluates)
        return None

    def _error(self, report: Diagnosis, text: str) -> RankLostError:
        """The error for this rank. The others are told the cause as well."""
        rank = report.ranks[0] if report.ranks else None
        if rank is not None:
            is_lone = report.is_lone_forward
            self._channel.give_up(rank, self._doing, report.cause, is_lone_forward=is_lone)
        return (LoneForwardError if report.is_lone_forward else RankLostError)(text, rank=rank)

    def explained(self, error: PeerError) -> RankLostError | None:
        """The error that replaces ``error``, which a backend of ours has raised; None if there is nothing to add.

        A backend knows only that the time is up, or that a rank has left.
        """
        if not isinstance(error, RankLostError):
            return None
        if is_time_out(error):
            return self.expired()
        with contextlib.suppress(dist.DistError):
            self._channel.raise_news(self._doing)
        if error.rank is None:
            return None
        report = self._finished_soon([error.rank], time.monotonic() + GRACE_S)
        if report is None:
            return None
        return self._error(report, f"{report.cause} This rank was waiting in {self._doing}.")

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
        with self._seen_to_wait():
            answers = channel.inquiries.ask(within_s=GRACE_S) if store_answers else channel.inquiries.read_files()
        report = explain(answers, channel.size)
        # A backend of ours also sees collectives that the user called. Its DisagreementError tells of those.
        if report.parted or isinstance(error, DisagreementError):
            while_ = f"The backend could not match them while rank {channel.rank} was in {self._doing}"
            return self._error(report, f"{report}\n{while_}: {_first_sentence(error)}. Make all ranks do the same.")
        lost = self._who_is_lost(answers, deadline, guess=not of_store)
        if finished := self._finished_soon(lost, deadline):
            return self._error(finished, f"{finished.cause} This rank was waiting in {self._doing}.")
        if len(lost) == 1:
            # The others hear it from here, because their own connections may be to ranks that go on waiting.
            channel.give_up(
                lost[0], self._doing, f"Rank {lost[0]} is gone: its process has ended, or its connection broke"
            )
        who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
        if of_store:
            known = f"{who} is gone" if lost else "its host, which is rank 0 or the launcher, is probably gone"
            why = f"The connection to the process group's store broke: {known}, while"
        else:
            why = f"The connection to {who} broke while"
        return RankLostError(
            f"{why} rank {channel.rank} was in {self._doing}: {_first_sentence(error)}. That rank has probably ended; "
            "look at its output first.",
            rank=lost[0] if len(lost) == 1 else None,
        )

    def _finished_soon(self, lost: list[int], deadline: float) -> Diagnosis | None:
        """As `_finished`, but with patience: a rank that has closed its connections may be about to end well."""
        while (found := self._finished(lost)) is None and time.monotonic() < deadline:
            if not any(map(self._channel.inquiries.is_running, lost)):
                return None
            time.sleep(0.02)
        return found

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


def is_time_out(error: RuntimeError) -> bool:
    """Whether a backend has given up because the group's time-out is over."""
    return any(words in str(error).lower() for words in ("timed out", "until the timeout"))


def _first_sentence(error: Exception) -> str:
    """A backend's own words without the places in its source and the hints that follow them."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.rpartition("running the callback: ")[2]
    return text.rpartition("] ")[2].split(". ")[0].rstrip(".")


def is_of_a_backend(error: RuntimeError) -> bool:
    """Whether a future failed because a connection did; any other error comes from a callback of the user."""
    # A future hands on only the text of an error that passed through a callback.
    words = ("Connection", "gloo/", "Socket", RankLostError.__name__)
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
