"""Calls that may never come back: nobody waits for them for ever, and an answer that is late is nobody's."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from unittest import mock

import pytest
import torch.distributed as dist

from paceline.control import errands as errands_module
from paceline.control.errands import Errands
from paceline.errors import StoreSilentError


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "paceline-errands"}


def test_what_a_call_returns_or_raises_reaches_the_caller() -> None:
    errands = Errands()
    caller = threading.get_ident()
    assert errands.run(max, 2, 3) == 3
    assert errands.run(threading.get_ident) != caller
    with pytest.raises(ZeroDivisionError):
        errands.run(divmod, 1, 0)
    assert not errands.is_silent()


def test_a_call_may_run_others_without_waiting_for_itself() -> None:
    errands = Errands()

    def both() -> tuple[int, int]:
        return threading.get_ident(), errands.run(threading.get_ident, within_s=5)

    outer, inner = errands.run(both, within_s=20)
    assert outer == inner != threading.get_ident()
    # And afterwards as ever.
    assert errands.run(max, 2, 3) == 3


class _Asked:
    def fail(self) -> None:
        raise ValueError("no")


def test_what_was_asked_is_let_go_of_whatever_came_of_it() -> None:
    errands, asked = Errands(), _Asked()
    gone = weakref.ref(asked)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            errands.run(asked.fail)
        errands.run(id, asked)
        del asked
        # The thread may not have come back to where it waits for the next call.
        end = time.monotonic() + 30
        while gone() is not None and time.monotonic() < end:
            time.sleep(0.001)
        assert gone() is None
    finally:
        gc.enable()


def test_a_silent_store_is_an_error_now_and_at_once_until_it_answers() -> None:
    errands, answers, asked = Errands(), threading.Event(), []
    with (
        mock.patch.object(errands_module, "ANSWER_S", 0.05),
        pytest.raises(StoreSilentError, match="has not answered within"),
    ):
        errands.run(answers.wait)
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(dist.DistError, match="stopped, cut off, or overloaded"):
            errands.run(asked.append, 1)
    assert time.monotonic() - start < errands_module.ANSWER_S
    assert asked == []
    answers.set()
    while errands.is_silent():
        time.sleep(0.001)
    # Not the late answer, which is True.
    assert errands.run(lambda: "next") == "next"


def test_callers_take_turns_and_wait_no_longer_than_they_would_for_an_answer() -> None:
    errands, answers, heard = Errands(), threading.Event(), []

    def wait() -> None:
        heard.append(errands.run(answers.wait, within_s=60))

    first = threading.Thread(target=wait)
    first.start()
    while not errands._turn.locked():
        time.sleep(0.001)
    with pytest.raises(StoreSilentError):
        errands.run(lambda: None, within_s=0.05)
    answers.set()
    first.join()
    assert heard == [True]


def test_the_thread_starts_with_the_first_call_and_ends_with_its_owner() -> None:
    before = _threads()
    errands = Errands()
    assert _threads() == before
    errands.run(lambda: None)
    (thread,) = _threads() - before
    del errands
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_a_thread_of_its_own() -> None:
    errands, answers = Errands(), threading.Event()
    with pytest.raises(StoreSilentError):
        errands.run(answers.wait, within_s=0.01)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if errands.run(lambda: 5) == 5 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert errands.is_silent()
    answers.set()
