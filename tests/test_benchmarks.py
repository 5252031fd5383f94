"""The benchmark harness runs, compares what it says it compares, and its statistics are right.

No figure is judged here: whether Paceline is fast is what `make bench` answers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import buckets, control
from benchmarks.collectives import settings as collectives
from benchmarks.collectives.judge import Curve, points, sentences
from benchmarks.collectives.methods import METHODS
from benchmarks.memory import footprint
from benchmarks.modes import MODES, USUAL, Job
from benchmarks.report import Results
from benchmarks.settings import Settings
from benchmarks.stats import Check, Series, judge, paired_ratio, rows
from benchmarks.suites import SUITES

ROOT = Path(__file__).resolve().parent.parent
METRICS = {
    "step": {"step"},
    "memory": {"gradients at peak", "gradients + buckets", "after zero_grad"},
    "wrap": {"wrap", "first step", "wrap + first step", "second step"},
    "world1": {"step, world size 1"},
}


def _run(*arguments: str, module: str = "benchmarks", timeout: float = 160) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _found(out: Path, *arguments: str, module: str = "benchmarks", name: str = "bench", timeout: float = 160) -> Any:
    """What a run says and what it writes: its output, and the JSON beside the picture."""
    done = _run(*arguments, "--out", str(out), module=module, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    picture = out / f"{name}.png"
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")
    return done.stdout, json.loads((out / f"{name}.json").read_text())


@pytest.mark.full
@pytest.mark.timeout(450)
def test_quick_run_reports_every_suite_in_every_mode(tmp_path: Path) -> None:
    # It starts ranks for each suite and mode, which takes minutes beside other tests.
    said, found = _found(tmp_path, "--quick", "--rounds", "1", timeout=400)
    modes = set(USUAL)
    seen: dict[str, dict[str, set[str]]] = {}
    for row in found["rows"]:
        seen.setdefault(row["suite"], {}).setdefault(row["metric"], set()).add(row["mode"])
    assert seen.keys() == METRICS.keys()
    for suite, metrics in METRICS.items():
        assert metrics <= seen[suite].keys()
        for metric in metrics:
            # Nothing is wrapped in the local mode.
            assert seen[suite][metric] == modes - ({"local"} if "wrap" in metric else set()), metric
    for title in (MODES[name].title for name in modes):
        assert title in said
    assert (tmp_path / "bench.png").exists()
    assert {check["mode"] for check in found["checks"] if check["suite"] == "step"} == {
        name for name in modes if MODES[name].synchronised and name != "torch"
    }
    assert all(check["equal"] and check["ranks_equal"] for check in found["checks"]), found["checks"]


@pytest.mark.full
def test_shm_suite_compares_its_own_modes(tmp_path: Path) -> None:
    _, found = _found(tmp_path, "--suite", "shm", "--quick", "--rounds", "1", "--launches", "2")
    for series in found["series"]:
        assert series["launches"] == [1, 1]
        assert {len(values) for values in series["values"].values()} == {2}
    modes = set(SUITES["shm"].modes)
    assert {row["mode"] for row in found["rows"]} == modes
    assert {check["mode"] for check in found["checks"]} == modes & {"torch-shm", "paceline-shm"}
    assert all(check["equal"] and check["ranks_equal"] for check in found["checks"]), found["checks"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_quick_buckets_compare_both_classes(tmp_path: Path) -> None:
    _, found = _found(tmp_path, "--quick", module="benchmarks.buckets", name="buckets", timeout=500)
    (size,) = found["sizes"]
    ours = size["paceline"]
    assert ours["graphs"] == 1
    assert min(ours["compile_s"]) > min(ours["step_s"]) > 0
    # Each of the three layers has a bucket, and the last one leaves at the end.
    assert 0 < ours["started"] <= 2 / 3 + 1e-6
    assert "error" in size["torch"] or size["torch"]["graphs"] > 1
    assert (tmp_path / "buckets.png").exists()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_quick_compiling_compares_starts_and_calls(tmp_path: Path) -> None:
    _, found = _found(tmp_path, "--quick", module="benchmarks.compiling", name="compiling", timeout=800)
    assert found["about"]["layers"] == 1
    starts = [event for mode in ("each", "once") for event in found[f"layers, own, {mode}"]]
    assert len(starts) == 2
    assert all(event["seconds"] > 0 and event["processor"] > 0 for event in starts)
    # However it was compiled, it is the same training.
    assert len({round(event["gradient"], 4) for event in starts}) == 1
    assert all(len(calls) == 1 and calls[0] > 0 for calls in found["guards_us"].values())


@pytest.mark.full
def test_a_small_run_reports_the_modes_that_are_asked_for(tmp_path: Path) -> None:
    chosen = ("--mode", "torch", "--mode", "paceline")
    _, found = _found(tmp_path, "--suite", "step", "--quick", "--rounds", "1", *chosen)
    assert {(row["suite"], row["mode"]) for row in found["rows"]} == {("step", "torch"), ("step", "paceline")}
    assert [check["equal"] and check["ranks_equal"] for check in found["checks"]] == [True]


@pytest.mark.full
def test_quick_control_says_what_it_costs(tmp_path: Path) -> None:
    said, found = _found(tmp_path, "--quick", module="benchmarks.control", name="control")
    assert found["collectives"] >= 1
    assert found["bookkeeping_s"] > 0
    assert "bound" in said


@pytest.mark.full
def test_quick_collectives_report_every_method_at_every_size(tmp_path: Path) -> None:
    said, found = _found(tmp_path, "--quick", "--rounds", "1", module="benchmarks.collectives", name="collectives")
    (run,) = found["runs"]
    methods = {name for name, method in METHODS.items() if method.missing() is None}
    assert {"gloo", "limit"} <= methods
    assert {(point["nbytes"], point["method"]) for point in run["points"]} == {
        (nbytes, name) for nbytes in collectives.QUICK_SIZES for name in methods
    }
    assert all(point["median_s"] > 0 for point in run["points"])
    for method in METHODS.values():
        assert method.title in said  # those that are missing are named, too
    assert (tmp_path / "collectives.png").exists()


@pytest.mark.full
def test_unknown_model_is_refused_with_the_choices() -> None:
    done = _run("--model", "gtp")
    assert done.returncode == 2
    assert "gtp" in done.stderr
    assert "resnet" in done.stderr


def test_ratios_are_paired_by_round() -> None:
    # The machine slows down tenfold half-way: unpaired medians would mix the halves, pairs cancel it.
    base = [1.0, 1.0, 1.0, 10.0, 10.0]
    ratio = paired_ratio([2 * value for value in base], base)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="can't be paired"):
        paired_ratio([1.0], [1.0, 2.0])


def test_intervals_know_of_launches() -> None:
    # Each launch is steady, and they differ: what another one would find is anybody's guess.
    values = [0.9] * 20 + [1.1] * 20
    together, apart = paired_ratio(values, [1.0] * 40, [20, 20]), paired_ratio(values[:20], [1.0] * 20, [20])
    assert (together.low, together.high) == (0.9, 1.1)
    assert apart.low == apart.high == 0.9


def test_launches_are_put_together() -> None:
    results = Results(about={})
    for value, equal in ((2.0, True), (1.0, False), (1.0, True)):
        results.add(Series("shm", "gpt", "step", "s", {"torch-views": [2.0, 2.0], "paceline-shm": [value, value]}))
        results.add(Check("shm", "gpt", "paceline-shm", "torch-views", 5, 0.0, equal, ranks_equal=True))
    (series,), (check,) = results.series, results.checks
    assert series.values["paceline-shm"] == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    assert series.sizes() == (2, 2, 2)
    assert not check.equal
    # Judged with all launches: by one of them alone it would be missed.
    (verdict,) = results.verdicts()
    assert (verdict.ratio.value, verdict.word) == (0.5, "unclear")


def test_a_difference_that_is_no_number_is_no_small_one() -> None:
    good = Check("world1", "gpt", "paceline", "torch", 5, 0.0, True, ranks_equal=True, tolerance=1e-3)
    bad = dataclasses.replace(good, equal=False, difference=float("nan"))
    assert good.followed_by(good).holds
    assert not good.followed_by(bad).holds
    assert not bad.followed_by(good).holds


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.9] * 6, "met"),
        ([1.2] * 6, "missed"),
        ([0.8, 0.8, 1.1, 1.1, 1.1], "unclear"),
        ([0.8, 0.8, 0.8, 1.1, 1.1], "unclear"),
    ],
)
def test_verdict_is_against_the_better_torch_mode(values: list[float], verdict: str) -> None:
    count = len(values)
    series = Series(
        suite="step",
        model="tiny",
        metric="step",
        unit="s",
        values={"torch": [3.0] * count, "torch-views": [1.0] * count, "paceline": values},
        goal=1.0,
    )
    found = {row.mode: row for row in rows(series)}
    assert found["paceline"].baseline == "torch-views"
    assert found["paceline"].verdict == verdict
    assert found["torch"].verdict == ""


def test_a_mode_is_judged_against_the_one_that_is_named() -> None:
    values = {"torch-views": [2.0] * 6, "two-threads": [1.0] * 6, "paceline-shm": [1.2] * 6}
    series = Series(suite="shm", model="gpt", metric="step", unit="s", values=values)
    found = {reference: judge(series, "paceline-shm", reference, 1.0) for reference in (*values, "torch")}
    assert found["torch"] is None
    assert found["torch-views"].word == "met"
    assert found["two-threads"].word == "missed"


def test_collectives_are_judged_against_gloo_and_the_limit() -> None:
    seconds = {"gloo": [60.0] * 6, "shm": [5.0] * 6, "shm-zero-copy": [4.0] * 6, "limit": [3.0] * 6}
    found = {point.method: point for point in points(Curve(1 << 20, seconds), ranks=2)}
    assert found["gloo"].verdict == found["limit"].verdict == ""
    assert found["shm"].verdict == "met"  # 12 times gloo, which is all that is asked of it
    zero_copy = found["shm-zero-copy"]
    assert (zero_copy.times_gloo.value, zero_copy.of_limit.value) == (15.0, 0.75)
    assert zero_copy.verdict == "missed"  # three quarters of the limit
    assert [line.split()[0] for line in sentences(list(found.values()))] == ["met", "met", "missed"]
    # Between the sizes that have a goal, nothing is judged but the share of the limit; four ranks always are.
    assert points(Curve(1 << 16, seconds), ranks=2)[1].verdict == ""
    assert points(Curve(1 << 16, seconds), ranks=4)[1].goal_gloo == 3.0


def test_two_threads_train_on_the_batches_of_all_ranks() -> None:
    import torch
    from benchmarks.models import CASES

    job = Job(case=CASES["tiny"], rank=0, world_size=2, process_group=None, new_group=None)  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    replica = MODES["two-threads"].build(job)
    losses = [CASES["tiny"].loss(replica.module, job.batch(3, rank=rank)) for rank in range(2)]
    torch.testing.assert_close(replica.forward(3), (losses[0] + losses[1]) / 2)
    replica.step(3)
    assert torch.get_num_threads() == threads
    before = [parameter.clone() for parameter in replica.module.parameters()]
    job.rank = 1
    replica.step(4)
    assert all(torch.equal(a, b) for a, b in zip(before, replica.module.parameters(), strict=True))


def test_settings_survive_the_way_to_the_ranks() -> None:
    settings = Settings(
        suites=("step",), models=None, modes=("local", "torch"), rounds=None, steps=3, warmup=5, budget_s=1.5
    )
    assert Settings.from_json(settings.to_json()) == settings
    assert buckets.Settings.from_json(buckets.Settings().to_json()) == buckets.Settings()
    other = collectives.Settings(world_size=4, methods=("gloo",), warm=True)
    assert collectives.Settings.from_json(other.to_json()) == other


def test_footprint_counts_gradients_and_a_second_copy_of_them() -> None:
    import torch
    from torch import nn

    class Hoarder:
        """Keeps a copy of every gradient, as a reducer with separate buckets does."""

        def __init__(self, copies: int) -> None:
            self.module = nn.Linear(256, 256, bias=False)
            self.buckets = [torch.empty_like(self.module.weight) for _ in range(copies)]

        def forward(self, index: int) -> torch.Tensor:
            return self.module(torch.ones(1, 256)).sum()

        def step(self, index: int) -> None:
            raise NotImplementedError

    size = 256 * 256 * 4
    for copies in (0, 1, 2):
        # The weight itself is made inside the measured part here, hence the one more.
        found = footprint(functools.partial(Hoarder, copies))
        assert found.held_bytes // size == 2 + copies
        assert found.idle_bytes // size == 1 + copies
        assert found.peak_bytes >= found.held_bytes


@pytest.mark.parametrize(("bookkeeping_s", "verdict"), [(2e-6, "kept"), (2e-3, "EXCEEDED")])
def test_the_control_channel_is_held_to_its_bound(bookkeeping_s: float, verdict: str) -> None:
    found = {
        "step_s": 0.1,
        "watched_step_s": 0.1,
        "verified_step_s": 0.11,
        "held_bytes": 2.0**20,
        "collectives": 2.0,
        "bookkeeping_s": bookkeeping_s,
        "look_s": 1e-4,
        "agree_s": 1e-3,
    }
    told = dict(control.rows(found))
    assert told["bound"] == f"500 us: {verdict}"
    assert told["the same with verify_every=100"] == "0.100% of a step"
