"""Stamps of a step and what is derived from them."""

from __future__ import annotations

import pytest

from paceline.telemetry import StepTimes, Telemetry, now_ns

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


@pytest.mark.parametrize(
    ("times", "forward", "backward", "comm", "overlap", "exposed"),
    [
        (NOTHING, 0, 0, 0, 0, 0),
        (USUAL, 50, 100, 90, 60, 30),
        (HIDDEN, 0, 100, 40, 40, 0),
        (AFTER, 0, 100, 20, 0, 20),
    ],
    ids=["nothing", "usual", "hidden", "after"],
)
def test_durations(times: StepTimes, forward: int, backward: int, comm: int, overlap: int, exposed: int) -> None:
    assert times.forward_compute_ns == forward
    assert times.backward_compute_ns == backward
    assert times.comm_ns == comm
    assert times.overlap_ns == overlap
    assert times.exposed_ns == exposed


def test_overlap_and_exposed_make_up_communication() -> None:
    for times in (USUAL, HIDDEN, AFTER):
        assert times.overlap_ns + times.exposed_ns == times.comm_ns


def test_a_step_without_communication_exposes_nothing() -> None:
    assert StepTimes(backward_start_ns=200, backward_end_ns=300).exposed_ns == 0
    assert StepTimes(backward_start_ns=200, backward_end_ns=300).overlap_ns == 0
    assert StepTimes(backward_start_ns=200, backward_end_ns=300, comm_start_ns=250).comm_ns == 0


def test_a_finished_step_becomes_the_last_one() -> None:
    telemetry = Telemetry()
    telemetry.current = USUAL
    telemetry.finish_step()
    assert telemetry.last is USUAL
    assert telemetry.current == StepTimes()
    assert telemetry.steps == 1
    assert telemetry.exposed_total_ns == 30


def test_sums_and_averages_are_over_all_steps() -> None:
    telemetry = Telemetry()
    for times in (USUAL, HIDDEN):
        telemetry.current = times
        telemetry.finish_step()
    assert telemetry.steps == 2
    assert telemetry.exposed_total_ns == 30
    assert telemetry.averages() == {
        "forward_compute_time": 25,
        "backward_compute_time": 100,
        "backward_comm_time": 65,
        "backward_compute_comm_overlap_time": 50,
    }


def test_there_are_no_averages_before_the_first_step() -> None:
    assert not any(Telemetry().averages().values())


def test_two_telemetries_share_nothing() -> None:
    first, second = Telemetry(), Telemetry()
    first.current.comm_end_ns = 5
    first.finish_step()
    assert second == Telemetry()


def test_the_clock_does_not_go_back() -> None:
    stamps = [now_ns() for _ in range(100)]
    assert stamps == sorted(stamps)
    assert all(isinstance(stamp, int) for stamp in stamps)
