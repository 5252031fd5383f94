"""A rank's line to the others over the group's store: agreement before collectives, news of failure.

Messages are JSON of a few fixed fields, bounded in size. Nothing here runs in a step without trouble: the
store is asked only after a wait has lasted longer than ``PATIENCE_S``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline import _torch
from paceline.control.last_words import speak_for
from paceline.errors import ParameterMismatchError, PeerFailedError, RankLostError

T = TypeVar("T")

PATIENCE_S = 0.25
# A rank that raised may catch its own exception and try again; it gets this long to take the news back.
GRACE_S = 1.0
MESSAGE_LIMIT = 2000
SAME, DIFFER = "same", "differ"
# Rows that begin so compare an option of the wrapper instead of a parameter.
OPTION = "option "


@dataclass(frozen=True)
class Failure:
    """One rank's news: it raised, and why."""

    rank: int
    where: str
    type: str
    message: str

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> Failure:
        fields = json.loads(text)
        return Failure(int(fields["rank"]), str(fields["where"]), str(fields["type"]), str(fields["message"]))

    def __str__(self) -> str:
        cause = f"{self.type}: {self.message}" if self.message else self.type
        return f"rank {self.rank} raised in {self.where}: {cause}"


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
        self._store = dist.PrefixStore(str(number), store)
        self._timeout_s = _torch.group_timeout_s(group)
        self._agreements = 0
        self._reports: list[int] = []
        self._nameless = False
        """The last report could not say which exception it was."""
        self._generation = 0
        self.step = 0
        """How many synchronised backwards this rank has finished."""
        if self.size > 1:
            speak_for(self)

    # -- agreement -----------------------------------------------------------------------------------

    def agree(self, what: str, rows: list[list[Any]], names: list[str]) -> None:
        """Return once all ranks have brought the same ``rows``; raise the same error on all if they differ.

        The first field of a row is a name, and ``names`` says what the fields are. Only a digest travels as
        long as ranks agree.
        """
        if self.size == 1:
            return
        text = json.dumps(rows)
        digest = hashlib.sha256(text.encode()).hexdigest()
        key = f"agree/{self._agreements}"
        self._agreements += 1
        store = self._store
        store.set(f"{key}/{self.rank}", digest)
        if self.rank == 0:
            self._collect(key, what)
            digests = [store.get(f"{key}/{r}").decode() for r in range(self.size)]
            verdict = "same" if len(set(digests)) == 1 else "differ"
            store.compare_set(f"{key}/verdict", "", verdict)
        verdict = self._read(f"{key}/verdict", what, waits_for=[0])
        if verdict == "same":
            return
        if verdict != "differ":
            failure = Failure.decode(verdict.encode())
            raise PeerFailedError(
                f"{failure}, while this rank ({self.rank}) was comparing its {what} with it.",
                rank=failure.rank,
            )
        store.set(f"{key}/details/{self.rank}", text)
        if self.rank == 0:
            self._collect(f"{key}/details", what)
            rows = [json.loads(store.get(f"{key}/details/{r}")) for r in range(self.size)]
            store.set(f"{key}/difference", describe_difference(what, rows, names))
        raise ParameterMismatchError(self._read(f"{key}/difference", what, waits_for=[0]))

    def gather(self, tag: str, text: str) -> list[str]:
        """Everybody's ``text``, by rank. For what must be said in words, when something is wrong."""
        key = f"gather/{tag}/{self._agreements}"
        self._agreements += 1
        self._store.set(f"{key}/{self.rank}", text[:MESSAGE_LIMIT])
        return [self._read(f"{key}/{r}", tag, waits_for=[r]) for r in range(self.size)]

    def announce_replan(self, reason: str, *, step: int) -> None:
        """Tell ranks that may be waiting for the old plan's collectives that this rank has left it at ``step``."""
        if self.size == 1:
            return
        self._generation += 1
        news = {"rank": self.rank, "step": step, "reason": reason[:MESSAGE_LIMIT]}
        self._store.set(f"replan/{self._generation}", json.dumps(news))

    def _collect(self, key: str, what: str) -> None:
        for r in range(self.size):
            self._read(f"{key}/{r}", what, waits_for=[r])

    def _read(self, key: str, what: str, *, waits_for: list[int]) -> str:
        start = time.monotonic()
        news_at, pause_s = start + PATIENCE_S, 0.5e-3
        # Polled: a wait with a time-out is not the same in all stores, and TCPStore writes warnings when one ends.
        while not self._store.check([key]):
            now = time.monotonic()
            if now > news_at:
                self.raise_news(f"the comparison of {what}")
                news_at = now + PATIENCE_S
            if now - start > self._timeout_s:
                who = ", ".join(map(str, waits_for))
                raise RankLostError(
                    f"Rank {self.rank} waited {self._timeout_s:.0f} s for rank {who} to compare {what}, and it never "
                    "came. Look at that rank's output; if it is only slow, give the process group a longer timeout.",
                    rank=waits_for[0],
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 20e-3)
        return self._store.get(key).decode()

    # -- failure -------------------------------------------------------------------------------------

    def report(self, where: str, error: BaseException | None) -> None:
        """Tell the others that this rank raised; never raises itself."""
        name = type(error).__name__ if error is not None else "an exception"
        failure = Failure(self.rank, where, name, str(error)[:MESSAGE_LIMIT] if error is not None else "")
        try:
            if self._nameless and error is not None:
                # The same exception, now that it can be named: backward only knew that there was one.
                number = self._reports[-1]
            else:
                number = self._store.add("failures", 1)
                self._reports.append(number)
            self._nameless = error is None
            self._store.set(f"failure/{number}", failure.encode())
        except dist.DistError:
            # The store's host may be gone: then the others see that by themselves.
            return

    def retract(self) -> None:
        """This rank goes on after all: the exception was caught and the step is being tried again."""
        self._nameless = False
        while self._reports:
            # Blanked, not deleted: another rank may be about to read it.
            self._store.set(f"failure/{self._reports.pop()}", "")

    def news(self) -> Failure | None:
        """The first failure of another rank that stands."""
        keys = [f"failure/{n}" for n in range(1, self._store.add("failures", 0) + 1)]
        for key in keys:
            if self._store.check([key]):
                text = self._store.get(key)
                if text and (failure := Failure.decode(text)).rank != self.rank:
                    return failure
        # Whoever is to blame, this rank included: the others are not coming any more.
        return Failure.decode(self._store.get("given_up")) if self._store.check(["given_up"]) else None

    def _give_up(self, failure: Failure) -> None:
        """This rank is about to raise because of ``failure``: from here on that cannot be taken back."""
        self._store.compare_set("given_up", "", failure.encode())

    def given_up(self) -> bool:
        """Whether some rank has raised because of a failure of this one."""
        return bool(self._reports) and self._store.check(["given_up"])

    def raise_news(self, doing: str) -> None:
        failure = self.news()
        if failure is not None:
            self._give_up(failure)
            raise PeerFailedError(f"{failure}. This rank ({self.rank}) was waiting in {doing}.", rank=failure.rank)

    def _raise_replan(self, doing: str) -> None:
        key = f"replan/{self._generation + 1}"
        if not self._store.check([key]):
            return
        news = json.loads(self._store.get(key))
        if int(news["step"]) > self.step:
            # That rank is ahead: it has what this one is still waiting for.
            return
        raise PeerFailedError(
            f"The parameters of rank {news['rank']} changed since the last step ({news['reason']}), and those of this "
            f"rank ({self.rank}), which was waiting in {doing}, did not. Freeze, unfreeze, add and replace "
            "parameters in the same step on every rank.",
            rank=int(news["rank"]),
        )

    # -- waiting -------------------------------------------------------------------------------------

    def wait(self, work: dist.Work, doing: str) -> None:
        """``work.wait()`` that ends with an error as soon as another rank has said that it failed.

        Where ``wait()`` does not block the host (accelerator streams) it returns at once, as ever.
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

        self._wait(attempt, doing)

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
        return future.wait()

    def _wait(self, attempt: Callable[[float], bool], doing: str) -> None:
        start = time.monotonic()
        heard_at: float | None = None
        try:
            while not attempt(PATIENCE_S):
                now = time.monotonic()
                failure = self.news()
                if failure is None:
                    heard_at = None
                elif heard_at is None:
                    heard_at = now
                elif now - heard_at > GRACE_S:
                    self.raise_news(doing)
                self._raise_replan(doing)
                if now - start > self._timeout_s:
                    raise RankLostError(
                        f"Rank {self.rank} waited {now - start:.0f} s in {doing}, the group's time-out, and "
                        "some rank never joined in. Look for the rank that stopped or took another path."
                    )
        except RankLostError:
            raise
        except PeerFailedError:
            raise
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise RankLostError(
                    f"Rank {self.rank} ran into the group's time-out in {doing}: some rank never joined in. Look for "
                    "the one that stopped or took another path."
                ) from error
            lost = self._who_is_lost(doing)
            who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
            raise RankLostError(
                f"The connection to {who} broke while rank {self.rank} was in {doing}: {_first_sentence(error)}. "
                "That rank has probably ended; look at its output first.",
                rank=lost[0] if len(lost) == 1 else None,
            ) from error

    def _who_is_lost(self, doing: str) -> list[int]:
        """The ranks that do not sign up as survivors; empty if the store is gone too."""
        try:
            self.raise_news(doing)
            self._store.set(f"survivor/{self.rank}", "")
            self._store.compare_set("given_up", "", Failure(self.rank, doing, "a lost connection", "").encode())
            deadline = time.monotonic() + GRACE_S
            others = [r for r in range(self.size) if r != self.rank]
            while time.monotonic() < deadline and len(others) > 1:
                others = [r for r in others if not self._store.check([f"survivor/{r}"])]
                time.sleep(0.05)
            return others
        except dist.DistError:
            return []


def _first_sentence(error: Exception) -> str:
    """A backend's own words without the places in its source and the hints that follow them."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition("] ")[2].split(". ")[0].rstrip(".")


def describe_difference(what: str, rows_of_rank: list[list[list[Any]]], names: list[str]) -> str:
    """The first difference of each rank from rank 0, in words."""
    ours = rows_of_rank[0]
    lines = []
    for rank, theirs in enumerate(rows_of_rank):
        line = _first_difference(ours, theirs, rank, names)
        if line:
            lines.append(line)
    told = "\n  ".join(lines[:8])
    more = f"\n  (and {len(lines) - 8} more ranks)" if len(lines) > 8 else ""
    return (
        f"Ranks were given different {what}:\n  {told}{more}\n"
        "Build the module in the same way on every rank; nothing has been communicated yet."
    )


def _first_difference(ours: list[list[Any]], theirs: list[list[Any]], rank: int, names: list[str]) -> str:
    for ours_row, theirs_row in zip(ours, theirs, strict=False):
        for name, a, b in zip(names, ours_row, theirs_row, strict=False):
            if a == b:
                continue
            if ours_row[0].startswith(OPTION):
                return f"{ours_row[0]} is {a!r} on rank 0 and {b!r} on rank {rank}"
            label = "" if name == "name" else f"parameter {ours_row[0]!r}: "
            return f"{label}{name} is {a!r} on rank 0 and {b!r} on rank {rank}"
    if len(ours) != len(theirs):
        longer, has, lacks = (ours, 0, rank) if len(ours) > len(theirs) else (theirs, rank, 0)
        extra = longer[min(len(ours), len(theirs))][0]
        return (
            f"rank 0 has {len(ours)} parameters and rank {rank} has {len(theirs)}: "
            f"{extra!r} is on rank {has} but not on rank {lacks}"
        )
    return ""
