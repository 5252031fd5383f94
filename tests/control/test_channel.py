"""The control channel: agreement, news of failure, and waits that end when a peer has failed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from paceline.control import Channel, peer_wait
from paceline.control.board import Board
from paceline.control.channel import MESSAGE_LIMIT
from paceline.control.store_thread import StoreThread
from paceline.control.wire import MAGIC
from paceline.errors import ParameterMismatchError, PeerError, PeerFailedError, RankLostError
from tests.on_ranks import on_ranks

Ranks = Callable[..., list[Any]]
FIELDS = ["name", "shape", "dtype"]
ROWS: list[list[Any]] = [["a", [2, 3], "float32"], ["b", [4], "float32"]]


class BoomError(Exception):
    pass


@contextmanager
def _short_grace() -> Iterator[None]:
    """The news is believed soon: these tests are about what follows."""
    with mock.patch.object(peer_wait, "GRACE_S", 0.05), mock.patch.object(peer_wait, "PATIENCE_S", 0.02):
        yield


def _channel(*, timeout_s: float | None = None) -> Channel:
    made = Channel(dist.group.WORLD)
    if timeout_s is not None:
        made.timeout_s = timeout_s
    # No rank goes on before all are there: what follows is about the channel, not about who came first.
    dist.barrier()
    return made


# -- agreement -----------------------------------------------------------------------------------------


def _agree_same(rank: int, size: int) -> None:
    line = _channel()
    for _ in range(3):
        line.compare("parameters", ROWS, FIELDS)
    if rank == 1:
        line.report("forward", BoomError("caught by the user"))
        line.retract()
    dist.barrier()
    # The step was tried again and went well; later the parameters change and are compared anew.
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
    line.compare("parameters", ROWS, FIELDS)  # An answer of the last time must not be taken for one of this time.
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_differ_raise_the_same_error_everywhere(ranks: Ranks, world_size: int) -> None:
    told = ranks(_agree_differ, world_size=world_size)
    assert len(set(told)) == 1
    assert "the shape of parameter 'b' is [4] on rank 0 and [5] on rank 1" in told[0]


@pytest.mark.parametrize("missing", [0, 1])
@on_ranks()
def test_a_rank_that_does_not_come_is_named(rank: int, size: int, missing: int) -> None:
    line = _channel(timeout_s=0.5)
    if rank != missing:
        told = f"Rank {rank} waited .* for rank {missing} to compare parameters"
        with pytest.raises(RankLostError, match=told) as caught:
            line.compare("parameters", ROWS, FIELDS)
        assert caught.value.rank == missing
    # The missing rank stays alive until the other has given up.
    dist.barrier()


@pytest.mark.parametrize("failed", [0, 1, 2])
@on_ranks(world_size=3)
def test_a_rank_that_raised_before_it_came_is_named_with_its_error(rank: int, size: int, failed: int) -> None:
    line = _channel()
    if rank == failed:
        line.report("the constructor", BoomError("no memory"))
        return
    told = rf"rank {failed} raised in the constructor: BoomError: no memory.*This rank \({rank}\)"
    with pytest.raises(PeerFailedError, match=told) as caught:
        line.compare("parameters", ROWS, FIELDS)
    assert caught.value.rank == failed


@on_ranks(world_size=3)
def test_channels_do_not_mix(rank: int, size: int) -> None:
    pairs = [dist.new_group(pair, timeout=timedelta(seconds=60)) for pair in ([0, 1], [2])]
    first, second = (Channel(pairs[rank // 2]) for _ in range(2))
    assert first.timeout_s == 60
    assert (first.rank, first.size) == ((rank, 2) if rank < 2 else (0, 1))
    if rank == 1:
        first.report("forward", BoomError("first"))
    dist.barrier()
    # Other ranks of the group hear of it, on the same channel.
    assert (first.news() is not None) == (rank == 0)
    second.compare("parameters", ROWS if rank < 2 else [], FIELDS)
    assert second.news() is None


@on_ranks(backend=None)
def test_ranks_agree_over_a_file_too(rank: int, size: int, tmp_path: Path) -> None:
    """Rank 1 comes only after rank 0 has asked for it many times, well past its patience."""
    store = dist.FileStore(str(tmp_path / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    line = _channel()
    with mock.patch.object(peer_wait, "PATIENCE_S", 0.02):
        if rank == 0:
            line._board.store = _Counting(line._board.store, "agree/parameters/0/1", 6)
        else:
            line._board.store.wait(["asked"], timedelta(seconds=30))
        line.compare("parameters", ROWS, FIELDS)
        dist.barrier()
        if rank == 1:
            line.report("forward", BoomError("disk full"))
            return
        with pytest.raises(PeerFailedError, match="rank 1 raised in forward: BoomError: disk full"):
            line.compare("parameters", ROWS, FIELDS)


# -- words ---------------------------------------------------------------------------------------------


@on_ranks(world_size=3)
def test_words_are_gathered_by_rank_and_bounded(rank: int, size: int) -> None:
    line = _channel()
    assert line.gather("complaint", f"from {rank}") == ["from 0", "from 1", "from 2"]
    assert line.gather("complaint", "" if rank else "é" * (MESSAGE_LIMIT + 5)) == ["é" * MESSAGE_LIMIT, "", ""]
    line.compare("parameters", ROWS, FIELDS)


# -- failure -------------------------------------------------------------------------------------------


@on_ranks()
def test_a_report_is_heard_and_giving_up_is_for_good(rank: int, size: int) -> None:
    line = _channel()
    assert line.news() is None
    line.raise_news("anything")
    dist.barrier()
    if rank == 1:
        line.report("backward", None)
        assert "rank 1 raised in backward: an exception" in str(line._news._read("failure/1"))
        # It is the same exception, which can be named now.
        line.report("forward", BoomError("x" * (MESSAGE_LIMIT + 100)))
        assert line.news() is None
        assert not line.given_up()
    dist.barrier()
    if rank == 0:
        news = line.news()
        assert (news.rank, news.where, news.type, news.message) == (1, "forward", "BoomError", "x" * MESSAGE_LIMIT)
        with pytest.raises(PeerFailedError, match=r"rank 1 raised in forward.*This rank \(0\) was waiting in a step"):
            line.raise_news("a step")
    dist.barrier()
    assert line.given_up() == (rank == 1)
    # This is too late: rank 0 has raised and is not coming. Rank 1 must not find that out by waiting for it.
    line.retract()
    dist.barrier()
    with pytest.raises(PeerFailedError) as caught:
        line.raise_news("a step")
    assert caught.value.rank == 1


class _GoneStore:
    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("the host is gone")


@on_ranks()
def test_a_report_never_raises(rank: int, size: int) -> None:
    line = _channel()
    line._board.store = _GoneStore()
    line.report("forward", BoomError("x"))
    line.retract()


# -- waiting -------------------------------------------------------------------------------------------


def _wait_for(line: Channel, work: Any, kind: str) -> None:
    if kind == "work":
        line.wait(work, "the all-reduce of bucket 0")
    else:
        line.wait_future(work.get_future(), "the all-reduce of bucket 0")


def _wait_in_vain(rank: int, size: int, kind: str, trouble: str) -> str:
    """Rank 0 waits for a collective to which rank 1 comes only when rank 0 has given up."""
    line = _channel(timeout_s=0.3 if trouble == "late" else None)
    with _short_grace():
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(PeerError) as caught:
                _wait_for(line, work, kind)
            line._board.store.set("done", "")
            return f"{type(caught.value).__name__}({caught.value.rank}): {caught.value}"
        if trouble == "raises":
            line.report("forward", BoomError("disk full"))
        elif trouble == "replans":
            line.announce_replan("'first.weight' was frozen", step=0)
        line._board.store.wait(["done"], timedelta(seconds=30))
        assert line.given_up() == (trouble == "raises")
        dist.all_reduce(torch.ones(3))
    return ""


TROUBLES = {
    "raises": r"PeerFailedError\(1\): rank 1 raised in forward: BoomError: disk full.*This rank \(0\) was",
    "late": r"RankLostError\(1\): Rank 0 waited",
    "replans": r"PeerFailedError\(1\): The parameters of rank 1 changed .*'first.weight' was frozen.* this rank \(0\)",
}


@pytest.mark.parametrize("kind", ["work", "future"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_wait_ends_when_a_peer_will_not_come(ranks: Ranks, kind: str, trouble: str) -> None:
    assert re.search(f"{TROUBLES[trouble]}.*in the all-reduce of bucket 0", ranks(_wait_in_vain, kind, trouble)[0])


@on_ranks()
def test_a_wait_without_trouble(rank: int, size: int) -> None:
    """A failure that is taken back and a change of parameters on all ranks are no trouble."""
    line = _channel()
    for _ in range(2):
        line.announce_replan("both were frozen", step=0)
    if rank == 1:
        line.report("forward", BoomError("caught"))
        line.retract()
    tensor = torch.full((3,), float(rank + 1))
    line.wait(dist.all_reduce(tensor, async_op=True), "an all-reduce")
    assert not line._board.store.check(["given_up"])
    future = dist.all_reduce(tensor.clone(), async_op=True).get_future()
    for _ in range(2):  # the second time it is done already
        assert line.wait_future(future, "a future")[0].tolist() == [6.0] * 3
    assert tensor.tolist() == [3.0] * 3


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


@pytest.mark.parametrize(("step", "is_ahead"), [(4, True), (3, False), (2, False)])
@on_ranks()
def test_a_peer_that_changed_its_parameters_is_heard_unless_it_is_a_step_ahead(
    rank: int, size: int, step: int, is_ahead: bool
) -> None:
    """Rank 1 announces for ``step``, and only then does what rank 0, at step 3, has been waiting for."""
    line = _channel()
    line.step = 3
    store = line._board.store
    if rank == 1:
        line.announce_replan("'first.weight' was frozen", step=step)
        store.set("announced", "")
        store.wait(["asked"], timedelta(seconds=30))
        dist.all_reduce(torch.ones(3))
        return
    store.wait(["announced"], timedelta(seconds=30))
    line._board.store = _Counting(store, "replan/1", 3)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    # A wait that raises has asked once, and rank 1 waits for the third time.
    heard = nullcontext() if is_ahead else pytest.raises(PeerFailedError, match="was frozen")
    with mock.patch.object(peer_wait, "PATIENCE_S", 0.02), heard:
        line.wait(work, "the all-reduce of bucket 0")
    store.set("asked", "")


class _Work:
    """Raises ``error`` from a wait with a time-out, and has ended well or ill for all others."""

    def __init__(self, error: str) -> None:
        self._error = error
        self.waits: list[timedelta | None] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits.append(timeout)
        if timeout is not None or self._error.startswith("["):
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return True


TIMED_OUT = "[src/buffer.cc:1] Timed out waiting 1000ms for recv operation to complete"
BROKEN = "[src/pair.cc:1] Connection closed by peer [127.0.0.1]:1234. This may mean anything.\nStack"


@pytest.mark.parametrize(
    ("error", "lost", "words", "never"),
    [
        (TIMED_OUT, 1, "and not all ranks came. All ranks .*; rank 1 ", ["onnection to"]),
        (BROKEN, 1, "connection to rank 1 broke while rank 0 was in the all-reduce of bucket 0", ["Stack", "pair.cc"]),
    ],
    ids=["timed out", "broken"],
)
@on_ranks()
def test_a_backend_that_timed_out_is_told_from_a_broken_connection(
    rank: int, size: int, error: str, lost: int, words: str, never: list[str]
) -> None:
    line = _channel()
    if rank == 0:
        with pytest.raises(RankLostError, match=words) as caught:
            line.wait(_Work(error), "the all-reduce of bucket 0")  # type: ignore[arg-type]
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert caught.value.rank == lost
        assert not any(word in str(caught.value) for word in never)
    dist.barrier()


@on_ranks()
def test_a_work_that_ends_just_after_its_wait_gave_up_has_ended_well(rank: int, size: int) -> None:
    work = _Work("Timed out waiting 250ms for recv operation to complete")
    _channel().wait(work, "the all-reduce of bucket 0")  # type: ignore[arg-type]
    assert len(work.waits) == 2


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


@on_ranks()
def test_only_messages_travel_unpickled_and_only_a_digest_while_ranks_agree(rank: int, size: int) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    with (
        mock.patch("pickle.dumps", refuse),
        mock.patch("pickle.loads", refuse),
        mock.patch.object(dist.distributed_c10d, "_pickler", refuse),
        mock.patch.object(dist.distributed_c10d, "_unpickler", refuse),
    ):
        line = _channel()
        recording = line._board.store = _Recording(line._board.store)
        line.compare("parameters", ROWS * 1000, FIELDS)
        line.gather("complaint", "words")
        line.announce_replan("frozen", step=0)
        with pytest.raises(ParameterMismatchError):
            line.compare("parameters", [["a", rank]], ["name", "rank"])
        dist.barrier()
        line.report("forward", BoomError("x"))
        dist.barrier()
        line.news()
        dist.barrier()
        line.retract()
    values = [value for value in recording.values if value]
    assert all(value.startswith(MAGIC) for value in values)
    assert max(map(len, values)) < 1000


def test_a_second_connection_is_made_by_whoever_uses_it() -> None:
    # It may take seconds, where a name server is asked about it.
    store = mock.Mock()
    board = Board(store, name="job").on_another_connection(StoreThread())
    store.clone.assert_not_called()
    board.has("a")
    board.has("b")
    store.clone.assert_called_once_with()
    assert store.clone().check.call_count == 2
