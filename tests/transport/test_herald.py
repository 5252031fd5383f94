"""The threads that look after works: how long each may take to end."""

from __future__ import annotations

import threading

from paceline import threads
from paceline.transport.c10d.herald import Herald


class _Work:
    def __init__(self) -> None:
        self.has_ended, self.may_return, self.is_announcing = (threading.Event() for _ in range(3))

    def attend(self) -> None:
        self.has_ended.wait(60)

    def announce(self) -> None:
        self.is_announcing.set()
        self.may_return.wait(60)


def test_the_end_of_the_program_waits_for_callbacks_but_not_for_other_ranks() -> None:
    herald, work = Herald(), _Work()
    herald.watch(work)
    (thread,) = herald._threads
    assert isinstance(thread, threads.Thread)
    assert thread.within_s == threads.MOMENT_S
    assert threads.end_all() == [thread]
    work.has_ended.set()
    assert work.is_announcing.wait(60)
    assert thread.within_s > threads.MOMENT_S
    work.may_return.set()
    herald.close()
    assert not thread.is_alive()
