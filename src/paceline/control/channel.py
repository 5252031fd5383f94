"""A rank's line to the others over the group's store: agreement before collectives, news of failure.

Messages are JSON of a few fixed fields, bounded in size. Nothing here runs in a step without trouble: the
store is asked only after a wait has lasted longer than ``PATIENCE_S``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline import _torch
from paceline.errors import ParameterMismatchError, PeerFailedError, RankLostError

T = TypeVar("T")

PATIENCE_S = 0.25
# A rank that raised may catch its own exception and try again; it gets this long to take the news back.
GRACE_S = 1.0
MESSAGE_LIMIT = 2000
_instances: dict[str, int] = {}


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
        name = group.group_name
        number = _instances[name] = _instances.get(name, -1) + 1
        # One connection for all channels of the group would do, but the prefix keeps their keys apart.
        self._store = dist.PrefixStore(f"paceline/{number}", _torch.group_store(group))
        self._timeout_s = _torch.group_timeout_s(group)
        self._agreements = 0
        self._reported = False
        self._generation = 0

    # -- agreement -----------------------------------------------------------------------------------

    def agree(self, what: str, digest: str, details: Callable[[], list[list[Any]]], names: list[str]) -> None:
        """Return once all ranks have brought the same ``digest``; raise the same error on all if not.

        ``details`` are the rows that make up the digest (first field: a name), fetched only to say where
        ranks differ; ``names`` says what the other fields of a row are.
        """
        if self.size == 1:
            return
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
        store.set(f"{key}/details/{self.rank}", json.dumps(details()))
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

    def announce_replan(self, reason: str) -> None:
        """Tell ranks that may be waiting for the old plan's collectives that this rank has left it."""
        if self.size == 1:
            return
        self._generation += 1
        news = Failure(self.rank, "start of a backward", "changed parameters", reason[:MESSAGE_LIMIT])
        self._store.set(f"replan/{self._generation}", news.encode())

    def _collect(self, key: str, what: str) -> None:
        for r in range(self.size):
            self._read(f"{key}/{r}", what, waits_for=[r])

    def _read(self, key: str, what: str, *, waits_for: list[int]) -> str:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._store.wait([key], timedelta(seconds=min(5.0, max(self._timeout_s, 0.1))))
                return self._store.get(key).decode()
            except dist.DistStoreError:
                self.raise_news(what)
                if time.monotonic() > deadline:
                    who = ", ".join(map(str, waits_for))
                    raise RankLostError(
                        f"Rank {self.rank} waited {self._timeout_s:.0f} s for rank {who} to compare {what}, "
                        "and it never came. Look at that rank's output; if it is only slow, give the process "
                        "group a longer timeout.",
                        rank=waits_for[0],
                    ) from None

    # -- failure -------------------------------------------------------------------------------------

    def report(self, where: str, error: BaseException | None) -> None:
        """Tell the others that this rank raised. The first cause wins; never raises itself."""
        name = type(error).__name__ if error is not None else "an exception"
        failure = Failure(self.rank, where, name, str(error)[:MESSAGE_LIMIT] if error is not None else "")
        try:
            won = self._store.compare_set("failure", "", failure.encode())
            self._reported = won.decode() == failure.encode()
            # Ranks still in the constructor's agreement wait for its verdict, not for news.
            self._store.compare_set(f"agree/{self._agreements}/verdict", "", failure.encode())
        except (RuntimeError, dist.DistError):
            # The store's host may be gone: then the others see that by themselves.
            self._reported = False

    def retract(self) -> None:
        """This rank goes on after all: the exception was caught and the step is being tried again."""
        if self._reported:
            self._store.delete_key("failure")
            self._reported = False

    def news(self) -> Failure | None:
        """Another rank's failure, if there is one."""
        if not self._store.check(["failure"]):
            return None
        failure = Failure.decode(self._store.get("failure"))
        return None if failure.rank == self.rank else failure

    def raise_news(self, doing: str) -> None:
        failure = self.news()
        if failure is not None:
            raise PeerFailedError(f"{failure}. This rank ({self.rank}) was waiting in {doing}.", rank=failure.rank)

    def _raise_replan(self, doing: str) -> None:
        key = f"replan/{self._generation + 1}"
        if not self._store.check([key]):
            return
        news = Failure.decode(self._store.get(key))
        raise PeerFailedError(
            f"The parameters of rank {news.rank} changed since the last step ({news.message}), and those of this "
            f"rank ({self.rank}), which was waiting in {doing}, did not. Freeze, unfreeze, add and replace "
            "parameters in the same step on every rank.",
            rank=news.rank,
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
                if work.is_completed() or "timed out" not in str(error).lower():
                    raise
                return False
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
            self.raise_news(doing)
            raise RankLostError(
                f"The connection to another rank broke while rank {self.rank} was in {doing}: {error}. "
                "That rank has probably ended; look at its output first."
            ) from error


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
        for name, a, b in zip(names, ours_row, theirs_row, strict=True):
            if a != b:
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
