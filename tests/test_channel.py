"""The control channel: agreement, news of failure, and waits that end when a peer has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline.control import OPTION, Channel, Failure, vigil
from paceline.control.board import Board
from paceline.control.channel import MESSAGE_LIMIT
from paceline.control.difference import describe_difference
from paceline.control.errands import Errands
from paceline.control.failure import News
from paceline.control.wire import MAGIC, Kind
from paceline.errors import ParameterMismatchError, PeerError, PeerFailedError, RankLostError

Ranks = Callable[..., list[Any]]
FIELDS = ["name", "shape", "dtype"]
ROWS: list[list[Any]] = [["a", [2, 3], "float32"], ["b", [4], "float32"]]


class BoomError(Exception):
    pass


@contextmanager
def _short_grace() -> Iterator[None]:
    """The news is believed soon: these tests are about what follows."""
    with mock.patch.object(vigil, "GRACE_S", 0.05), mock.patch.object(vigil, "PATIENCE_S", 0.02):
        yield


def _channel(*, timeout_s: float | None = None) -> Channel:
    made = Channel(dist.group.WORLD)
    if timeout_s is not None:
        made.timeout_s = timeout_s
    # No rank goes on before all are there: what follows is about the channel, not about who came first.
    dist.barrier()
    return made


# -- without ranks -------------------------------------------------------------------------------------


def test_news_is_put_in_words() -> None:
    assert str(Failure(3, "forward", "KeyError", "'x'")) == "rank 3 raised in forward: KeyError: 'x'"
    assert str(Failure(3, "backward", "KeyError", "")) == "rank 3 raised in backward: KeyError"
    told = str(Failure(3, "forward", "KeyError", "'x'", line="train.py:88 in load"))
    assert told == "rank 3 raised in forward: KeyError: 'x' (train.py:88 in load)"
    assert str(Failure(3, "forward", "", "Rank 3 is gone", lost=True)) == "Rank 3 is gone"


def test_failures_that_were_taken_back_are_not_read_again() -> None:
    board = Board(dist.HashStore(), name="job/1")
    theirs, own = News(board, rank=1), News(board, rank=0)
    for n in range(20):
        theirs.report(Failure(1, "forward", "KeyError", str(n)), nameless=False)
        assert str(n) in str(own.first())
        theirs.retract()
    own.report(Failure(0, "forward", "KeyError", "own"), nameless=False)
    assert own.first() is None
    # Somebody has a number and has not put up yet what happened: it must be found when it is there.
    late = board.store.add("failures", 1)
    theirs.report(Failure(1, "forward", "KeyError", "second"), nameless=False)
    assert "second" in str(own.first())
    board.put(f"failure/{late}", Kind.FAILURE, 2, "forward", "KeyError", "first", "", 0)
    with mock.patch.object(board, "has", side_effect=board.has) as looks:
        assert "first" in str(own.first())
    assert [call.args for call in looks.mock_calls] == [(f"failure/{late}",)]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([["a", [2, 3], "float64"], ROWS[1]], "parameter 'a': dtype is 'float32' on rank 0 and 'float64' on rank 1"),
        ([ROWS[0], ["b", [5], "float32"]], "parameter 'b': shape is [4] on rank 0 and [5] on rank 1"),
        ([["c", [2, 3], "float32"], ROWS[1]], "name is 'a' on rank 0 and 'c' on rank 1"),
        (ROWS[:1], "rank 0 has 2 parameters and rank 1 has 1: 'b' is on rank 0 but not on rank 1"),
        ([*ROWS, ["c", [1], "int8"]], "rank 0 has 2 parameters and rank 1 has 3: 'c' is on rank 1 but not on rank 0"),
        ([], "'a' is on rank 0 but not on rank 1"),
    ],
    ids=["dtype", "shape", "name", "fewer", "more", "none"],
)
def test_a_difference_is_put_in_words(theirs: list[list[Any]], words: str) -> None:
    told = describe_difference("parameters", [ROWS, theirs], FIELDS)
    assert words in told
    assert told.startswith("Ranks were given different parameters:")
    assert "nothing has been communicated yet" in told


def test_an_option_is_not_called_a_parameter() -> None:
    rows = [[[f"{OPTION}static_graph", value]] for value in (True, False)]
    told = describe_difference("options", rows, ["name", "value"])
    assert "option static_graph is True on rank 0 and False on rank 1" in told
    assert "parameter" not in told


def test_only_ranks_that_differ_are_named_and_not_too_many() -> None:
    other = [["a", [2, 3], "float64"], ROWS[1]]
    told = describe_difference("parameters", [ROWS, ROWS, other], FIELDS)
    assert "rank 2" in told
    assert "rank 1" not in told
    told = describe_difference("parameters", [ROWS, *[other] * 20], FIELDS)
    assert told.count("on rank 0 and") == 8
    assert "and 12 more ranks" in told


# -- agreement -----------------------------------------------------------------------------------------


def _agree_same(rank: int, size: int) -> None:
    line = _channel()
    for _ in range(3):
        line.compare("parameters", ROWS, FIELDS)
    line.compare("parameters", [], FIELDS)
    assert line.news() is None


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_that_are_alike_agree(ranks: Ranks, world_size: int) -> None:
    ranks(_agree_same, world_size=world_size)


def _agree_differ(rank: int, size: int) -> str:
    line = _channel()
    rows = ROWS if rank != 1 else [ROWS[0], ["b", [5], "float32"]]
    with pytest.raises(ParameterMismatchError) as caught:
        line.compare("parameters", rows, FIELDS)
    line.compare("parameters", ROWS, FIELDS)  # an answer of the last time must not be taken for one of this time
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_differ_raise_the_same_error_everywhere(ranks: Ranks, world_size: int) -> None:
    told = ranks(_agree_differ, world_size=world_size)
    assert len(set(told)) == 1
    assert "parameter 'b': shape is [4] on rank 0 and [5] on rank 1" in told[0]


def _agree_missing(rank: int, size: int, missing: int) -> str:
    line = _channel(timeout_s=0.5)
    told = ""
    if rank != missing:
        with pytest.raises(RankLostError) as caught:
            line.compare("parameters", ROWS, FIELDS)
        told = str(caught.value)
        assert caught.value.rank == missing
    # The missing rank stays alive until the other has given up.
    dist.barrier()
    return told


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named(ranks: Ranks, missing: int) -> None:
    told = ranks(_agree_missing, missing)[1 - missing]
    assert f"Rank {1 - missing} waited" in told
    assert f"for rank {missing} to compare parameters" in told


def _agree_failed(rank: int, size: int, failed: int) -> str:
    line = _channel()
    if rank == failed:
        line.report("the constructor", BoomError("no memory"))
        return ""
    with pytest.raises(PeerFailedError) as caught:
        line.compare("parameters", ROWS, FIELDS)
    assert caught.value.rank == failed
    return str(caught.value)


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_rank_that_raised_before_it_came_is_named_with_its_error(ranks: Ranks, failed: int) -> None:
    told = ranks(_agree_failed, failed, world_size=3)
    for rank in {0, 1, 2} - {failed}:
        assert f"rank {failed} raised in the constructor: BoomError: no memory" in told[rank]
        assert f"this rank ({rank})" in told[rank].replace("This", "this")


def _agree_after_a_retry(rank: int, size: int) -> None:
    line = _channel()
    line.compare("parameters", ROWS, FIELDS)
    if rank == 1:
        line.report("forward", BoomError("caught by the user"))
        line.retract()
    dist.barrier()
    # The step was tried again and went well; later the parameters change and are compared anew.
    line.compare("parameters", ROWS[:1], FIELDS)


def test_ranks_agree_after_a_failure_that_was_taken_back(ranks: Ranks) -> None:
    ranks(_agree_after_a_retry)


def _two_channels(rank: int, size: int) -> None:
    first, second = _channel(), _channel()
    if rank == 1:
        first.report("forward", BoomError("first"))
    dist.barrier()
    assert second.news() is None
    second.compare("parameters", ROWS, FIELDS)
    assert rank == 1 or first.news() is not None


def test_two_channels_of_one_group_do_not_mix(ranks: Ranks) -> None:
    ranks(_two_channels)


def _subgroups(rank: int, size: int) -> None:
    pairs = [dist.new_group(pair, timeout=timedelta(seconds=60)) for pair in ([0, 1], [2])]
    mine = pairs[0] if rank < 2 else pairs[1]
    line = Channel(mine)
    assert (line.rank, line.size) == ((rank, 2) if rank < 2 else (0, 1))
    line.compare("parameters", ROWS if rank < 2 else [], FIELDS)
    if rank == 1:
        line.report("forward", BoomError("x"))
    dist.barrier()
    news = line.news()
    assert (news is not None) == (rank == 0)


def test_a_channel_speaks_to_its_own_group_only(ranks: Ranks) -> None:
    ranks(_subgroups, world_size=3)


def _timeout(rank: int, size: int) -> float:
    return Channel(dist.group.WORLD).timeout_s


def test_the_deadline_is_the_groups(ranks: Ranks) -> None:
    assert ranks(_timeout, group_timeout_s=37) == [37.0, 37.0]


def _over_a_file(rank: int, size: int, path: str) -> str:
    """Rank 1 comes only after rank 0 has asked for it many times, well past its patience."""
    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    line = _channel()
    with mock.patch.object(vigil, "PATIENCE_S", 0.02):
        if rank == 0:
            line._board.store = _Counting(line._board.store, "agree/parameters/0/1", 6)
        else:
            _poll(line._board.store, "asked")
        line.compare("parameters", ROWS, FIELDS)
        dist.barrier()
        if rank == 1:
            line.report("forward", BoomError("disk full"))
            return ""
        with pytest.raises(PeerFailedError) as caught:
            line.compare("parameters", ROWS, FIELDS)
        return str(caught.value)


def _poll(store: Any, key: str) -> None:
    end = time.monotonic() + 30
    while not store.check([key]):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_ranks_agree_over_a_file_too(ranks: Ranks, tmp_path: Path) -> None:
    told = ranks(_over_a_file, str(tmp_path / "store"), backend=None)
    assert "rank 1 raised in forward: BoomError: disk full" in told[0]


# -- words ---------------------------------------------------------------------------------------------


def _gather(rank: int, size: int) -> list[list[str]]:
    line = _channel()
    first = line.gather("complaint", f"from {rank}")
    second = line.gather("complaint", "" if rank else "é" * (MESSAGE_LIMIT + 5))
    line.compare("parameters", ROWS, FIELDS)
    return [first, second]


def test_words_are_gathered_by_rank_and_bounded(ranks: Ranks) -> None:
    told = ranks(_gather, world_size=3)
    assert told[0] == told[1] == told[2]
    assert told[0] == [["from 0", "from 1", "from 2"], ["é" * MESSAGE_LIMIT, "", ""]]


# -- failure -------------------------------------------------------------------------------------------


def _report(rank: int, size: int) -> None:
    line = _channel()
    assert line.news() is None
    line.raise_news("anything")
    dist.barrier()
    if rank == 1:
        line.report("forward", BoomError("x" * (MESSAGE_LIMIT + 100)))
        assert line.news() is None  # one's own failure is no news
        assert not line.given_up()
    dist.barrier()
    if rank == 0:
        news = line.news()
        assert news is not None
        assert (news.rank, news.where, news.type, news.message) == (1, "forward", "BoomError", "x" * MESSAGE_LIMIT)
        with pytest.raises(PeerFailedError, match=r"rank 1 raised in forward.*This rank \(0\) was waiting in a step"):
            line.raise_news("a step")
    dist.barrier()
    assert line.given_up() == (rank == 1)


def test_a_report_is_heard_and_giving_up_is_known(ranks: Ranks) -> None:
    ranks(_report)


def _report_without_error(rank: int, size: int) -> str:
    line = _channel()
    if rank == 0:
        line.report("backward", None)
    dist.barrier()
    return str(line.news())


def test_a_report_needs_no_exception(ranks: Ranks) -> None:
    assert ranks(_report_without_error)[1] == "rank 0 raised in backward: an exception"


def _retract(rank: int, size: int) -> None:
    line = _channel()
    for _ in range(2):
        if rank == 1:
            line.report("forward", BoomError("again"))
        dist.barrier()
        assert (line.news() is not None) == (rank == 0)
        dist.barrier()
        line.retract()  # on rank 0 there is nothing to take back
        dist.barrier()
        assert line.news() is None
        dist.barrier()


def test_a_report_can_be_taken_back_and_made_again(ranks: Ranks) -> None:
    ranks(_retract)


def _first_cause(rank: int, size: int) -> tuple[int, str]:
    line = _channel()
    for turn in range(size - 1):
        if rank == turn:
            line.report("forward", BoomError(f"from {rank}"))
        dist.barrier()
    # A rank whose report came second has nothing that it could take back.
    if rank == 1:
        line.retract()
    dist.barrier()
    news = line.news()
    return (news.rank, news.message) if news else (-1, "")


def test_the_first_cause_is_told_to_all_others(ranks: Ranks) -> None:
    assert ranks(_first_cause, world_size=3) == [(-1, ""), (0, "from 0"), (0, "from 0")]


def _second_cause(rank: int, size: int) -> None:
    line = _channel()
    for turn in range(2):
        if rank == turn:
            line.report("forward", BoomError(f"from {rank}"))
        dist.barrier()
    if rank == 0:
        # It caught its own and goes on; rank 1 did not, and somebody must know.
        line.retract()
        news = line.news()
        assert news is not None
        assert news.rank == 1


def test_a_second_failure_is_known_when_the_first_is_taken_back(ranks: Ranks) -> None:
    ranks(_second_cause)


def _given_up_on(rank: int, size: int) -> None:
    line = _channel()
    if rank == 1:
        line.report("forward", BoomError("from 1"))
    dist.barrier()
    if rank == 0:
        with pytest.raises(PeerFailedError):
            line.raise_news("a step")
    dist.barrier()
    # Too late: rank 0 has raised and is not coming, which rank 1 must not find out by waiting for it.
    line.retract()
    dist.barrier()
    news = line.news()
    assert news is not None
    assert (news.rank, news.message) == (1, "from 1")
    with pytest.raises(PeerFailedError):
        line.raise_news("a step")


def test_a_rank_hears_that_it_was_given_up_on(ranks: Ranks) -> None:
    ranks(_given_up_on)


class _RetractedInBetween:
    """A store in which another rank takes its failure back right after it was seen."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        seen = bool(self._store.check(keys))
        if seen:
            self._store.set("seen", "")
            self._store.wait(["taken back"], timedelta(seconds=30))
        return seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _race(rank: int, size: int) -> None:
    line = _channel()
    if rank == 1:
        line.report("forward", BoomError("for a moment"))
    dist.barrier()
    if rank == 1:
        line._board.store.wait(["seen"], timedelta(seconds=30))
        line.retract()
        line._board.store.set("taken back", "")
        return
    store = line._board.store
    line._board.store = _RetractedInBetween(store)
    # The rank's own connection, which outlives this test: its time-out has to be put back.
    usual = store.timeout
    store.set_timeout(timedelta(seconds=2))
    try:
        assert line.news() is None  # neither an error nor a wait for a key that is gone
    finally:
        store.set_timeout(usual)


def test_news_that_is_taken_back_while_it_is_read_is_no_news(ranks: Ranks) -> None:
    ranks(_race)


class _GoneStore:
    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("the host is gone")


def _report_to_nobody(rank: int, size: int) -> None:
    line = _channel()
    line._board.store = _GoneStore()
    line.report("forward", BoomError("x"))
    line.retract()


def test_a_report_never_raises(ranks: Ranks) -> None:
    ranks(_report_to_nobody)


# -- waiting -------------------------------------------------------------------------------------------


def _wait(rank: int, size: int) -> list[float]:
    line = _channel()
    tensor = torch.full((3,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    line.wait(work, "an all-reduce")
    future = dist.all_reduce(tensor.clone(), async_op=True).get_future()
    assert line.wait_future(future, "a future")[0].tolist() == [6.0] * 3
    assert line.wait_future(future, "a future that is done")[0].tolist() == [6.0] * 3
    return tensor.tolist()


def test_a_wait_without_trouble(ranks: Ranks) -> None:
    assert ranks(_wait) == [[3.0] * 3] * 2


def _wait_for(line: Channel, work: Any, kind: str) -> None:
    if kind == "work":
        line.wait(work, "the all-reduce of bucket 0")
    else:
        line.wait_future(work.get_future(), "the all-reduce of bucket 0")


def _wait_for_a_failed_rank(rank: int, size: int, kind: str) -> str:
    line = _channel()
    told = ""
    with _short_grace():
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            start = time.monotonic()
            with pytest.raises(PeerFailedError) as caught:
                _wait_for(line, work, kind)
            assert time.monotonic() - start < 60
            assert caught.value.rank == 1
            told = str(caught.value)
            # Nobody takes part in it any more: let the other rank know in its own time.
            line._board.store.set("done", "")
        else:
            line.report("forward", BoomError("disk full"))
            line._board.store.wait(["done"], timedelta(seconds=30))
            assert line.given_up()
            dist.all_reduce(torch.ones(3))
    return told


@pytest.mark.parametrize("kind", ["work", "future"])
def test_a_wait_ends_when_a_peer_has_failed(ranks: Ranks, kind: str) -> None:
    told = ranks(_wait_for_a_failed_rank, kind)[0]
    assert "rank 1 raised in forward: BoomError: disk full" in told
    assert "This rank (0) was waiting in the all-reduce of bucket 0" in told


def _wait_through_a_retry(rank: int, size: int) -> float:
    line = _channel()
    tensor = torch.ones(1)
    if rank == 0:
        line.wait(dist.all_reduce(tensor, async_op=True), "an all-reduce")
        assert not line._board.store.check(["given_up"])
    else:
        line.report("forward", BoomError("caught"))
        line.retract()
        dist.all_reduce(tensor)
    return float(tensor)


def test_a_wait_outlives_a_failure_that_was_taken_back(ranks: Ranks) -> None:
    assert ranks(_wait_through_a_retry) == [2.0, 2.0]


def _wait_past_the_deadline(rank: int, size: int, kind: str) -> str:
    line = _channel(timeout_s=0.3)
    told = ""
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(RankLostError) as caught:
            _wait_for(line, work, kind)
        told = str(caught.value)
        line._board.store.set("done", "")
    else:
        line._board.store.wait(["done"], timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
    return told


@pytest.mark.parametrize("kind", ["work", "future"])
def test_a_wait_ends_with_the_groups_deadline(ranks: Ranks, kind: str) -> None:
    told = ranks(_wait_past_the_deadline, kind)[0]
    assert "Rank 0 waited" in told
    assert "in the all-reduce of bucket 0" in told


def _wait_while_a_peer_replans(rank: int, size: int) -> str:
    line = _channel()
    told = ""
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(PeerFailedError) as caught:
            line.wait(work, "the all-reduce of bucket 0")
        assert caught.value.rank == 1
        told = str(caught.value)
        line._board.store.set("done", "")
    else:
        line.announce_replan("'first.weight' was frozen", step=0)
        line._board.store.wait(["done"], timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
    return told


def test_a_wait_ends_when_a_peer_has_other_parameters(ranks: Ranks) -> None:
    told = ranks(_wait_while_a_peer_replans)[0]
    assert "The parameters of rank 1 changed since the last step ('first.weight' was frozen)" in told
    assert "those of this rank (0)" in told


def _both_replan(rank: int, size: int) -> float:
    line = _channel()
    for _ in range(2):
        line.announce_replan("both were frozen", step=0)
    tensor = torch.ones(1)
    line.wait(dist.all_reduce(tensor, async_op=True), "an all-reduce")
    return float(tensor)


def test_a_change_on_all_ranks_is_no_trouble(ranks: Ranks) -> None:
    assert ranks(_both_replan) == [2.0, 2.0]


def _wait_while_a_peer_is_ahead(rank: int, size: int, step: int) -> tuple[bool, str]:
    """Rank 1 announces for ``step``, and only then does what rank 0, at step 3, has been waiting for."""
    line = _channel()
    line.step = 3
    told = ""
    with mock.patch.object(vigil, "PATIENCE_S", 0.02):
        if rank == 0:
            line._board.store.wait(["announced"], timedelta(seconds=30))
            watched = line._board.store = _Counting(line._board.store, "replan/1", 3)
            work = dist.all_reduce(torch.ones(3), async_op=True)
            try:
                line.wait(work, "the all-reduce of bucket 0")
            except PeerFailedError as error:
                told = str(error)
                watched.set("asked", "")
            return watched.n_asked >= 3, told
        line.announce_replan("'first.weight' was frozen", step=step)
        line._board.store.set("announced", "")
        line._board.store.wait(["asked"], timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
    return True, told


class _Counting:
    """A store that counts how often a key was looked for, and says so in the key ``asked``."""

    def __init__(self, store: Any, key: str, enough: int) -> None:
        self._store, self._key, self._enough = store, key, enough
        self.n_asked = 0

    def check(self, keys: list[str]) -> bool:
        if self._key in keys:
            self.n_asked += 1
            if self.n_asked == self._enough:
                self._store.set("asked", "")
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_peer_that_is_a_step_ahead_raises_nobody(ranks: Ranks) -> None:
    assert ranks(_wait_while_a_peer_is_ahead, 4)[0] == (True, "")


@pytest.mark.parametrize("step", [2, 3])
def test_a_peer_that_is_at_the_same_step_or_behind_is_heard(ranks: Ranks, step: int) -> None:
    assert "'first.weight' was frozen" in ranks(_wait_while_a_peer_is_ahead, step)[0][1]


class _TimedOutWork:
    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError("[src/buffer.cc:1] Timed out waiting 1000ms for recv operation to complete")

    def is_completed(self) -> bool:
        return True


def _timed_out(rank: int, size: int) -> str:
    line = _channel()
    told = ""
    if rank == 0:
        with pytest.raises(RankLostError) as caught:
            line.wait(_TimedOutWork(), "the all-reduce of bucket 0")  # type: ignore[arg-type]
        told = str(caught.value)
    dist.barrier()
    return told


def test_a_backend_that_timed_out_is_not_called_a_broken_connection(ranks: Ranks) -> None:
    told = ranks(_timed_out)[0]
    assert "some rank never joined in" in told
    assert "connection" not in told.lower()


class _LateWork:
    """Ends between the moment its wait gives up and the moment somebody looks."""

    def __init__(self) -> None:
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout)
        if timeout is not None:
            raise RuntimeError("Timed out waiting 250ms for recv operation to complete")
        return True

    def is_completed(self) -> bool:
        return True


def _ends_just_then(rank: int, size: int) -> int:
    work = _LateWork()
    _channel().wait(work, "the all-reduce of bucket 0")  # type: ignore[arg-type]
    return len(work.waits)


def test_a_work_that_ends_just_after_its_wait_gave_up_has_ended_well(ranks: Ranks) -> None:
    assert ranks(_ends_just_then) == [2, 2]


class _BrokenWork:
    def wait(self, timeout: timedelta) -> bool:
        raise RuntimeError("[src/pair.cc:1] Connection closed by peer [127.0.0.1]:1234. This may mean anything.\nStack")

    def is_completed(self) -> bool:
        return True


def _broken_connection(rank: int, size: int) -> str:
    line = _channel()
    told = ""
    if rank == 0:
        with pytest.raises(RankLostError) as caught:
            line.wait(_BrokenWork(), "the all-reduce of bucket 0")  # type: ignore[arg-type]
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, RuntimeError)
        told = str(caught.value)
    dist.barrier()
    return told


def test_a_broken_connection_is_a_lost_rank(ranks: Ranks) -> None:
    told = ranks(_broken_connection)[0]
    assert "connection to rank 1 broke while rank 0 was in the all-reduce of bucket 0" in told
    assert "Stack" not in told
    assert "pair.cc" not in told


def test_peer_errors_say_which_rank_and_are_runtime_errors() -> None:
    error = PeerFailedError("words", rank=3)
    assert error.rank == 3
    assert isinstance(error, PeerError)
    assert isinstance(error, RuntimeError)
    assert RankLostError("words").rank is None


# -- what travels --------------------------------------------------------------------------------------


class _Recording:
    def __init__(self, store: Any) -> None:
        self._store = store
        self.values: list[bytes] = []

    def set(self, key: str, value: bytes) -> None:
        self.values.append(value)
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, desired: bytes) -> Any:
        self.values.append(desired)
        return self._store.compare_set(key, expected, desired)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _record(rank: int, size: int) -> list[bytes]:
    line = _channel()
    recording = _Recording(line._board.store)
    line._board.store = recording
    line.compare("parameters", ROWS * 1000, FIELDS)
    line.announce_replan("frozen", step=0)
    with pytest.raises(ParameterMismatchError):
        line.compare("parameters", [["a", rank]], ["name", "rank"])
    dist.barrier()
    line.report("forward", BoomError("x"))
    dist.barrier()
    return recording.values


def test_only_messages_travel_and_only_a_digest_while_ranks_agree(ranks: Ranks) -> None:
    for values in ranks(_record):
        assert all(value.startswith(MAGIC) for value in values)
        assert max(map(len, values)) < 1000


def _refuse_pickle(rank: int, size: int) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    with (
        mock.patch("pickle.dumps", refuse),
        mock.patch("pickle.loads", refuse),
        mock.patch.object(dist.distributed_c10d, "_pickler", refuse),
        mock.patch.object(dist.distributed_c10d, "_unpickler", refuse),
    ):
        line = Channel(dist.group.WORLD)
        line.compare("parameters", ROWS, FIELDS)
        line.gather("complaint", "words")
        with pytest.raises(ParameterMismatchError):
            line.compare("parameters", [["a", rank]], ["name", "rank"])
        line.report("forward", BoomError("x"))
        dist.barrier()
        line.news()
        dist.barrier()
        line.retract()


def test_nothing_is_pickled(ranks: Ranks) -> None:
    ranks(_refuse_pickle)


class _Connecting:
    """A store that counts its connections; each may take seconds, where a name server is asked about it."""

    def __init__(self) -> None:
        self.connections = 1

    def clone(self):
        self.connections += 1
        return self

    def check(self, _keys):
        return False


def test_a_second_connection_is_made_by_who_uses_it():
    store = _Connecting()
    board = Board(store, name="job").on_another_connection(Errands())
    assert store.connections == 1
    assert not board.has("a")
    assert not board.has("b")
    assert store.connections == 2
