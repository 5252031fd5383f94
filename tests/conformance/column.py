"""One column of the table: all tests in one setting."""

from __future__ import annotations

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
    return outcomes
