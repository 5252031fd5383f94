"""The two lanes of the tests: ``make test`` runs the fast one, ``make test-all`` runs every test.

A test that is marked ``full`` is left out of the fast lane: a soak, a benchmark, the long tail of a list. Of a test
that needs ranks and has several parameters, the fast lane runs only as many combinations as show every value of every
parameter; Inductor, which takes seconds for each case, is no such value where the test also has another backend. All
other tests are in both lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

# These look for what dead ranks have left in /dev/shm, so no two of them run at the same time.
_LOOKING_AT_MEMORY = (
    "transport/test_faults.py",
    "transport/test_refusals.py",
    "transport/test_segment.py",
    "control/test_fault_scripts.py",
)
# These share what one process, which is at it for half a minute, finds out about every expression.
_ON_A_FAKE_GROUP = ("tracing/test_expressions.py", "tracing/test_footprint.py")


class Scheduler(LoadScopeScheduling):
    """Gives each test to any worker, but the tests of a file that share a fixture to one, so that it is made once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.endswith(_LOOKING_AT_MEMORY):
            return "tests that look at memory"
        if file.endswith(_ON_A_FAKE_GROUP):
            return "tests on a fake group"
        if "/devices/" in file:
            # Their ranks have a device more than those of all other tests.
            return "tests on the sim device"
        return file if _shares_fixtures(file) else nodeid


@cache
def _shares_fixtures(file: str) -> bool:
    return 'scope="module"' in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")


def fast_lane(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of ``items`` that are in the fast lane. It is an error if a file has none."""
    kept: list[pytest.Item] = []
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        fast = [case for case in cases if case.get_closest_marker("full") is None]
        if fast and "rank_pool" in getattr(fast[0], "fixturenames", ()):
            fast = _every_value([case for case in fast if ("backend", "'inductor'") not in _values(case)] or fast)
        kept += fast
    empty = {str(item.path) for item in items} - {str(item.path) for item in kept}
    if empty:
        raise pytest.UsageError(f"every test is marked full in {', '.join(sorted(empty))}: leave one in the fast lane")
    return kept


def _every_value(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Few of the ``cases`` of one test, in their order, that have every value of every parameter."""
    unseen = {case: _values(case) for case in cases}
    kept = set()
    while any(unseen.values()):
        best = max(unseen, key=lambda case: len(unseen[case]))
        kept.add(best)
        seen = unseen.pop(best)
        unseen = {case: values - seen for case, values in unseen.items()}
    return [case for case in cases if case in kept or not _values(case)]


def _values(case: pytest.Item) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in case.callspec.params.items()} if hasattr(case, "callspec") else set()
