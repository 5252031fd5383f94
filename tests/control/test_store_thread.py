"""Asking a store that may never answer: by a thread, for a few seconds at most."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from paceline import threads
from paceline.control import store_thread as module
from paceline.control.store_thread import StoreThread
from paceline.errors import StateError, StoreSilentError


def test_what_a_call_returns_or_raises_reaches_the_caller() -> None:
    asking = StoreThread()
    assert asking.run(max, 2, 3) == 3
    assert asking.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        asking.run(divmod, 1, 0)
    with pytest.raises(TimeoutError, match="its own"):
        asking.run(_raise, TimeoutError("its own"))
    # A call may run others, which do not wait for it.
    outer, inner = asking.run(lambda: (threading.get_ident(), asking.run(threading.get_ident, within_s=5)))
    assert outer == inner
    assert not asking.is_silent()


def _raise(error: Exception) -> None:
    raise error


def test_a_call_that_comes_when_the_thread_was_told_to_stop_is_not_lost() -> None:
    desk, early, late, too_late = module._Desk(), Future[int](), Future[int](), Future[int]()
    desk.ask(early, max, (2, 3))
    desk.close()
    desk.ask(late, max, (2, 3))
    desk.serve()
    desk.ask(too_late, max, (2, 3))
    assert early.result(0) == 3
    assert late.cancelled()
    assert too_late.cancelled()
    # Then another thread makes the call.
    asking = StoreThread()
    first_thread = asking.run(threading.current_thread)
    ask = asking._desk.ask

    def ask_late(*about: Any) -> None:
        assert threads.end_all() == []
        ask(*about)

    with mock.patch.object(asking._desk, "ask", ask_late):
        assert asking.run(threading.current_thread) is not first_thread


class _Asked:
    def fail(self) -> None:
        raise ValueError("no")


def test_what_was_asked_is_let_go_of_whatever_came_of_it() -> None:
    asking, asked, gone = StoreThread(), _Asked(), threading.Event()
    weakref.finalize(asked, gone.set)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            asking.run(asked.fail)
        asking.run(id, asked)
        del asked
        # The thread may not have come back yet to where it waits for the next call.
        assert gone.wait(30)
    finally:
        gc.enable()


def test_a_silent_store_is_an_error_now_and_at_once_until_it_answers() -> None:
    asking, answers, asked = StoreThread(), threading.Event(), []
    with mock.patch.object(module, "ANSWER_S", 0.05), pytest.raises(StoreSilentError, match="has not answered within"):
        asking.run(answers.wait)
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(dist.DistError, match="stopped, cut off, or overloaded"):
            asking.run(asked.append, 1)
    assert time.monotonic() - start < module.ANSWER_S
    assert asked == []
    answers.set()
    assert asking._overdue.result(30) is True
    # The next call does not get the late answer.
    assert asking.run(lambda: "next") == "next"


def test_callers_take_turns_and_wait_no_longer_than_they_would_for_an_answer() -> None:
    asking, asked, answers, heard = StoreThread(), threading.Event(), threading.Event(), []

    def answer() -> bool:
        asked.set()
        return answers.wait()

    first = threading.Thread(target=lambda: heard.append(asking.run(answer, within_s=60)))
    first.start()
    assert asked.wait(30)
    with pytest.raises(StoreSilentError):
        asking.run(lambda: None, within_s=0.05)
    answers.set()
    first.join()
    assert heard == [True]


def test_the_thread_starts_with_the_first_call_and_ends_with_its_owner() -> None:
    asking = StoreThread()
    assert asking._thread is None
    for _ in range(2):
        thread = asking.run(threading.current_thread)
        assert thread.name == "paceline-store"
        # Whoever asks after all threads were ended gets another one.
        assert isinstance(thread, threads.Thread)
        assert thread.end()
    thread = asking.run(threading.current_thread)
    del asking
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_does_not_ask_its_parents_store() -> None:
    asking, answers = StoreThread(), threading.Event()
    with pytest.raises(StoreSilentError):
        asking.run(answers.wait, within_s=0.01)
    child = os.fork()
    if child == 0:
        try:
            asking.run(lambda: 5)
        except StateError:
            # Whatever the child makes itself is its own.
            os._exit(0 if StoreThread().run(lambda: 5) == 5 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asking.is_silent()
    answers.set()
