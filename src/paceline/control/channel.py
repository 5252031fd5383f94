"""A wrapper's conversation with the other ranks: agreements, news of failure, collectives, and waits for them.

Agreements and news go over the group's store. In a step without trouble, nothing here asks the store: only a wait that
takes long does (`peer_wait`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.control import forks, hang, jobs, stacks
from paceline.control.agree import WORD_LIMIT_BYTES, Agreement
from paceline.control.board import Board
from paceline.control.census import census_of, job_of
from paceline.control.difference import describe_difference, read_rows
from paceline.control.failure import MESSAGE_LIMIT, Failure, News, failure_of
from paceline.control.hang import Inquiries
from paceline.control.host_connections import HostConnections
from paceline.control.last_words import speak_for
from paceline.control.peer_wait import PATIENCE_S, PeerWait, is_of_a_backend, is_time_out
from paceline.control.progress import Progress
from paceline.control.store_line import StoreLine
from paceline.control.store_thread import store_threads_of
from paceline.control.wire import MessageKind
from paceline.control.works import HOST, DeviceWorks, backend_for, blocks_host, future_ends
from paceline.errors import (
    DisagreementError,
    LoneForwardError,
    ParameterMismatchError,
    PeerError,
    PeerFailedError,
    RankLostError,
    StoreSilentError,
)

T = TypeVar("T")

# A text in words of at most this many pieces is told to the others: 64 MiB.
_MOST_PIECES = 64

_troubles: dict[str, int] = {}
"""How often the ranks of a group have told each other what they did, by the group's name."""


class Channel:
    """The control channel of one wrapped module.

    Every rank of the group must make its channels of that group in the same order, as it must call
    collectives in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, *, number: int | None = None) -> None:
        """``number`` is 0 for the one channel that belongs to no wrapper; the others are counted, from 1."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.timeout_s = _torch.group_timeout_s(group)
        self._is_fork = False
        world = dist.group.WORLD or group
        store_threads = store_threads_of(group)
        self.store_thread = store_threads.own
        store = dist.PrefixStore("paceline", _torch.group_store(group))
        try:
            number = self._count(store) if number is None else number
            # One rank made up this name, and all ranks share it: messages of another job or group do not fit here.
            self.job = self.store_thread.run(job_of, group, within_s=self.timeout_s)
            whole = self.job if world is group else self.store_thread.run(job_of, world, within_s=self.timeout_s)
        except StoreSilentError as error:
            raise RankLostError(f"Rank {self.rank} could not begin to talk to the others. {error}") from error
        prefixed = dist.PrefixStore(str(number), store)
        self._board = Board(prefixed, name=f"{self.job}/{number}", store_thread=self.store_thread)
        self._line = StoreLine(self._board, rank=self.rank, size=self.size, waiter=self._agreeing)
        self._news = News(self._board, rank=self.rank, size=self.size)
        self._generation = 0
        self.step = 0
        """How many synchronised backwards this rank had finished when its last one began."""
        self.hang = hang.settings()
        self.is_watched = self.size > 1 and self.hang.mode != "off"
        # One directory for all groups of a job: whoever looks wants to see everything that a process takes part in.
        directory = jobs.make_directory(whole) if self.is_watched else None
        self.progress = Progress(
            directory,
            rank=self.rank,
            size=self.size,
            wrapper=number,
            group="" if self.job == whole else self.job,
            stack_signal=stacks.answer_requests(directory),
        )
        census = census_of(world, whole, self.store_thread, ranks=dist.get_process_group_ranks(group))
        if self.size > 1:
            census.sign(self.rank)
        self.inquiries = Inquiries(
            self._board.on_another_connection(store_threads.of_watch) if self.is_watched else self._board,
            self.progress,
            census,
            rank=self.rank,
            size=self.size,
            directory=directory,
        )
        self._news_for_watch = News(self.inquiries.board, rank=self.rank, size=self.size)
        self._obituaries: set[int] = set()
        self._on_device = DeviceWorks(self)
        self._hosts = None if backend_for(group, HOST) else HostConnections(self, self._board.store)
        self.heard: Failure | None = None
        """What the watch has heard about another rank. This rank looks at it before its next collective."""
        forks.tell(self)
        if self.size > 1:
            speak_for(self)
        if self.is_watched:
            hang.watch(self)

    def _count(self, store: dist.Store) -> int:
        """The number of this channel among this rank's. The store keeps it, as it begins and ends with the group."""
        # It is asked for once, however long that takes: asking again would count again.
        return self.store_thread.run(store.add, f"channels/{self.rank}", 1, within_s=self.timeout_s)

    def become_fork(self) -> None:
        """This process is a fork of the rank: it must not speak for the rank, nor start anything with the others."""
        self._is_fork = True
        self.progress.become_fork()

    def _check_is_rank(self) -> None:
        if self._is_fork:
            raise forks.refusal(f"rank {self.rank}")

    # -- agreement -----------------------------------------------------------------------------------

    def agree(self, topic: str, value: int | bytes, *, timeout_s: float | None = None) -> Agreement:
        """Bring ``value`` and learn what every rank of the group brought. All ranks get the same answer.

        Ranks must agree in the same order, from one thread at a time. Topics should be few, because the last words of
        each stay in the store. What varies belongs in the value, which is a 64-bit integer or at most
        `WORD_LIMIT_BYTES` bytes. Agree on a digest of anything longer.

        It waits for ``timeout_s``, by default the group's time-out, and then names the ranks that are ``missing``
        instead of raising. It raises as soon as another rank has said that it failed (``PeerFailedError``) or has ended
        (``RankLostError``). It takes one or two milliseconds on one host, and is not for every step.

        Example::

            found = channel.agree("graph", digest)
            if found.missing: ...              # ranks that did not come
            elif not found.equal: ...          # found.differing, found.values
            most = channel.agree("compiles", count).reduce(max)
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            return self._line.agree(topic, value, timeout_s=timeout_s)
        except dist.DistError as error:
            raise self._agreeing(topic, timeout_s).broken(error) from error

    def _agreeing(self, topic: str, timeout_s: float) -> PeerWait:
        return PeerWait(self, f"the comparison of {topic}", timeout_s=timeout_s, for_collective=False)

    def compare(self, what: str, rows: list[Sequence[Any]], names: list[str]) -> None:
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
        told = self._share(f"rows of {what}", text)
        rows_of_rank = [read_rows(theirs, rank, what) for rank, theirs in enumerate(told)]
        text = describe_difference(what, rows_of_rank, names)
        raise ParameterMismatchError(text, shown_by=0 if self.rank else None)

    def gather(self, tag: str, text: str) -> list[str]:
        """Everybody's ``text``, by rank. This is for when something is wrong and has to be said in words."""
        return self._share(tag, text[:MESSAGE_LIMIT])

    def gather_in_group(self, text: str) -> list[str]:
        """Everybody's ``text``, by rank, even if ranks are in different wrappers of the group.

        All ranks must have found out that something is wrong by one and the same collective.
        """
        _troubles[self.job] = number = _troubles.get(self.job, 0) + 1
        store = dist.PrefixStore(f"trouble{number}", dist.PrefixStore("paceline", _torch.group_store(self.group)))
        board = Board(store, name=f"{self.job}/trouble{number}", store_thread=self.store_thread)
        line = StoreLine(board, rank=self.rank, size=self.size, waiter=self._agreeing)
        found = line.agree("what each rank did", text[:MESSAGE_LIMIT], timeout_s=self.timeout_s)
        return ["it said nothing" if value is None else str(value) for value in found.values]

    def _share(self, topic: str, text: str) -> list[str]:
        """Everybody's ``text``, which may be long, in pieces that fit an agreement."""
        raw = text.encode()
        pieces = [raw[at : at + WORD_LIMIT_BYTES] for at in range(0, len(raw), WORD_LIMIT_BYTES)]
        lengths = self.agree(f"{topic}: length", len(pieces))
        if lengths.missing:
            raise self._nobody_came(lengths.missing, f"tell its {topic}")
        most = lengths.reduce(max)
        if most > _MOST_PIECES:
            long = [rank for rank, (length,) in enumerate(filter(None, lengths.words)) if length == most]
            raise DisagreementError(
                f"Rank {long[0]} says that its {topic} take {most} pieces of {WORD_LIMIT_BYTES} bytes, and at most "
                f"{_MOST_PIECES} are exchanged. Look at what that rank does differently."
            )
        told = [b""] * self.size
        for n in range(most):
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
            f"Rank {self.rank} waited {self.timeout_s:.0f} s for rank {who} to {to_do}, and it never "
            "came. Look at that rank's output; if it is only slow, give the process group a longer timeout.",
            rank=missing[0],
        )

    def announce_replan(self, reason: str, *, step: int) -> None:
        """Tell ranks that may be waiting for the old plan's collectives that this rank has left it at ``step``."""
        if self.size == 1:
            return
        self._generation += 1
        told = self.rank, step, reason[:MESSAGE_LIMIT]
        wait = PeerWait(self, "the announcement of its new parameters", timeout_s=self.timeout_s, for_collective=False)
        wait.insist(lambda: self._board.put(f"replan/{self._generation}", MessageKind.REPLAN, *told))

    # -- failure -------------------------------------------------------------------------------------

    def report(self, where: str, error: BaseException | None, *, final: bool = False) -> None:
        """Tell the others that this rank raised; never raises itself. ``final`` means that it ends the program."""
        if self.size > 1 and not self._is_fork:
            failure = failure_of(self.rank, where, error, final=final)
            self.progress.fail(str(failure))
            if isinstance(error, PeerError):
                # This error is an echo. The others should hear its cause, and hear it once.
                is_lone = isinstance(error, LoneForwardError)
                rank = self.rank if error.rank is None else error.rank
                self.give_up(rank, where, str(error), is_lone_forward=is_lone)
            else:
                self._news.report(failure, nameless=error is None)

    def retract(self) -> None:
        """Take the reports back: the exception was caught, the step is being tried again, and this rank goes on."""
        self._news.retract()

    def news(self) -> Failure | None:
        """The first failure of another rank that has not been taken back."""
        return self._news.first()

    def given_up(self) -> bool:
        """Whether some rank has raised because of a failure of this one."""
        return self._news.is_given_up()

    def raise_news(self, doing: str) -> None:
        """Raise an error if something has happened to another rank."""
        self._raise(self.news(), doing)

    def _raise(self, failure: Failure | None, doing: str) -> None:
        if failure is not None:
            with contextlib.suppress(dist.DistError):
                self._news.give_up(failure)
            kind = RankLostError if failure.lost else PeerFailedError
            kind = LoneForwardError if failure.is_lone_forward else kind
            raise kind(f"{failure}. This rank ({self.rank}) was waiting in {doing}.", rank=failure.rank)

    def hear(self) -> None:
        """Look for news that will not be taken back, and for ranks that died without a word; called by the watch."""
        gone = set(self.inquiries.gone())
        for rank in gone - self._obituaries:
            # This tells the ranks of other hosts, which cannot see the process.
            self.inquiries.board.put(f"gone/{rank}", MessageKind.WORD, ("its process has ended",))
            self.inquiries.board.add("gone", 1)
            self._obituaries.add(rank)
        missed = self.inquiries.missed() if gone else []
        failure = self._news_for_watch.first()
        if failure is None and missed:
            failure = Failure(
                missed[0], "", "", f"Rank {missed[0]} is gone: its process has ended", final=True, lost=True
            )
            self._news_for_watch.give_up(failure)
        if failure is not None and (failure.final or failure.lost):
            self.heard = failure
        self.heard = self._on_device.look() or self.heard

    def check_news(self) -> None:
        """Raise what the watch has heard: there is no point in starting something that others will not join."""
        self._check_is_rank()
        if self.heard is not None:
            # There may be more news than the watch has heard, and the store may be silent by now.
            with contextlib.suppress(dist.DistError):
                self.raise_news("its own work, before a collective")
            self._raise(self.heard, "its own work, before a collective")

    def gone(self) -> list[int]:
        """The ranks whose processes have ended, as seen on this host or as told by a rank of their own host."""
        found = set(self.inquiries.gone())
        with contextlib.suppress(dist.DistError):
            if self._board.add("gone", 0):
                found |= {rank for rank in range(self.size) if self._board.read(f"gone/{rank}", MessageKind.WORD)}
        return sorted(found - {self.rank})

    def linger(self, rank: int | None, *, deadline: float) -> None:
        """Wait until ``rank``, the first cause, has ended, because launchers blame the process that ends first."""
        while rank is not None and self.inquiries.is_running(rank) and time.monotonic() < deadline:
            time.sleep(0.05)

    def raise_replan(self, doing: str) -> None:
        """Raise if another rank has left the plan of buckets in which this one waits."""
        match self._board.read(f"replan/{self._generation + 1}", MessageKind.REPLAN):
            case (int(rank), int(step), str(reason)) if step <= self.step and 0 <= rank < self.size:
                pass
            case _:
                # There is no such news, or that rank is ahead: it has already joined what this one is waiting for.
                return
        raise PeerFailedError(
            f"The parameters of rank {rank} changed since the last step ({reason}), and those of this "
            f"rank ({self.rank}), which was waiting in {doing}, did not. Freeze, unfreeze, add and replace "
            "parameters in the same step on every rank.",
            rank=rank,
        )

    # -- collectives ---------------------------------------------------------------------------------

    def start_all_reduce(
        self, tensor: Tensor, what: str, *, op: Any = dist.ReduceOp.SUM, kind: str = "all-reduce"
    ) -> Callable[[], None]:
        """Begin to reduce ``tensor`` over the ranks, in place. The function that this returns waits for the result."""
        self._check_is_rank()
        # The size of a sparse tensor's rows is compared between ranks, but not their number, which may differ.
        self.progress.start(kind, what, tensor.values()[:0] if tensor.is_sparse else tensor)
        if self._hosts and tensor.device.type == HOST:
            work: Any = self._hosts.all_reduce(tensor, op)
        else:
            work = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        return partial(self._finish, work, f"the {kind} of {what}", tensor)

    def start_broadcast(self, tensor: Tensor, what: str, *, source: int) -> Callable[[], None]:
        """Begin to give all ranks the ``tensor`` of rank ``source``. The function that this returns waits for it."""
        self._check_is_rank()
        self.progress.start("broadcast", what, tensor)
        if self._hosts and tensor.device.type == HOST:
            work: Any = self._hosts.broadcast(tensor, source=source)
        else:
            work = dist.broadcast(tensor, group_src=source, group=self.group, async_op=True)
        return partial(self._finish, work, f"the broadcast of {what}", tensor)

    def _finish(self, work: dist.Work, doing: str, kept: Tensor) -> None:
        """Wait for a collective. ``kept`` lives until then, since not every backend holds on to what it sends."""
        self.wait(work, doing, device=kept.device.type)

    # -- waiting -------------------------------------------------------------------------------------

    def wait(
        self, work: dist.Work, doing: str, *, device: str = HOST, excuse: Callable[[], bool] | None = None
    ) -> None:
        """``work.wait()`` that ends with an error as soon as another rank has said that it failed.

        ``device`` is the type of device that the work's tensors are on. If ``wait()`` does not block the host there,
        this returns at once. ``excuse`` is called now and then. If it returns True, the others may take longer, and
        neither the time-out nor the hang watch counts. It may raise.
        """
        if device != HOST and not blocks_host(self.group, device):
            self._wait(lambda _: work.wait(), doing)
            self._on_device.add(work, doing)
            return

        def attempt(timeout_s: float) -> bool:
            try:
                work.wait(timedelta(seconds=timeout_s))
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                if not work.is_completed():
                    return False
                # The work ended, well or not, just after the time-out, so that the error above is only about the time.
                work.wait()
            return True

        self._wait(attempt, doing, excuse)

    def wait_future(self, future: torch.futures.Future[T], doing: str) -> T:
        """``future.wait()`` that watches for failures in the same way."""
        if not future.done():
            self._wait(future_ends(future), doing)
        try:
            return future.wait()
        except PeerError:
            raise
        except RuntimeError as error:
            if not is_of_a_backend(error):
                raise
            raise PeerWait(self, doing, timeout_s=self.timeout_s).broken(error) from error

    def _wait(self, attempt: Callable[[float], bool], doing: str, excuse: Callable[[], bool] | None = None) -> None:
        watch = partial(PeerWait, self, doing, timeout_s=self.timeout_s, excuse=excuse, begun=time.monotonic())
        wait: PeerWait | None = None
        try:
            # In a step without trouble a wait ends here.
            if attempt(min(PATIENCE_S, self.timeout_s)):
                return
            wait = watch()
            if not wait.keep(attempt, tried=True):
                raise wait.expired()
        except PeerError as error:
            if wait is None and (explained := watch().explained(error)):
                raise explained from error
            raise
        except RuntimeError as error:
            # Some backends notice the time-out themselves.
            wait = wait or watch()
            if is_time_out(error):
                raise wait.expired() from error
            raise wait.broken(error) from error

    def give_up(self, rank: int, doing: str, why: str, *, is_lone_forward: bool = False) -> None:
        """Let the others raise for the same reason: from here on this rank does not join them any more."""
        # A rank that cannot be told finds out as this rank did.
        with contextlib.suppress(dist.DistError):
            text = why[:MESSAGE_LIMIT].rstrip(".")
            self._news.give_up(Failure(rank, doing, "", text, final=True, lost=True, is_lone_forward=is_lone_forward))

    def finish(self) -> None:
        """This rank shuts down, and takes part in nothing any more."""
        self.progress.finish()

    def sign_as_survivor(self) -> None:
        """Tell the others that this rank is still there, although its connections broke."""
        self._board.put(f"survivor/{self.rank}", MessageKind.WORD, ("it is still there",))

    def survivors(self) -> set[int]:
        """The ranks that have signed."""
        with contextlib.suppress(dist.DistError):
            return {rank for rank in range(self.size) if self._board.read(f"survivor/{rank}", MessageKind.WORD)}
        return set()
