"""A rank of a group that spans hosts dies in the middle of something; ``killing_hosts`` has the rest of the places."""

from __future__ import annotations

from pathlib import Path

import pytest

from .killing import NOTICED_WHEN_BUSY_S, judge
from .killing_hosts import Hosts, Plan, run
from .requirements import needs_hosts

PLANS = [
    Plan("small all_reduce", "published", 1),
    Plan("large all_reduce", "agreed", 2),
    Plan("broadcast", "agree", 0),
    Plan("reduce_scatter", "before_publish", 3, count=1),
    Plan("all_gather", "passed", 2),
    Plan("gather", "published", 3),
    Plan("scatter", "agree", 2, count=1),
    Plan("all_to_all", "agreed", 0, count=1),
    Plan("sparse all_reduce", "agree", 2, count=1),
    Plan("messages around", "message", 3, count=1),
    Plan("messages to one", "message", 1, count=2),
    Plan("new group", "connecting", 3),
    Plan("new group", "announced", 1),
    Plan("new group", "connected", 0),
    Plan("new group", "connecting leaders", 2),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plans", [PLANS[::4], pytest.param(PLANS, marks=pytest.mark.full)], ids=["some", "all"])
def test_a_rank_that_dies_in_the_middle_is_named_on_every_host(tmp_path: Path, plans: list[Plan]) -> None:
    needs_hosts()
    wrong: list[str] = []
    with Hosts(is_forking=True) as hosts:
        for number, plan in enumerate(plans):
            for loss in run(hosts, plan, str(tmp_path / f"store{number}")):
                wrong += judge(plan, loss, within_s=NOTICED_WHEN_BUSY_S)
        assert [hosts.segments(host) for host in range(2)] == [[], []]
    assert not wrong
