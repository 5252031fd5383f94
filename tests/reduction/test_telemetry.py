"""Stamps of a step and what is derived from them."""

from __future__ import annotations

import pytest

from paceline.reduction.telemetry import StepTimes, Telemetry

NOTHING = StepTimes()
# Communication begins inside backward and ends after it.
USUAL = StepTimes(
    forward_start_ns=100,
    forward_end_ns=150,
    backward_start_ns=200,
    backward_end_ns=300,
    comm_start_ns=240,
    comm_end_ns=330,
)
HIDDEN = StepTimes(backward_start_ns=200, backward_end_ns=300, comm_start_ns=240, comm_end_ns=280)
AFTER = StepTimes(backward_start_ns=200, backward_end_ns=300, comm_start_ns=310, comm_end_ns=330)
# A backward that communicated nothing, and one whose communication has not ended.
SILENT = StepTimes(backward_start_ns=200, backward_end_ns=300)
BEGUN = StepTimes(backward_start_ns=200, backward_end_ns=300, comm_start_ns=250)


@pytest.mark.parametrize(
    ("times", "forward", "backward", "comm", "overlap", "exposed"),
    [
        (NOTHING, 0, 0, 0, 0, 0),
        (USUAL, 50, 100, 90, 60, 30),
        (HIDDEN, 0, 100, 40, 40, 0),
        (AFTER, 0, 100, 20, 0, 20),
        (SILENT, 0, 100, 0, 0, 0),
        (BEGUN, 0, 100, 0, 0, 0),
    ],
    ids=["nothing", "usual", "hidden", "after", "silent", "begun"],
)
def test_durations(times: StepTimes, forward: int, backward: int, comm: int, overlap: int, exposed: int) -> None:
    assert times.forward_compute_ns == forward
    assert times.backward_compute_ns == backward
    assert times.comm_ns == comm
    assert times.overlap_ns == overlap
    assert times.exposed_ns == exposed


@pytest.mark.parametrize("times", [NOTHING, USUAL, HIDDEN, AFTER])
def test_overlap_and_exposed_make_up_communication(times: StepTimes) -> None:
    assert times.overlap_ns + times.exposed_ns == times.comm_ns


def test_a_finished_step_becomes_the_last_one_and_averages_are_over_all() -> None:
    telemetry = Telemetry()
    assert not any(telemetry.averages().values())
    for times in (USUAL, HIDDEN):
        telemetry.current = times
        telemetry.finish_step()
        assert telemetry.last is times
        assert telemetry.current == StepTimes()
    assert telemetry.steps == 2
    assert telemetry.exposed_total_ns == 30
    assert telemetry.averages() == {
        "forward_compute_time": 25,
        "backward_compute_time": 100,
        "backward_comm_time": 65,
        "backward_compute_comm_overlap_time": 50,
    }
    assert not Telemetry().averages(), "two of them share nothing"
