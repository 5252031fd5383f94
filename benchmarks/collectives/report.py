"""Table, picture and JSON of the collectives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..report import VERDICT_STYLES
from ..stats import Ratio
from .judge import Curve, Point, points, sentences
from .methods import METHODS
from .settings import size_name

LINES = {
    "gloo": {"color": "#d9772b", "marker": "s"},
    "shm": {"color": "#5aa9e6", "marker": "o"},
    "shm-zero-copy": {"color": "#1d5fa8", "marker": "o", "linewidth": 2.4},
    "mpi": {"color": "#5fb58c", "marker": "^"},
    "limit": {"color": "#555555", "linestyle": "--"},
    "limit-called": {"color": "#999999", "linestyle": ":"},
}


@dataclasses.dataclass
class Run:
    """All that the ranks of one run found out."""

    about: dict[str, Any]
    """Machine, versions and settings, as far as they help to read the figures."""
    curves: list[Curve] = dataclasses.field(default_factory=list)

    def points(self) -> list[Point]:
        return [point for curve in self.curves for point in points(curve, self.about["ranks"])]


def print_table(run: Run, console: Console) -> None:
    state = "warm caches" if run.about["warm"] else "just written"
    title = f"all_reduce of float32, {state}, {run.about['ranks']} ranks on {run.about['cores']} cores"
    table = Table(title=f"{title} (load {run.about['load_at_start']} at the start)", title_justify="left")
    for heading in ("size", "method"):
        table.add_column(heading, no_wrap=True)
    for heading in ("median", "quartiles", "GB/s", "x gloo's speed [95%]", "of the limit [95%]", "goals"):
        table.add_column(heading, justify="right", no_wrap=True)
    for curve in run.curves:
        for index, point in enumerate(points(curve, run.about["ranks"])):
            low, high = (f"{value * 1e6:.4g}" for value in point.quartiles_s)
            goals = [f"{point.goal_gloo:g}x"] if point.goal_gloo else []
            goals += [f"{point.goal_limit:.0%}"] if point.goal_limit else []
            table.add_row(
                "" if index else size_name(point.nbytes),
                METHODS[point.method].title,
                f"{point.median_s * 1e6:.4g} us",
                f"{low} .. {high}",
                f"{point.gigabytes_a_second:.3g}",
                _interval(point.times_gloo, ".1f"),
                _interval(point.of_limit, ".0%"),
                " ".join([*goals, point.verdict]),
                style=VERDICT_STYLES[point.verdict],
            )
        table.add_section()
    console.print(table)
    facts = [f"{METHODS[name].title}: {run.about[name]}" for name in METHODS if name in run.about]
    console.print("; ".join(facts), style="dim", markup=False)
    for line in sentences(run.points()):
        console.print(line, style=VERDICT_STYLES[line.split()[0]], markup=False, highlight=False)


def _interval(ratio: Ratio | None, form: str) -> str:
    return "" if ratio is None else f"{ratio.value:{form}} [{ratio.low:{form}}, {ratio.high:{form}}]"


def save_json(runs: list[Run], path: Path) -> None:
    entries = []
    for run in runs:
        # Six digits keep the file small; no clock here is better than that. One line a point, readable in a diff.
        curves = [
            {
                "nbytes": curve.nbytes,
                "seconds": {
                    name: [float(f"{value:.6g}") for value in values] for name, values in curve.seconds.items()
                },
            }
            for curve in run.curves
        ]
        parts = {"points": [dataclasses.asdict(point) for point in run.points()], "curves": curves}
        lines = [f'"about": {json.dumps(run.about)}']
        for name, rows in parts.items():
            lines.append(f'"{name}": [\n    ' + ",\n    ".join(map(json.dumps, rows)) + "\n   ]")
        entries.append("{\n   " + ",\n   ".join(lines) + "\n  }")
    path.write_text('{\n "runs": [\n  ' + ",\n  ".join(entries) + "\n ]\n}\n")


def save_picture(runs: list[Run], path: Path) -> None:
    """A row a number of ranks: latency and bandwidth against size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(runs), 2, figsize=(13, 5.0 * len(runs) + 0.6), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for (latency, bandwidth), run in zip(grid, runs, strict=True):
        found = run.points()
        for name in dict.fromkeys(point.method for point in found):
            mine = [point for point in found if point.method == name]
            sizes = [point.nbytes for point in mine]
            style = {"marker": ".", "markersize": 5, **LINES.get(name, {})}
            (handles[name],) = latency.plot(sizes, [point.median_s * 1e6 for point in mine], **style)
            latency.fill_between(
                sizes,
                [point.quartiles_s[0] * 1e6 for point in mine],
                [point.quartiles_s[1] * 1e6 for point in mine],
                color=style.get("color"),
                alpha=0.15,
                linewidth=0,
            )
            bandwidth.plot(sizes, [point.gigabytes_a_second for point in mine], **style)
        latency.set_yscale("log")
        latency.set_ylabel("time of a call")
        latency.yaxis.set_major_formatter(lambda value, _: _microseconds(value))
        bandwidth.set_ylabel("GB of the tensor a second")
        _limit_height(bandwidth, found)
        ranks = f"{run.about['ranks']} ranks on {run.about['cores']} cores"
        latency.set_title(f"{ranks}: time (lower is better)", loc="left", fontweight="bold")
        bandwidth.set_title(f"{ranks}: bandwidth (higher is better)", loc="left", fontweight="bold")
        ticks = [curve.nbytes for curve in run.curves]
        for axes in (latency, bandwidth):
            axes.set_xscale("log")
            axes.set_xticks(ticks, [size_name(tick) for tick in ticks])
            axes.minorticks_off()
            axes.grid(color="#dddddd")
            axes.spines[["top", "right"]].set_visible(False)
    titles = [METHODS[name].title for name in handles]
    figure.legend(handles.values(), titles, loc="outside upper center", ncols=len(handles), frameon=False)
    about = runs[0].about
    state = "on warm caches" if about["warm"] else "just written by its rank"
    reading = f"medians of turns in random order in one run; shaded: quartiles; SUM of float32, {state}"
    figure.supxlabel(f"torch {about['torch']}, {about['machine']}; {reading}", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _microseconds(value: float) -> str:
    return f"{value:g} us" if value < 1000 else f"{value / 1000:g} ms"


def _limit_height(axes: Any, found: list[Point]) -> None:
    """In cache, without waiting, the limit is so high that it would flatten all other lines: cut it off."""
    others = [point.gigabytes_a_second for point in found if not point.method.startswith("limit")]
    limits = [point.gigabytes_a_second for point in found if point.method == "limit"]
    top = 1.35 * max(others)
    axes.set_ylim(0, top)
    if limits and max(limits) > top:
        text = f"the limit goes on to {max(limits):.0f} GB/s, in cache"
        axes.annotate(
            text,
            (0.98, 0.97),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=9,
            color="#555555",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2},
        )
