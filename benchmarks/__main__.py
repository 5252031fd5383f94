"""The command: `python -m benchmarks`, which is `make bench`."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .launch import RankFailedError, run
from .models import CASES
from .modes import MODES
from .report import Results, print_tables, save_json, save_picture
from .settings import Settings
from .stats import Check, Ratio, Series, Verdict
from .suites import SUITES

RESULTS = Path(__file__).resolve().parent / "results"
PARTIAL = Path("runs") / "bench"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description="Paceline side by side with torch's classes.")
    add = parser.add_argument
    add("--suite", action="append", choices=list(SUITES), help="what to measure (repeatable)")
    add("--model", action="append", choices=list(CASES), help="what to train (repeatable)")
    add("--mode", action="append", choices=list(MODES), help="how to train it (repeatable)")
    add("--rounds", type=_positive, help="turns of each mode; default: what --budget allows")
    add("--steps", type=_positive, help="steps of one turn (default 3)")
    add("--budget", type=float, default=40.0, help="seconds for each suite and model (default 40)")
    add("--threads", type=_positive, default=1, help="compute threads of a rank (default 1)")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a smoke run: a tiny model, two rounds")
    add(
        "--out",
        type=Path,
        help="folder for bench.json and bench.png; default: benchmarks/results for a whole run,"
        f" {PARTIAL.as_posix()} for a part of one",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    console = Console(width=150 if not sys.stdout.isatty() else None, highlight=False)
    suites = tuple(chosen.suite or [suite.name for suite in SUITES.values() if suite.default])
    modes = dict.fromkeys(chosen.mode or [name for suite in suites for name in SUITES[suite].modes])
    missing = {name: reason for name in modes if (reason := MODES[name].missing()) is not None}
    for name, reason in missing.items():
        console.print(f"mode {name} is left out: {reason}", style="yellow", markup=False)
    if len(missing) == len(modes):
        console.print("no mode is left to run", style="red")
        return 2
    settings = Settings(
        suites=suites,
        models=tuple(chosen.model) if chosen.model else ("tiny",) if chosen.quick else None,
        modes=tuple(chosen.mode) if chosen.mode else None,
        rounds=chosen.rounds or (2 if chosen.quick else None),
        steps=chosen.steps or (1 if chosen.quick else 3),
        warmup=2 if chosen.quick else 5,
        budget_s=chosen.budget,
        threads=chosen.threads,
        seed=chosen.seed,
    )
    whole = not (chosen.suite or chosen.model or chosen.mode or chosen.quick)
    out: Path = chosen.out or (RESULTS if whole and not missing else PARTIAL)
    results = Results(about=_about(settings))
    start = time.monotonic()
    # A time-out's SIGTERM must end the ranks as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as bar:
            task = bar.add_task("starting ranks", total=None)

            def on_event(event: dict[str, Any]) -> None:
                kind = event.pop("event")
                if kind == "progress":
                    bar.update(task, description=event["label"], completed=event["done"], total=event["total"])
                elif kind == "series":
                    results.series.append(Series(**event))
                elif kind == "check":
                    results.checks.append(Check(**event))
                elif kind == "verdict":
                    ratio = event.pop("ratio")
                    results.verdicts.append(Verdict(**event, ratio=ratio and Ratio(**ratio)))
                else:
                    bar.console.print(event["text"], markup=False)

            run(settings, on_event)
    except KeyboardInterrupt:
        console.print("stopped; the ranks are ended and nothing is saved", style="yellow")
        return 130
    except RankFailedError as error:
        console.print(f"{error}; nothing is saved", style="red")
        return 1
    results.about["seconds"] = round(time.monotonic() - start)
    if results.series:
        print_tables(results, console)
        out.mkdir(parents=True, exist_ok=True)
        save_json(results, out / "bench.json")
        save_picture(results, out / "bench.png")
        console.print(f"{results.about['seconds']} s; saved bench.json and bench.png in {out}")
    return 0


def _about(settings: Settings) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
        "world_size": settings.world_size,
        "threads": settings.threads,
        "steps": settings.steps,
        "seed": settings.seed,
    }


if __name__ == "__main__":
    sys.exit(main())
