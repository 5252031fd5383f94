"""The table of both columns, the summary line and the exit code."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .ranks import Outcome

REASON_CHARS = 110


@dataclass(frozen=True)
class Verdict:
    """How our column compares with torch's."""

    passed: list[str]
    failed: list[str]
    """Stock passes, ours does not, and nobody wrote down why."""
    differing: list[str]
    """As `failed`, but on the list of known differences."""
    stale: list[str]
    """On the list of known differences, yet passing."""
    gained: list[str]
    """Ours passes where stock does not."""

    @property
    def exit_code(self) -> int:
        return 1 if self.failed or self.stale else 0


def compare(*, stock: dict[str, Outcome] | None, ours: dict[str, Outcome], known: dict[str, str]) -> Verdict:
    """Judge our column. Without a stock column every test is expected to pass."""

    def stock_passes(name: str) -> bool:
        return stock is None or (name in stock and stock[name].status == "pass")

    passed = [name for name, outcome in ours.items() if outcome.status == "pass"]
    lost = [name for name in ours if name not in passed and stock_passes(name)]
    return Verdict(
        passed=passed,
        failed=[name for name in lost if name not in known],
        differing=[name for name in lost if name in known],
        stale=[name for name in passed if name in known],
        gained=[name for name in passed if stock is not None and not stock_passes(name)],
    )


def print_table(
    console: Console,
    *,
    names: list[str],
    stock: dict[str, Outcome] | None,
    ours: dict[str, Outcome] | None,
    known: dict[str, str],
) -> None:
    """Print one row a test."""
    table = Table(title="DistributedDataParallel in torch's own test suite, on the CPU over gloo")
    table.add_column("test", no_wrap=True)
    for title, column in (("stock", stock), ("ours", ours)):
        if column is not None:
            table.add_column(title, overflow="fold")
    for name in names:
        row = [name.removeprefix("test_")]
        if stock is not None:
            row.append(_cell(stock.get(name)))
        if ours is not None:
            outcome = ours.get(name)
            if outcome and outcome.status != "pass" and name in known:
                row.append(f"[yellow]differs: {escape(known[name])}[/]")
            else:
                row.append(_cell(outcome))
        table.add_row(*row)
    console.print(table)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "[dim]not run[/]"
    colour = {"pass": "green", "fail": "red", "skip": "yellow"}[outcome.status]
    reason = outcome.reason if len(outcome.reason) <= REASON_CHARS else outcome.reason[:REASON_CHARS] + "..."
    return f"[{colour}]{outcome.status}[/] {escape(reason)}".rstrip()


def print_summary(console: Console, *, verdict: Verdict, stock: dict[str, Outcome] | None) -> None:
    """Print what the table amounts to; the last line is the count of our column."""
    if stock is not None:
        passing = sum(outcome.status == "pass" for outcome in stock.values())
        console.print(f"stock: {passing} of {len(stock)} pass; ours passes {len(verdict.gained)} that stock does not")
    if verdict.differing:
        console.print(f"known differences: {len(verdict.differing)} (tests/conformance/known.py)")
    for name in verdict.failed:
        console.print(f"[red]stock passes, ours does not:[/] {name}")
    for name in verdict.stale:
        console.print(f"[red]passes, take it off the list of known differences:[/] {name}")
    console.print(f"{len(verdict.passed)} passed, {len(verdict.failed)} failed", highlight=False)
