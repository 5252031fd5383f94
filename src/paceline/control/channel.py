"""A rank's line to the others over the group's store: agreement before collectives, news of failure.

Nothing here runs in a step without trouble: the store is asked only after a wait has lasted longer than ``PATIENCE_S``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline import _torch
from paceline.control import hang, jobs, stacks
from paceline.control.agreement import VALUE_LIMIT_BYTES, Agreement, Agreements
from paceline.control.board import Board
from paceline.control.difference import describe_difference
from paceline.control.failure import MESSAGE_LIMIT, Failure, News, failure_of
from paceline.control.hang import Inquiries
from paceline.control.last_words import speak_for
from paceline.control.progress import Progress
from paceline.control.wire import Kind
from paceline.errors import ParameterMismatchError, PeerError, PeerFailedError, RankLostError

T = TypeVar("T")

PATIENCE_S = 0.25
# A rank that raised may catch its own exception and try again; it gets this long to take the news back.
GRACE_S = 1.0


class Channel:
    """The control channel of one wrapped module.

    Every rank of the group must make its channels of that group in the same order, as it must call
    collectives in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        store = dist.PrefixStore("paceline", _torch.group_store(group))
        # The count of this rank's channels is kept in the store: it begins and ends with the group.
        number = store.add(f"channels/{self.rank}", 1)
        self._timeout_s = _torch.group_timeout_s(group)
        # What one rank made up and all have: a message of another job, or group, does not fit here.
        self.job = _job_of(group)
        self._board = Board(dist.PrefixStore(str(number), store), name=f"{self.job}/{number}")
        self._agreements = Agreements(self._board, rank=self.rank, size=self.size)
        self._news = News(self._board, rank=self.rank)
        self._generation = 0
        self._hang = hang.settings()
        watched = self.size > 1 and self._hang.mode != "off"
        # One directory for all groups of the same ranks: whoever looks wants to see all that a process takes part in.
        whole = _job_of(dist.group.WORLD or group) if watched else self.job
        directory = jobs.make_directory(whole) if watched else None
        self.progress = Progress(
            directory,
            rank=self.rank,
            size=self.size,
            wrapper=number,
            group="" if self.job == whole else self.job,
            stack_signal=stacks.answer_requests(directory),
        )
        self.inquiries = Inquiries(
            self._board.on_another_connection() if watched else self._board,
            self.progress,
            rank=self.rank,
            size=self.size,
            directory=directory,
        )
        self._news_for_watch = News(self.inquiries.board, rank=self.rank)
        self.heard: Failure | None = None
        """What the watch has heard of another rank, for this one to find when it comes by."""
        if self.size > 1:
            speak_for(self)
        if watched:
            hang.watch(self)

    @property
    def step(self) -> int:
        """How many synchronised backwards this rank has finished."""
        return self.progress.step

    @step.setter
    def step(self, value: int) -> None:
        self.progress.step = value

    # -- agreement -----------------------------------------------------------------------------------

    def agree(self, topic: str, value: int | bytes, *, timeout_s: float | None = None) -> Agreement:
        """Bring ``value`` and learn what every rank of the group brought; the same answer on all ranks.

        Ranks must agree in the same order, from one thread at a time. Topics should be few, as the last round of each
        stays in the store: what varies belongs into the value, an int of 64 bits or up to `VALUE_LIMIT_BYTES` (agree
        on a digest of what is longer).

        Waits for ``timeout_s``, by default the group's time-out, and then names who is ``missing`` instead of raising.
        Raises ``PeerFailedError`` as soon as another rank has said that it failed. A few hundred microseconds on one
        host; not for every step.

        Example::

            found = channel.agree("graph", digest)
            if found.missing: ...              # ranks that did not come
            elif not found.equal: ...          # found.differing, found.values
            most = channel.agree("compiles", count).reduce(max)
        """
        news_at = time.monotonic() + PATIENCE_S

        def listen() -> None:
            nonlocal news_at
            if time.monotonic() > news_at:
                self.raise_news(f"the comparison of {topic}")
                news_at = time.monotonic() + PATIENCE_S

        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return self._agreements.agree(topic, value, timeout_s=timeout_s, while_waiting=listen)

    def compare(self, what: str, rows: list[list[Any]], names: list[str]) -> None:
        """Return once all ranks have brought the same ``rows``; raise the same error on all if they differ.

        The first field of a row is a name, and ``names`` says what the fields are. Only a digest travels as
        long as ranks agree.
        """
        if self.size == 1:
            return
        text = json.dumps(rows)
        found = self.agree(what, hashlib.sha256(text.encode()).digest())
        if found.missing:
            raise self._nobody_came(found.missing, f"compare {what}")
        if found.equal:
            return
        rows_of_rank = [json.loads(row) for row in self._share(f"rows of {what}", text)]
        raise ParameterMismatchError(describe_difference(what, rows_of_rank, names))

    def gather(self, tag: str, text: str) -> list[str]:
        """Everybody's ``text``, by rank. For what must be said in words, when something is wrong."""
        return self._share(tag, text[:MESSAGE_LIMIT])

    def _share(self, topic: str, text: str) -> list[str]:
        """Everybody's ``text``, which may be long, in pieces that fit an agreement."""
        raw = text.encode()
        pieces = [raw[at : at + VALUE_LIMIT_BYTES] for at in range(0, len(raw), VALUE_LIMIT_BYTES)]
        most = self.agree(f"{topic}: length", len(pieces))
        told = [b""] * self.size
        for n in range(most.reduce(max)):
            found = self.agree(topic, pieces[n] if n < len(pieces) else b"")
            if found.missing:
                raise self._nobody_came(found.missing, f"tell its {topic}")
            for rank, piece in enumerate(found.values):
                assert isinstance(piece, bytes)
                told[rank] += piece
        return [part.decode(errors="replace") for part in told]

    def _nobody_came(self, missing: tuple[int, ...], to_do: str) -> RankLostError:
        who = ", ".join(map(str, missing))
        return RankLostError(
            f"Rank {self.rank} waited {self._timeout_s:.0f} s for rank {who} to {to_do}, and it never "
            "came. Look at that rank's output; if it is only slow, give the process group a longer timeout.",
            rank=missing[0],
        )

    def announce_replan(self, reason: str, *, step: int) -> None:
        """Tell ranks that may be waiting for the old plan's collectives that this rank has left it at ``step``."""
        if self.size == 1:
            return
        self._generation += 1
        self._board.put(f"replan/{self._generation}", Kind.REPLAN, self.rank, step, reason[:MESSAGE_LIMIT])

    # -- failure -------------------------------------------------------------------------------------

    def report(self, where: str, error: BaseException | None, *, final: bool = False) -> None:
        """Tell the others that this rank raised; never raises itself. ``final``: it ends the program."""
        if self.size > 1:
            failure = failure_of(self.rank, where, error, final=final)
            self.progress.fail(str(failure))
            if isinstance(error, PeerError):
                # An echo: the others should hear the cause, and hear it once.
                with contextlib.suppress(dist.DistError):
                    self._give_up(self.rank if error.rank is None else error.rank, where, str(error))
            else:
                self._news.report(failure, nameless=error is None)

    def retract(self) -> None:
        """This rank goes on after all: the exception was caught and the step is being tried again."""
        self._news.retract()

    def news(self) -> Failure | None:
        """The first failure of another rank that stands."""
        return self._news.first()

    def given_up(self) -> bool:
        """Whether some rank has raised because of a failure of this one."""
        return self._news.is_given_up()

    def raise_news(self, doing: str) -> None:
        """Raise what has happened to another rank, if something has."""
        failure = self.news()
        if failure is not None:
            self._news.give_up(failure)
            kind = RankLostError if failure.lost else PeerFailedError
            raise kind(f"{failure}. This rank ({self.rank}) was waiting in {doing}.", rank=failure.rank)

    def hear(self) -> None:
        """Look for news that will not be taken back; called by the watch."""
        failure = self._news_for_watch.first()
        if failure is not None and (failure.final or failure.lost):
            self.heard = failure

    def check_news(self) -> None:
        """Raise what the watch has heard: there is no point in starting something that others will not join."""
        if self.heard is not None:
            self.raise_news("its own work, before a collective")

    def linger(self, rank: int | None, *, deadline: float) -> None:
        """Let ``rank``, the first cause, end first: launchers take the first process that ends for the cause."""
        while rank is not None and self.inquiries.is_running(rank) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _raise_replan(self, doing: str) -> None:
        match self._board.read(f"replan/{self._generation + 1}", Kind.REPLAN):
            case (int(rank), int(step), str(reason)) if step <= self.step:
                pass
            case _:
                # None, or that rank is ahead: it has what this one is still waiting for.
                return
        raise PeerFailedError(
            f"The parameters of rank {rank} changed since the last step ({reason}), and those of this "
            f"rank ({self.rank}), which was waiting in {doing}, did not. Freeze, unfreeze, add and replace "
            "parameters in the same step on every rank.",
            rank=rank,
        )

    # -- waiting -------------------------------------------------------------------------------------

    def wait(self, work: dist.Work, doing: str, *, excuse: Callable[[], bool] | None = None) -> None:
        """``work.wait()`` that ends with an error as soon as another rank has said that it failed.

        Where ``wait()`` does not block the host (accelerator streams) it returns at once, as ever. ``excuse`` is asked
        now and then whether the others may take longer: then neither time-out nor hang watch count. It may raise.
        """

        def attempt(timeout_s: float) -> bool:
            try:
                work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                if not work.is_completed():
                    return False
                # It ended, well or not, between the two looks: the error above is about time alone.
                work.wait()
            return True

        self._wait(attempt, doing, excuse)

    def wait_future(self, future: torch.futures.Future[T], doing: str) -> T:
        """``future.wait()`` with the same watchfulness."""
        if not future.done():
            pause_s = 20e-6

            def attempt(timeout_s: float) -> bool:
                # A future has no wait with a time-out, and a callback would need the interpreter lock on
                # the communication thread: short sleeps that grow are the cheapest thing left.
                nonlocal pause_s
                end = time.monotonic() + timeout_s
                while not future.done():
                    if time.monotonic() > end:
                        return False
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, 1e-3)
                return True

            self._wait(attempt, doing)
        try:
            return future.wait()
        except PeerError:
            raise
        except RuntimeError as error:
            if not _is_of_a_backend(error):
                raise
            raise self._broken(doing, error) from error

    def _wait(self, attempt: Callable[[float], bool], doing: str, excuse: Callable[[], bool] | None = None) -> None:
        start = time.monotonic()
        heard_at: float | None = None
        told = self._hang.mode == "off"
        try:
            while not attempt(PATIENCE_S):
                now = time.monotonic()
                if not self.progress.waiting_since:
                    self.progress.begin_wait(doing)
                failure = self.news()
                if failure is None:
                    heard_at = None
                elif failure.final or failure.lost or (heard_at is not None and now - heard_at > GRACE_S):
                    self.raise_news(doing)
                elif heard_at is None:
                    heard_at = now
                self._raise_replan(doing)
                if excuse is not None and excuse():
                    start = now
                if not told and now - start > self._hang.after_s:
                    told = True
                    self._tell_of_hang(doing, now - start)
                if now - start > self._timeout_s:
                    raise RankLostError(
                        f"Rank {self.rank} waited {now - start:.0f} s in {doing}, the group's time-out, and "
                        "some rank never joined in. Look for the rank that stopped or took another path."
                    )
        except PeerError:
            raise
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise RankLostError(
                    f"Rank {self.rank} ran into the group's time-out in {doing}: some rank never joined in. Look for "
                    "the one that stopped or took another path."
                ) from error
            raise self._broken(doing, error) from error
        finally:
            if self.progress.waiting_since:
                self.progress.end_wait()

    def _tell_of_hang(self, doing: str, waited_s: float) -> None:
        """Say who waits for whom: as an error, or on stderr, by the first rank that is not to blame."""
        report = self.inquiries.report()
        text = f"Rank {self.rank} has waited {waited_s:.0f} s in {doing}. {report}"
        if self._hang.mode == "enforce":
            if report.ranks:
                self._give_up(report.ranks[0], doing, report.cause)
            raise RankLostError(text, rank=report.ranks[0] if report.ranks else None)
        if self.rank == min(set(range(self.size)) - set(report.ranks), default=0):
            print(f"paceline: {text}", file=sys.stderr, flush=True)

    def _give_up(self, rank: int, doing: str, why: str) -> None:
        """Let the others raise for the same reason: from here on this rank does not join them any more."""
        self._news.give_up(Failure(rank, doing, "", why[:MESSAGE_LIMIT].rstrip("."), final=True, lost=True))

    def _broken(self, doing: str, error: RuntimeError) -> RankLostError:
        """What has happened, now that a backend gave up a collective: a rank is gone, or ranks took different paths."""
        lost: list[int] = []
        parted = None
        # The store may be gone too: then nothing is known.
        with contextlib.suppress(dist.DistError):
            self.raise_news(doing)
            self._board.store.set(f"survivor/{self.rank}", "")
            parted = self.inquiries.divergence()
            lost = list(parted.ranks) if parted is not None else self._who_is_lost()
            if len(lost) == 1:
                # The others hear it from here, should their own connection be to one that goes on waiting.
                gone = f"Rank {lost[0]} is gone: its process has ended, or its connection broke"
                self._give_up(lost[0], doing, parted.cause if parted is not None else gone)
        who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
        if parted is not None:
            why = f"{parted}\nThe backend could not match them while"
        else:
            why = f"The connection to {who} broke while"
        remedy = "Make all ranks do the same." if parted else "That rank has probably ended; look at its output first."
        return RankLostError(
            f"{why} rank {self.rank} was in {doing}: {_first_sentence(error)}. {remedy}",
            rank=lost[0] if len(lost) == 1 else None,
        )

    def _who_is_lost(self) -> list[int]:
        """The ranks that are known to have ended; or, of other hosts, those that do not sign up as survivors."""
        deadline = time.monotonic() + GRACE_S
        others = [r for r in range(self.size) if r != self.rank]
        while time.monotonic() < deadline and len(others) > 1:
            others = self.inquiries.gone() or [r for r in others if not self._board.has(f"survivor/{r}")]
            time.sleep(0.05)
        return others


def _job_of(group: dist.ProcessGroup) -> str:
    """A name that one rank of the group made up and all have."""
    store = dist.PrefixStore("paceline", _torch.group_store(group))
    name: bytes = store.compare_set("job", "", uuid.uuid4().hex)
    return name.decode()


def _is_of_a_backend(error: RuntimeError) -> bool:
    """Whether a future failed because a connection did; what else it holds is the user's callback's."""
    # A future hands on the text of an error that passed through a callback, and not the error.
    words = ("Connection", "gloo/", "Socket", RankLostError.__name__)
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _first_sentence(error: Exception) -> str:
    """A backend's own words without the places in its source and the hints that follow them."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    text = text.rpartition("running the callback: ")[2]
    return text.rpartition("] ")[2].split(". ")[0].rstrip(".")
