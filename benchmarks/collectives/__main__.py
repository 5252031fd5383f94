"""The command: `python -m benchmarks.collectives`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..command import PARTIAL, RESULTS, about, add_out, make_console, positive, ranks_ending
from ..launch import run
from .judge import Curve
from .methods import METHODS
from .report import Run, print_table, save_json, save_picture
from .settings import QUICK_SIZES, SIZES, Settings


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.collectives", description="all_reduce by size and transport.")
    add = parser.add_argument
    add("--ranks", action="append", type=int, choices=(2, 4), help="how many ranks (repeatable; default 2, then 4)")
    add("--method", action="append", choices=list(METHODS), help="how to reduce (repeatable)")
    add("--rounds", type=positive, help="turns of each method and size; default: what --budget allows")
    add("--budget", type=float, default=40.0, help="seconds for each number of ranks (default 40)")
    add("--warm", action="store_true", help="call after call on warm caches, as MPI's benchmarks do")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="a smoke run: 2 ranks, three small sizes, two rounds")
    add_out(parser, "collectives", RESULTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    console = make_console(150)
    methods = []
    for method in (METHODS[name] for name in chosen.method or METHODS):
        reason = method.missing()
        if reason is None:
            methods.append(method.name)
        else:
            console.print(f"{method.title} is left out: {reason}", style="yellow", markup=False)
    if not methods:
        console.print("no method is left to run", style="red")
        return 2
    whole = not (chosen.ranks or chosen.method or chosen.quick or chosen.warm) and len(methods) == len(METHODS)
    out: Path = chosen.out or (RESULTS if whole else PARTIAL)
    runs = []
    with ranks_ending(console):
        for ranks in chosen.ranks or ([2] if chosen.quick else [2, 4]):
            settings = Settings(
                world_size=ranks,
                methods=tuple(methods),
                sizes=QUICK_SIZES if chosen.quick else SIZES,
                rounds=chosen.rounds or (2 if chosen.quick else None),
                budget_s=chosen.budget,
                warm=chosen.warm,
                seed=chosen.seed,
            )
            runs.append(_measure(settings, console))
            print_table(runs[-1], console)
    out.mkdir(parents=True, exist_ok=True)
    save_json(runs, out / "collectives.json")
    save_picture(runs, out / "collectives.png")
    console.print(f"saved collectives.json and collectives.png in {out}")
    return 0


def _measure(settings: Settings, console: Console) -> Run:
    found = Run(about=_about(settings))
    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting ranks", total=None)

        def on_event(event: dict[str, Any]) -> None:
            kind = event.pop("event")
            if kind == "progress":
                bar.update(task, description=event["label"], completed=event["done"], total=event["total"])
            elif kind == "curve":
                found.curves.append(Curve(**event))
            elif kind == "facts":
                found.about |= event
            else:
                bar.console.print(event["text"], style="yellow", markup=False)

        run(settings, on_event, program="benchmarks.collectives.ranks")
    found.about["seconds"] = round(time.monotonic() - start)
    found.about["load_at_end"] = round(os.getloadavg()[0], 1)
    return found


def _about(settings: Settings) -> dict[str, Any]:
    return about() | {
        "ranks": settings.world_size,
        "threads": settings.threads,
        "warm": settings.warm,
        "seed": settings.seed,
    }


if __name__ == "__main__":
    sys.exit(main())
