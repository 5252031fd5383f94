"""One column of the table: all tests in one setting, run or read from an earlier run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import Progress

from .ranks import Outcome, run_test
from .selection import Selected

LOGS = Path("runs/conformance")

Column = dict[str, Outcome]
"""By the name of the test."""


def measure(
    title: str,
    tests: Sequence[Selected],
    suite: ModuleType,
    *,
    timeout_s: float,
    console: Console,
    backend: str = "gloo",
    forget_logs_of: Collection[str] = ("pass",),
) -> Column:
    """Run all ``tests``; logs of those that end in a status of ``forget_logs_of`` are removed."""
    log_dir = LOGS / title
    shutil.rmtree(log_dir, ignore_errors=True)
    log_dir.mkdir(parents=True)
    outcomes: Column = {}
    started = time.monotonic()
    # No refresh thread: this process forks.
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(title, total=len(tests))
        for test in tests:
            progress.update(task, description=f"{title}: {test.name}", refresh=console.is_terminal)
            outcome = run_test(test, suite=suite, log_dir=log_dir, timeout_s=timeout_s, backend=backend)
            outcomes[test.name] = outcome
            if outcome.status in forget_logs_of:
                for log in log_dir.glob(f"{test.name}.rank*.log"):
                    log.unlink()
            progress.advance(task)
    console.print(f"{title}: {len(tests)} tests in {time.monotonic() - started:.0f} s")
    write(outcomes, LOGS / f"{title}.json")
    return outcomes


def write(column: Column, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: dataclasses.asdict(outcome) for name, outcome in column.items()}, indent=1)
    file.write_text(text, encoding="utf-8")


def read(file: Path | None, tests: Sequence[Selected]) -> Column | None:
    """What an earlier run wrote to ``file``; None if it does not have all ``tests``."""
    if file is None or not file.exists():
        return None
    stored = json.loads(file.read_text(encoding="utf-8"))
    if not all(test.name in stored for test in tests):
        return None
    return {test.name: Outcome(**stored[test.name]) for test in tests}
