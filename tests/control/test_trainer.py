"""Training in a thread that is not the main one: its exceptions, and where it is."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from paceline import DDP
from paceline.control import hang, last_words, own_files
from paceline.control.progress import Progress
from paceline.control.trainer import Trainer
from paceline.control.whereabouts import of_this_rank
from paceline.errors import PeerFailedError, RankLostError
from tests.control._common import group_store

Ranks = Callable[..., list[Any]]


class LoaderError(RuntimeError):
    pass


def _load() -> None:
    raise LoaderError("no such file")


class _Value:
    """Can be watched by a weak reference."""


def test_a_look_at_the_threads_keeps_nothing_that_is_in_the_users_variables() -> None:
    def step() -> weakref.ref[_Value]:
        value = _Value()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(hang._watch._look_at_threads).result()
        return weakref.ref(value)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


# -- exceptions that end a training thread -------------------------------------------------------------


def _train_in_thread(rank: int, world_size: int, how: str) -> str:
    told: list[str] = []
    raised: BaseException | None = None

    def train() -> None:
        ddp = DDP(nn.Linear(3, 3))
        ddp(torch.ones(2, 3)).sum().backward()
        if rank == 1:
            group_store().set("about to fail", "")
            _load()
        group_store().wait(["about to fail"])
        with pytest.raises(PeerFailedError) as caught:
            ddp(torch.ones(2, 3)).sum().backward()
        told.append(str(caught.value))

    if how == "future":
        with ThreadPoolExecutor(1) as pool:
            future: Future[None] = pool.submit(train)
            raised = future.exception()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    if rank == 0:
        group_store().set("the other has raised", "")
        return told[0]
    # The process of a framework lives on until the others have heard of it. A wait would keep the store to itself.
    while not group_store().check(["the other has raised"]):
        threading.Event().wait(0.02)
    assert how == "nobody" or isinstance(raised, LoaderError)
    return ""


@pytest.mark.parametrize("how", ["nobody", "future"])
def test_the_others_hear_of_an_exception_that_ends_a_training_thread(ranks: Ranks, how: str) -> None:
    """It is caught by nobody, or by a framework that keeps it."""
    told, _ = ranks(_train_in_thread, how, group_timeout_s=600, timeout=120)
    assert told.startswith("rank 1 raised in its program: LoaderError: no such file (")
    assert "test_trainer.py:" in told
    assert "in _load" in told


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, mock.Mock, list[Any]]:
    """A hook for threads, one speaker that trains on this thread, and what the hook before it has got."""
    seen: list[Any] = []
    speaker = mock.Mock()
    speaker.progress.trainer.thread = threading.get_ident()
    monkeypatch.setattr(last_words, "_speakers", [speaker])
    monkeypatch.setattr(own_files, "keep", False)
    return last_words._chain_of_threads(seen.append), speaker, seen


def _args(error: BaseException, thread: Any = None) -> threading.ExceptHookArgs:
    return threading.ExceptHookArgs((type(error), error, None, thread or threading.current_thread()))


def test_a_thread_that_trains_is_spoken_for(hook: tuple[Any, mock.Mock, list[Any]]) -> None:
    call, speaker, seen = hook
    args = _args(error := ValueError("boom"))
    call(args)
    # The process lives on, so that this may be taken back.
    speaker.report.assert_called_once_with("its program", error)
    assert seen == [args]
    assert not own_files.keep


@pytest.mark.parametrize("error", [SystemExit(1), RankLostError("gone")])
def test_an_end_that_is_no_failure_of_this_rank_is_not_told(
    hook: tuple[Any, mock.Mock, list[Any]], error: BaseException
) -> None:
    call, speaker, seen = hook
    call(_args(error))
    speaker.report.assert_not_called()
    assert len(seen) == 1


def test_a_thread_that_does_something_else_is_not_spoken_for(hook: tuple[Any, mock.Mock, list[Any]]) -> None:
    call, speaker, seen = hook
    call(_args(ValueError("boom"), thread=mock.Mock(ident=-1)))
    call(_args(ValueError("boom"), thread=None))
    speaker.report.assert_called_once()
    assert len(seen) == 2


# -- what the watch sees -------------------------------------------------------------------------------


def _serve(calls: SimpleQueue[Any], outcomes: SimpleQueue[Any]) -> None:
    """The loop of a framework, none of whose frames are the user's (see `framework`)."""
    for call in iter(calls.get, None):
        try:
            outcomes.put(call())
        except Exception as error:
            outcomes.put(error)


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run functions on a thread of its own, and return what they return or raise, as a framework does."""
    calls: SimpleQueue[Any] = SimpleQueue()
    outcomes: SimpleQueue[Any] = SimpleQueue()
    library = _serve.__code__.replace(co_filename="<framework>")
    thread = threading.Thread(target=type(_serve)(library, globals()), args=(calls, outcomes))
    thread.start()

    def run(call: Callable[[], Any]) -> Any:
        calls.put(call)
        return outcomes.get()

    yield run
    calls.put(None)
    thread.join()


def test_what_a_framework_has_caught_is_found(framework: Any) -> None:
    def train() -> None:
        trainers.append(Trainer())
        try:
            _load()
        except LoaderError as error:
            handled.append(error)
        assert not trainers[0].look()
        try:
            with torch.no_grad():
                raise KeyError("the end")
        finally:
            # The function goes on to other lines before it ends.
            ended.append(1)
            ended.append(2)

    trainers: list[Trainer] = []
    ended: list[int] = []
    handled: list[LoaderError] = []
    raised = framework(train)
    assert isinstance(raised, KeyError)
    (trainer,) = trainers
    # The first look may have come between two calls of the framework.
    assert [trainer.look() for _ in range(3)] == [False, True, False]
    assert "has returned or raised" in trainer.where()
    assert trainer.held_exception() is raised
    del raised, train
    assert trainer.held_exception() is None
    assert handled


def test_a_function_that_returns_has_raised_nothing(framework: Any) -> None:
    def train() -> Trainer:
        try:
            _load()
        except LoaderError as error:
            handled.append(error)
        return Trainer()

    handled: list[LoaderError] = []
    trainer = framework(train)
    assert [trainer.look() for _ in range(3)] == [False, True, False]
    assert trainer.held_exception() is None
    # The next call of the same function is another chance to end.
    assert framework(trainer.look) is False


def test_the_line_is_that_of_the_thread_that_trains() -> None:
    progress: list[Progress] = []
    go_on, made = threading.Event(), threading.Event()

    def train() -> None:
        progress.append(Progress(None, rank=0, size=1, wrapper=1))
        made.set()
        go_on.wait()

    thread = threading.Thread(target=train)
    thread.start()
    made.wait()
    assert "in train" in of_this_rank(progress[0]).line
    go_on.set()
    thread.join()
    ended = of_this_rank(progress[0])
    assert ended.where() == "is in no code of its program: the thread that trained has ended"
    # It trains again, on this thread.
    progress[0].begin_forward(trains=True)
    assert sys._getframe().f_code.co_name in of_this_rank(progress[0]).line


def test_a_wait_on_a_thread_without_user_code_shows_the_one_that_trains() -> None:
    progress = Progress(None, rank=0, size=1, wrapper=1)
    thread = threading.Thread(target=progress.begin_wait, args=("the all-reduce of bucket 0",))
    thread.start()
    thread.join()
    found = of_this_rank(progress)
    assert found.waiting == "the all-reduce of bucket 0"
    assert sys._getframe().f_code.co_name in found.line


def test_the_watch_tells_what_was_caught_once() -> None:
    channel = mock.Mock()
    progress = channel.inquiries.progress
    progress.finished = False
    progress.trainer.look.side_effect = [False, True, True, True]
    error = LoaderError("no such file")
    found = [error, None, RankLostError("another rank is gone")]
    progress.trainer.held_exception = lambda: found.pop(0)
    for _ in range(4):
        hang._look_at_trainer(channel)
    channel.report.assert_called_once_with("its program", error)
