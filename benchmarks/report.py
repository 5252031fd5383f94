"""Table, picture and JSON of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .models import CASES
from .modes import MODES
from .stats import Check, Row, Series, Verdict, judge, rows
from .suites import SUITES

SCALES = {"s": (1e3, "ms"), "bytes": (1e-6, "MB")}
VERDICT_STYLES = {"met": "green", "unclear": "yellow", "missed": "red", "": ""}
PALETTE = {"local": ["#9aa5b1"], "torch": ["#f2b179", "#d9772b"], "paceline": ["#5aa9e6", "#1d5fa8"]}
OTHER_COLOURS = ["#5fb58c", "#2f7d5b", "#a78bd0", "#6b4fa0"]


@dataclasses.dataclass
class Results:
    """All that a run found out."""

    about: dict[str, Any]
    """Machine, versions and settings, as far as they help to read the figures."""
    series_by_key: dict[tuple[str, str, str], Series] = dataclasses.field(default_factory=dict)
    checks_by_key: dict[tuple[str, str, str], Check] = dataclasses.field(default_factory=dict)

    @property
    def series(self) -> list[Series]:
        return list(self.series_by_key.values())

    @property
    def checks(self) -> list[Check]:
        return list(self.checks_by_key.values())

    def add(self, found: Series | Check) -> None:
        """What one launch has found, behind what earlier ones have."""
        table: dict[tuple[str, str, str], Any] = self.series_by_key if isinstance(found, Series) else self.checks_by_key
        known = table.get(found.key)
        table[found.key] = found if known is None else known.followed_by(found)

    def verdicts(self) -> list[Verdict]:
        found = (
            judge(series, *goal)
            for series in self.series
            if series.metric == "step"
            for goal in SUITES[series.suite].goals.get(series.model, ())
        )
        return [verdict for verdict in found if verdict is not None]

    def rows(self) -> list[Row]:
        return [row for series in self.series for row in rows(series)]

    def disagreements(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]


def save_json(results: Results, path: Path) -> None:
    # Six digits keep the file small; no clock here is better than that.
    series = [
        {
            **dataclasses.asdict(series),
            "values": {mode: [float(f"{value:.6g}") for value in values] for mode, values in series.values.items()},
        }
        for series in results.series
    ]
    parts = {
        "about": results.about,
        "rows": [dataclasses.asdict(row) for row in results.rows()],
        "checks": [dataclasses.asdict(check) for check in results.checks],
        "verdicts": [dataclasses.asdict(verdict) for verdict in results.verdicts()],
        "series": series,
    }
    # One line an entry: readable in a diff, without a line for each sample.
    lines = [f'"about": {json.dumps(results.about)}']
    for name in ("rows", "checks", "verdicts", "series"):
        if name == "verdicts" and not parts[name]:
            continue  # most suites have none
        entries = ",\n  ".join(json.dumps(entry) for entry in parts[name])
        lines.append(f'"{name}": [\n  {entries}\n ]')
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def print_tables(results: Results, console: Console) -> None:
    table = Table(title="Paceline and torch, side by side (lower is better)", title_justify="left")
    for heading in ("model", "metric", "mode"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median", "quartiles", "x better torch [95%]", "x local", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for series in results.series:
        for index, row in enumerate(rows(series)):
            scale, unit = SCALES[row.unit]
            low, high = (f"{value * scale:.4g}" for value in row.quartiles)
            goal = f"<= {row.goal:.2f} {row.verdict}" if row.goal is not None else ""
            table.add_row(
                "" if index else row.model,
                "" if index else row.metric,
                MODES[row.mode].title,
                f"{row.median * scale:.4g} {unit}",
                f"{low} .. {high}",
                _ratio(row) + (" *" if row.mode == row.baseline else "  "),
                "" if row.to_local is None else f"{row.to_local.value:.2f}",
                goal,
                style=VERDICT_STYLES[row.verdict],
            )
        table.add_section()
    console.print(table)
    console.print("* the better torch mode, which the ratios of its rows are to; medians of paired ratios")
    for verdict in results.verdicts():
        ratio = verdict.ratio
        found = "" if ratio is None else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] x"
        console.print(
            f"{verdict.word:7} {verdict.model}: {verdict.mode} takes {found} {verdict.reference}'s step,"
            f" at most {verdict.goal:.3f} wanted",
            style=VERDICT_STYLES[verdict.word],
            markup=False,
        )
    for check in results.checks:
        same = "bit-equal to" if check.equal else f"max |difference| {check.difference:.3g} from"
        ranks = "" if check.ranks_equal else "; RANKS DIFFER"
        console.print(
            f"weights {check.suite:6} {check.model:7} {check.mode:15} {same} {check.reference}"
            f" after {check.steps} steps{ranks}",
            style="" if check.holds else "red",
            highlight=False,
        )


def _ratio(row: Row) -> str:
    ratio = row.to_torch
    if ratio is None:
        return ""
    # A single figure has no interval.
    return f"{ratio.value:.3f}" + (f" [{ratio.low:.3f}, {ratio.high:.3f}]" if row.samples > 1 else "")


def save_picture(results: Results, path: Path) -> None:
    """One panel a suite: bars are ratios to the better torch mode, labels the medians."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictured = [series for series in results.series if series.pictured]
    panels = [
        (suite, [series for series in pictured if series.suite == suite])
        for suite in dict.fromkeys(series.suite for series in pictured)
    ]
    if not panels:
        return
    figure, grid = pyplot.subplots(
        len(panels), 1, figsize=(15, 4.6 * len(panels) + 0.8), squeeze=False, layout="constrained"
    )
    colours = _colours(dict.fromkeys(row.mode for row in results.rows()))
    for axes, (suite, shown) in zip(grid[:, 0], panels, strict=True):
        _panel(axes, shown, colours)
        axes.set_title(SUITES[suite].title, loc="left", fontweight="bold")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, [MODES[name].title for name in colours], loc="outside upper center", ncols=len(colours))
    about = results.about
    transport = "gloo and shared memory" if any(name.endswith("shm") for name in colours) else "gloo"
    setting = f"{about['world_size']} ranks x {about['threads']} thread, {transport}, CPU, torch {about['torch']}"
    reading = "bars: median of paired ratios, whiskers: 95% bootstrap interval, labels: median"
    figure.supxlabel(f"{setting}; {reading}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Any, shown: list[Series], colours: dict[str, str]) -> None:
    several_metrics = len({series.metric for series in shown}) > 1
    ticks, top = [], 1.0
    for place, series in enumerate(shown):
        bars = [row for row in rows(series) if row.to_torch is not None]
        width = 0.84 / max(len(bars), 1)
        for index, row in enumerate(bars):
            assert row.to_torch is not None
            left = place + (index - (len(bars) - 1) / 2) * width
            ratio = row.to_torch
            axes.bar(left, ratio.value, width * 0.92, color=colours[row.mode], zorder=2)
            axes.errorbar(
                left,
                ratio.value,
                yerr=[[ratio.value - ratio.low], [ratio.high - ratio.value]],
                color="#333333",
                capsize=2,
                linewidth=1,
                zorder=3,
            )
            scale, unit = SCALES[row.unit]
            axes.annotate(
                f"{row.median * scale:.3g} {unit}",
                (left, ratio.high),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90,
                fontsize=8,
                zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
            top = max(top, ratio.high)
        model = CASES[series.model].title
        ticks.append(f"{model}\n{series.metric}" if several_metrics else model)
    axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--", zorder=4)
    # Room for the labels above the highest bar.
    axes.set_ylim(0, top * 1.4)
    axes.set_xlim(-0.5, len(shown) - 0.5)
    axes.set_ylabel("x better torch mode\n(lower is better)")
    axes.set_xticks(range(len(ticks)), ticks, fontsize=8 if len(ticks) > 6 else 10)
    axes.grid(axis="y", color="#dddddd", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def _colours(modes: Iterable[str]) -> dict[str, str]:
    shades = {family: list(colours) for family, colours in PALETTE.items()}
    spare = list(OTHER_COLOURS)
    result = {}
    for name in modes:
        own = shades.get(MODES[name].family) or spare
        result[name] = own.pop(0) if own else "#444444"
    return result
