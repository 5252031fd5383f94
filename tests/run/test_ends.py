"""Ranks end in all kinds of ways, and none of them crashes. ``ends`` has the loop over all of them."""

from __future__ import annotations

import signal
from itertools import cycle, islice

import pytest

from tests.run.ends import BOUND_S, ENDS, FIRST, STATUS, WORKS, Case, judge, loop
from tests.transport.requirements import needs_shm


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_rank_crashes_on_its_way_out() -> None:
    """Every kind of group, of work and of end is there."""
    needs_shm()
    with loop() as made:
        columns = (cycle(made.groups), cycle(WORKS), cycle(FIRST[1:] + FIRST), cycle(ENDS))
        cases = [Case(*fields) for fields in islice(zip(*columns, strict=False), max(len(WORKS), len(ENDS)) + 3)]
        cases.append(Case("gloo", "steps", "all", "falls off", is_fresh=True))
        wrong = made.run(cases)
    assert not wrong, "\n".join(wrong)
    assert made.ends >= 2 * len(cases)


@pytest.mark.parametrize(
    ("end", "first", "status", "said", "fault"),
    [
        ("exit", "rank 0", STATUS, "", None),
        ("exit", "rank 0", 0, "", "ended with status 0 instead of"),
        ("exit", "last rank", 1, "RankLostError", None),
        ("exit", "last rank", 1, "RuntimeError", "was not told of its peer"),
        ("exit", "last rank", 0, "", "ended with status 0 instead of"),
        ("exit", "last rank", -signal.SIGABRT, "", f"ended with status {-signal.SIGABRT} instead of"),
        ("SIGTERM", "all", -signal.SIGTERM, "", None),
        ("exit", "all", -signal.SIGTERM, "", "instead of"),
        ("exit", "all", 1, "terminate called without an active exception", "said 'terminate called'"),
        ("os._exit", "all", None, "", f"has not ended within {BOUND_S:.0f} s"),
    ],
)
def test_what_is_a_fault(end: str, first: str, status: int | None, said: str, fault: str | None) -> None:
    found = judge(Case("shm", "nothing", first, end), 0, 2, status, said)
    assert found is None if fault is None else found is not None and fault in found
