"""The benchmark harness runs, compares what it says it compares, and its statistics are right.

No figure is judged here: whether Paceline is fast is what `make bench` answers.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytest.importorskip("matplotlib", reason="the bench extra is not installed")
sys.path.insert(0, str(ROOT))

from benchmarks.memory import footprint  # noqa: E402
from benchmarks.modes import MODES  # noqa: E402
from benchmarks.settings import Settings  # noqa: E402
from benchmarks.stats import Series, paired_ratio, rows  # noqa: E402

METRICS = {
    "step": {"step"},
    "memory": {"gradients at peak", "gradients + buckets", "after zero_grad"},
    "wrap": {"wrap", "first step", "wrap + first step", "second step"},
    "world1": {"step, world size 1"},
}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=160,
        check=False,
    )


def test_quick_run_reports_every_suite_in_every_mode(tmp_path: Path) -> None:
    done = _run("--quick", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    modes = {mode.name for mode in MODES.values() if mode.missing() is None}
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
        assert title in done.stdout
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {check["mode"] for check in found["checks"] if check["suite"] == "step"} == {
        name for name in modes if MODES[name].synchronised and name != "torch"
    }
    assert all(check["equal"] and check["ranks_equal"] for check in found["checks"]), found["checks"]


def test_unknown_model_is_refused_with_the_choices() -> None:
    done = _run("--model", "gtp")
    assert done.returncode == 2
    assert "gtp" in done.stderr
    assert "resnet" in done.stderr


def test_ratios_are_paired_by_round() -> None:
    # The machine slows down tenfold half-way: unpaired medians would mix the halves, pairs cancel it.
    base = [1.0, 1.0, 1.0, 10.0, 10.0]
    ratio = paired_ratio([2 * value for value in base], base)
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="can't be paired"):
        paired_ratio([1.0], [1.0, 2.0])


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


def test_settings_survive_the_way_to_the_ranks() -> None:
    settings = Settings(
        suites=("step",), models=None, modes=("local", "torch"), rounds=None, steps=3, warmup=5, budget_s=1.5
    )
    assert Settings.from_json(settings.to_json()) == settings


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
