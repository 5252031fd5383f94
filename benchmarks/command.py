"""What the commands have in common: options, ranks that end with them, and where results go.

A benchmark that is a command of its own, `python -m benchmarks.<name>`, is a `Command`. Its ranks run the same module
again, started by `launch.run`, which gives them their settings as the last of five arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console

import paceline

from .launch import RankFailedError, run
from .ranks import Emit, joined
from .settings import Sent

RESULTS = Path(__file__).resolve().parent / "results"
PARTIAL = Path("runs") / "bench"
"""Where the results of runs go that say little, because they were of a part or of a small model."""

S = TypeVar("S", bound=Sent)
Found = dict[str, Any]
Start = Callable[[S, Callable[[Found], None]], None]
"""Starts ranks with some settings, and hands on what rank 0 reports."""


@dataclasses.dataclass(frozen=True)
class Command(Generic[S]):
    """`python -m benchmarks.<name>`."""

    name: str
    about: str
    settings: S
    """The settings of a run for which nothing else was asked."""
    quick: dict[str, Any]
    """The settings that a smoke run has instead."""
    options: tuple[str, ...]
    """The settings that are options of the command. All of them are whole numbers."""
    on_rank: Callable[[S, int, Emit], None] | None
    """What each rank does; None if `measure` starts its ranks in another way."""
    measure: Callable[[S, Start[S], Console], Found]
    """Starts the ranks, once or more often, and returns what is to be saved."""
    show: Callable[[Found, S, Console], None]
    picture: Callable[[Found, S, Path], None] | None = None

    def main(self, arguments: list[str] | None = None) -> int:
        if arguments is None and len(sys.argv) == 6 and all(map(str.isdigit, sys.argv[1:5])):
            self._run_rank()
            return 0
        chosen = vars(self._parse(arguments))
        given = {name: chosen[name] for name in self.options if chosen[name] is not None}
        settings = dataclasses.replace(self.settings, **((self.quick if chosen["quick"] else {}) | given))
        whole = settings == self.settings
        out: Path = chosen["out"] or (RESULTS / self.name if whole else PARTIAL)
        console = make_console(120)
        where = about()
        with ranks_ending(console):
            found = self.measure(settings, self._start, console)
        self.show(found, settings, console)
        out.mkdir(parents=True, exist_ok=True)
        saved = {"about": where | dataclasses.asdict(settings), **found}
        (out / f"{self.name}.json").write_text(json.dumps(saved, indent=1), encoding="utf-8")
        if self.picture is not None:
            self.picture(found, settings, out / f"{self.name}.png")
        console.print(f"saved {self.name}.json in {out}", markup=False)
        return 0

    def _parse(self, arguments: list[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"benchmarks.{self.name}", description=self.about)
        for name in self.options:
            parser.add_argument(f"--{name}", type=positive, help=f"default {getattr(self.settings, name)}")
        smaller = ", ".join(f"{name}={value}" for name, value in self.quick.items())
        parser.add_argument("--quick", action="store_true", help=f"a smoke run: {smaller}")
        add_out(parser, self.name, RESULTS / self.name)
        return parser.parse_args(arguments)

    def _start(self, settings: S, on_event: Callable[[Found], None]) -> None:
        run(settings, on_event, program=f"benchmarks.{self.name}")

    def _run_rank(self) -> None:
        assert self.on_rank is not None
        # In every run, torch warns about things that it does itself.
        warnings.simplefilter("ignore")
        with joined() as (rank, text, emit):
            self.on_rank(type(self.settings).from_json(text), rank, emit)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_out(parser: argparse.ArgumentParser, name: str, whole: Path) -> None:
    folder = whole.relative_to(RESULTS.parent.parent).as_posix()
    text = f"folder for what {name} found; default: {folder} for a whole run, {PARTIAL.as_posix()} for a part of one"
    parser.add_argument("--out", type=Path, help=text)


def make_console(width: int) -> Console:
    """A console that is as wide as the terminal, or ``width`` columns wide if there is no terminal."""
    return Console(width=width if not sys.stdout.isatty() else None, highlight=False)


@contextlib.contextmanager
def ranks_ending(console: Console) -> Iterator[None]:
    """End the ranks, however the block ends. If it does not end well, end the command, too."""
    # A time-out's SIGTERM must end the ranks as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped; the ranks are ended and nothing is saved", style="yellow")
        raise SystemExit(130) from None
    except RankFailedError as error:
        console.print(f"{error}; nothing is saved", style="red", markup=False)
        raise SystemExit(1) from None


def about() -> Found:
    """Where and with what a run was made."""
    return {
        "torch": torch.__version__,
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
    }
