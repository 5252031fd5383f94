"""Wrapping, planning and a step run on a device that is not there, and so does the benchmark of what they cost."""

from __future__ import annotations

from benchmarks.host_cost import on_rank

from paceline.testing import RankPool


def test_wrapping_planning_and_a_step_need_no_device() -> None:
    """The benchmark's own rank: it checks that each gradient is a fake one, on the device."""
    # These ranks get a device of their own, which a process cannot lose again.
    with RankPool() as pool:
        (one, *_), (many, *_) = (pool.run(on_rank, n, 1, backend="gloo", timeout=120) for n in (1, 100))
    assert (one["parameters"], many["parameters"]) == (1, 100)
    assert many["buckets"] == 1


def test_a_larger_module_is_planned_in_several_buckets() -> None:
    with RankPool() as pool:
        found = pool.run(on_rank, 100, 1, 100_000, backend="gloo", timeout=120)[0]
    assert found["buckets"] > 1
