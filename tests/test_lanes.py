"""What the fast lane leaves out, and what it may not leave out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lanes import Scheduler, fast_lane


class _Case:
    """As much of a collected test as the lanes look at."""

    def __init__(self, name, *, marks=(), fixtures=("rank_pool",), file="test_it.py", **params):
        self.nodeid = f"{file}::{name}[{params}]"
        self.path = Path(file)
        self.fixturenames = fixtures
        self._marks = marks
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return name if name in self._marks else None


def test_a_test_on_ranks_keeps_every_value_of_every_parameter():
    cases = [_Case("test", size=size, backend=backend) for size in (1, 2, 3) for backend in ("gloo", "shm")]
    params = [case.callspec.params for case in fast_lane(cases)]
    assert len(params) == 3
    assert {each["size"] for each in params} == {1, 2, 3}
    assert {each["backend"] for each in params} == {"gloo", "shm"}


def test_inductor_is_left_to_the_full_lane_where_there_is_another_backend():
    cases = [_Case("test", backend=backend) for backend in ("eager", "inductor")]
    assert fast_lane(cases) == cases[:1]
    assert fast_lane(cases[1:]) == cases[1:]


def test_values_that_compare_equal_may_be_different_cases():
    cases = [_Case("test", flag=flag) for flag in (True, 1, 1.0)]
    assert fast_lane(cases) == cases


@pytest.mark.parametrize("fixtures", [(), ("tmp_path",)])
def test_a_test_without_ranks_keeps_every_case(fixtures):
    cases = [_Case("test", fixtures=fixtures, size=size, backend=backend) for size in (1, 2) for backend in (1, 2)]
    assert fast_lane(cases) == cases


def test_what_is_marked_is_left_out():
    one, other, last = _Case("test_one"), _Case("test_other", marks=("full",)), _Case("test_last")
    assert fast_lane([one, other, last]) == [one, last]


def test_no_file_may_be_left_out():
    with pytest.raises(pytest.UsageError, match=r"marked full in test_that\.py"):
        fast_lane([_Case("test"), _Case("test", marks=("full",), file="test_that.py")])


def test_tests_that_share_a_fixture_go_to_one_worker():
    for file, together in (("transport/test_hosts.py", True), ("test_lanes.py", False)):
        one, other = (Scheduler._split_scope(None, f"tests/{file}::test_{name}") for name in ("one", "other"))
        assert (one == other) is together
