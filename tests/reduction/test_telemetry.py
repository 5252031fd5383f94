"""Stamps of a step and what is derived from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.reduction.telemetry import StepTimes, Telemetry

# Communication begins inside backward and ends after it.
USUAL = StepTimes(
    forward_start_ns=100,
    forward_end_ns=150,
    backward_start_ns=200,
    backward_end_ns=300,
    comm_start_ns=240,
    comm_end_ns=330,
)
# A backward that communicated nothing.
SILENT = StepTimes(backward_start_ns=200, backward_end_ns=300)
HIDDEN = replace(SILENT, comm_start_ns=240, comm_end_ns=280)


@pytest.mark.parametrize(
    ("times", "durations"),
    [
        pytest.param(StepTimes(), (0, 0, 0, 0, 0), id="nothing"),
        pytest.param(USUAL, (50, 100, 90, 60, 30), id="usual"),
        pytest.param(HIDDEN, (0, 100, 40, 40, 0), id="hidden"),
        pytest.param(replace(SILENT, comm_start_ns=310, comm_end_ns=330), (0, 100, 20, 0, 20), id="after"),
        pytest.param(SILENT, (0, 100, 0, 0, 0), id="silent"),
        pytest.param(replace(SILENT, comm_start_ns=250), (0, 100, 0, 0, 0), id="has not ended"),
    ],
)
def test_durations(times: StepTimes, durations: tuple[int, ...]) -> None:
    forward, backward = times.forward_compute_ns, times.backward_compute_ns
    assert (forward, backward, times.comm_ns, times.overlap_ns, times.exposed_ns) == durations


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
