"""Seeded fault scripts, in a process of their own: fifty here, a thousand in ``make soak``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.control._common import BUSY_S
from tests.control.fault_scripts import CAUSES, Heard, Script, judge, scripts

SCRIPTS = 50


@pytest.mark.full
@pytest.mark.timeout(1600)
def test_every_survivor_names_the_rank_and_the_cause() -> None:
    # What is promised is for a machine that is not busy: the soak holds it to that.
    command = [sys.executable, "-m", "tests.control.fault_scripts", "--runs", str(SCRIPTS), "--within", str(BUSY_S)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=1500)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert f"{SCRIPTS} fault scripts" in done.stdout


def test_scripts_are_of_every_kind_and_repeat() -> None:
    some = list(scripts(SCRIPTS, seed=0))
    assert some == list(scripts(SCRIPTS, seed=0)) != list(scripts(SCRIPTS, seed=1))
    assert len({(script.phase, script.action) for script in some}) == 25
    assert {script.backend for script in some} == {"gloo", "cpu:shm"}
    assert {script.world_size for script in some} == {2, 4}


def test_a_survivor_that_is_wrong_is_found() -> None:
    script = Script(0, 2, "gloo", rank=1, step=2, phase="loader", action="raise")
    cause = "rank 1 raised: InjectedFaultError: injected: rank 1, step 2, loader (fault_scripts.py:1 in train)"
    good = Heard("PeerFailedError", 1, cause, 0.5)
    assert judge(script, [good], within_s=2) == []
    for bad in (
        [],
        [Heard("RankLostError", 1, cause, 0.5)],
        [Heard("PeerFailedError", 0, cause, 0.5)],
        [Heard("PeerFailedError", 1, "something", 0.5)],
        [Heard("PeerFailedError", 1, cause, 3.0)],
    ):
        assert judge(script, bad, within_s=2)
    stopped = Script(0, 2, "gloo", rank=1, step=2, phase="loader", action="stop")
    assert judge(stopped, [Heard("RankLostError", 1, "is gone", 1.0)], within_s=2)
    assert judge(stopped, [Heard("RankLostError", 1, CAUSES["stop"], 1.0)], within_s=2) == []
