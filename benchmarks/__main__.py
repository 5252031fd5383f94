"""The command: `python -m benchmarks`, which is `make bench`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .command import PARTIAL, RESULTS, about, add_out, make_console, positive, ranks_ending
from .launch import run
from .models import CASES
from .modes import MODES
from .report import Results, print_tables, save_json, save_picture
from .settings import Settings
from .stats import Check, Series
from .suites import SUITES


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description="Paceline side by side with torch's classes.")
    add = parser.add_argument
    add("--suite", action="append", choices=list(SUITES), help="what to measure (repeatable)")
    add("--model", action="append", choices=list(CASES), help="what to train (repeatable)")
    add("--mode", action="append", choices=list(MODES), help="how to train it (repeatable)")
    add("--launches", type=positive, help="how often ranks are started anew (default 4)")
    add("--rounds", type=positive, help="turns of each mode in a launch; default: what --budget allows")
    add("--steps", type=positive, help="steps of one turn (default 3)")
    add("--budget", type=float, default=40.0, help="seconds for each suite and model (default 40)")
    add("--threads", type=positive, default=1, help="compute threads of a rank (default 1)")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a smoke run: a tiny model, two rounds")
    add_out(parser, "bench", RESULTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    console = make_console(150)
    suites = tuple(chosen.suite or [suite.name for suite in SUITES.values() if suite.default])
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
        launches=chosen.launches or (1 if chosen.quick else 4),
    )
    whole = not (chosen.suite or chosen.model or chosen.mode or chosen.quick)
    out: Path = chosen.out or (RESULTS if whole else PARTIAL)
    results = Results(about=_about(settings))
    start = time.monotonic()
    with (
        ranks_ending(console),
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as bar,
    ):
        task = bar.add_task("starting ranks", total=None)

        def on_event(event: dict[str, Any]) -> None:
            kind = event.pop("event")
            if kind == "progress":
                bar.update(task, description=event["label"], completed=event["done"], total=event["total"])
            elif kind == "series":
                results.add(Series(**event))
            elif kind == "check":
                results.add(Check(**event))
            else:
                bar.console.print(event["text"], markup=False)

        for launch in range(settings.launches):
            names = tuple(name for name in suites if launch == 0 or not SUITES[name].once)
            if names:
                run(dataclasses.replace(settings, suites=names, launch=launch), on_event)
    results.about["seconds"] = round(time.monotonic() - start)
    if results.series:
        print_tables(results, console)
        out.mkdir(parents=True, exist_ok=True)
        save_json(results, out / "bench.json")
        save_picture(results, out / "bench.png")
        console.print(f"{results.about['seconds']} s; saved bench.json and bench.png in {out}")
    return 0


def _about(settings: Settings) -> dict[str, Any]:
    return about() | {
        "world_size": settings.world_size,
        "threads": settings.threads,
        "steps": settings.steps,
        "seed": settings.seed,
        "launches": settings.launches,
    }


if __name__ == "__main__":
    sys.exit(main())
