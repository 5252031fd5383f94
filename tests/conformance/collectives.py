"""torch's own tests of collectives, over gloo and over shm.

    python -m tests.conformance --suite collectives            both columns, docs/transport-conformance.md

Here no decorator is lifted and no device is mapped: a test that wants a GPU, NCCL or another backend says so itself
and is left out. What runs is what torch runs for gloo on a machine without GPUs, and then the same over shm.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

from rich.console import Console

from . import column, report
from .column import Column
from .ranks import Outcome
from .selection import SUITE, Selected, ranks_needed, read_suite, select_tests

PAGE = Path("docs/transport-conformance.md")
# Torch's own runner has three as well: odd numbers of ranks find what even ones do not.
RANKS = 3
# What the suite calls a world that is not small: its tests of subgroups want that.
MANY_RANKS = 8
_RANKS_OF_DECORATORS = {
    "skip_if_small_worldsize": MANY_RANKS,
    "skip_if_odd_worldsize": 4,
    "require_world_size": None,
    "require_exact_world_size": None,
}

# What gloo passes and shm does not, on purpose: name -> reason. The run fails when one of them starts to pass.
_BY_NAME = "torch's monitored_barrier() asks for a backend whose name is gloo, and refuses any other"
_IN_OTHER_WORDS = "the error comes in time and names the ranks that did not arrive, in words the test does not look for"
KNOWN: dict[str, str] = {
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": _IN_OTHER_WORDS,
    "test_monitored_barrier_failure_order": _BY_NAME,
    "test_monitored_barrier_wait_all_ranks": _BY_NAME,
}


def main(*, only: str | None, timeout_s: float, verbose: bool) -> int:
    """Both columns, the table, the page in docs/ (if all tests were run), the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    suite = _load()
    tests = [test for test in _select() if test.is_asked_for(only)]
    gloo = _measure("gloo", tests, suite, timeout_s=timeout_s, console=console)
    # Skipped over gloo is skipped altogether: by machine, not by backend.
    written_for_us = [test for test in tests if gloo[test.name].status != "skip"]
    _become_shm(suite)
    shm = _measure("shm", written_for_us, suite, timeout_s=timeout_s, console=console)
    verdict = report.compare(stock=gloo, ours=shm, known=KNOWN)
    for name in shm:
        if shm[name].status != "pass" or gloo[name].status != "pass":
            console.print(f"{name}: gloo {_said(gloo[name])}; shm {_said(shm[name])}", markup=False, highlight=False)
            if verbose:
                for rank, trace in shm[name].tracebacks.items():
                    console.print(f"-- rank {rank} --\n{trace}", markup=False, highlight=False)
    for name in verdict.stale:
        console.print(f"passes, take it off the list of known differences: {name}", markup=False)
    if only is None:
        PAGE.write_text(page(tests=tests, gloo=gloo, shm=shm), encoding="utf-8")
        console.print(f"wrote {PAGE}")
    console.print(_summary(gloo=gloo, shm=shm), highlight=False)
    console.print(f"{len(verdict.failed)} that gloo passes and shm does not", highlight=False)
    return verdict.exit_code


def _load() -> ModuleType:
    # Some decorators look at the number of ranks when the suite is imported: enough for all of them.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(MANY_RANKS), INIT_METHOD="env://", MASTER_PORT="29555")
    warnings.simplefilter("ignore")  # what torch's suite warns about on import says nothing about us
    suite = importlib.import_module(SUITE)
    warnings.resetwarnings()
    return suite


def _become_shm(suite: ModuleType) -> None:
    import paceline  # noqa: F401  registers the backend
    from paceline.transport.shm import kernel

    reason = kernel.reason_unavailable()
    if reason is not None:
        # It would fall back to gloo, and the second column would be the first.
        raise SystemExit(f"no shared-memory transport here: {reason}")
    # It is not added to PROFILING_SUPPORTED_BACKENDS. For those the suite wants each event to end on another thread
    # than it began on, and a synchronous call here runs where it is made. Names and shapes of the events are checked
    # by tests/transport/cases/profiled.py, for gloo and shm alike.
    suite.BACKEND = "shm"


def _select() -> list[Selected]:
    about_ddp = {test.name for test in select_tests()}
    common = importlib.import_module("torch.testing._internal.common_distributed")
    skips = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
    _, methods = read_suite()
    tests = [node for name, node in methods.items() if name.startswith("test_") and name not in about_ddp]
    return [Selected(node.name, ranks_needed(node, _RANKS_OF_DECORATORS, least=RANKS), skips) for node in tests]


def _measure(title: str, tests: list[Selected], suite: ModuleType, *, timeout_s: float, console: Console) -> Column:
    options = {"timeout_s": timeout_s, "console": console, "backend": title}
    return column.measure(f"collectives-{title}", tests, suite, **options, forget_logs_of=("pass", "skip"))


def _said(outcome: Outcome) -> str:
    return f"{outcome.status} {outcome.reason[:300]}".strip()


def _summary(*, gloo: dict[str, Outcome], shm: dict[str, Outcome]) -> str:
    ran = list(shm)
    passes = {
        title: sum(column[name].status == "pass" for name in ran) for title, column in (("gloo", gloo), ("shm", shm))
    }
    return (
        f"of {len(gloo)} tests {len(ran)} are written for the CPU and gloo: "
        f"gloo passes {passes['gloo']}, shm passes {passes['shm']}"
    )


def page(*, tests: list[Selected], gloo: dict[str, Outcome], shm: dict[str, Outcome]) -> str:
    """The page for docs/: what passes, what does not and why, what is not for this machine."""
    torch = importlib.import_module("torch")
    ranks = {test.name: test.ranks for test in tests}
    lines = [
        "# torch's own collective tests, over gloo and over shm",
        "",
        "Written by `make conformance ARGS='--suite collectives'`; not to be edited.",
        "",
        f"The tests are those of `{SUITE}` as torch {torch.__version__.partition('+')[0]} ships them that do not use",
        "`DistributedDataParallel` (those have a run of their own: `make conformance`). None is edited. A test that",
        "asks for a GPU or another backend is skipped by itself and not counted. (The suite's look at profiler events",
        "is on for gloo only: it wants an event to end on another thread than it began on. Names and shapes are",
        "compared in `tests/transport/cases/profiled.py`.)",
        "",
        f"O{_summary(gloo=gloo, shm=shm)[1:]}.",
        "",
        "| test | ranks | gloo | shm |",
        "|---|---|---|---|",
    ]
    for name in shm:
        ours = shm[name]
        cell = f"differs: {KNOWN[name]}" if ours.status != "pass" and name in KNOWN else _cell(ours)
        lines.append(f"| `{name.removeprefix('test_')}` | {ranks[name]} | {_cell(gloo[name])} | {cell} |")
    reasons: dict[str, int] = {}
    for outcome in gloo.values():
        if outcome.status == "skip":
            reasons[outcome.reason] = reasons.get(outcome.reason, 0) + 1
    lines += ["", "## Not for this machine", "", "| what the test says | tests |", "|---|---|"]
    lines += [f"| {_plain(reason)} | {count} |" for reason, count in sorted(reasons.items(), key=lambda i: -i[1])]
    return "\n".join(lines) + "\n"


def _cell(outcome: Outcome) -> str:
    if outcome.status == "pass":
        return "pass"
    return f"**{outcome.status}**: {_plain(outcome.reason)[:160]}"


def _plain(text: str) -> str:
    """Without what differs between machines, and without what Markdown would take for a column."""
    text = re.sub(r"/\S*?/(?=[\w.-]+\.(?:py|cc|cpp|h)\b)", "", text)
    return " ".join(re.sub(r"0x[0-9a-f]+", "0x...", text).replace("|", "/").split())
