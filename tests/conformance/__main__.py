"""Run torch's own tests in two columns: DDP with torch's class and ours, or collectives over gloo and over shm."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from types import ModuleType

from rich.console import Console

from . import column, report
from .known import KNOWN
from .selection import select_tests


def main(argv: list[str] | None = None) -> int:
    """Both columns, the table, the exit code."""
    options = _parse(argv)
    _set_environment()
    if options.suite == "collectives":
        from . import collectives

        return collectives.main(only=options.only, timeout_s=options.timeout, verbose=options.verbose)
    console = Console(width=None if sys.stdout.isatty() else 200)
    tests = [test for test in select_tests() if test.is_asked_for(options.only)]
    if not tests:
        console.print(f"no test matches {options.only!r}")
        return 2
    suite = _load_suite(reload_midway=options.reload_midway)
    stock = ours = None
    if not options.ours_only:
        stock = column.measure("stock", tests, suite, timeout_s=options.timeout, console=console)
    if not options.stock_only:
        from .swap import use_ours

        use_ours(suite)
        ours = column.measure("ours", tests, suite, timeout_s=options.timeout, console=console)
    report.print_table(console, names=[t.name for t in tests], stock=stock, ours=ours, known=KNOWN)
    for title, outcomes in (("stock", stock), ("ours", ours)) if options.verbose else ():
        for name, outcome in (outcomes or {}).items():
            for rank, trace in outcome.tracebacks.items():
                console.rule(f"{title}: {name}, rank {rank}")
                console.print(trace, markup=False, highlight=False)
    if ours is None:
        passing = sum(outcome.status == "pass" for outcome in (stock or {}).values())
        console.print(f"stock: {passing} of {len(tests)} pass")
        return 0
    verdict = report.compare(stock=stock, ours=ours, known=KNOWN)
    report.print_summary(console, verdict=verdict, stock=stock)
    return verdict.exit_code


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--suite",
        choices=("ddp", "collectives"),
        default="ddp",
        help="ddp: torch's class and ours (default); collectives: gloo and shm (writes docs/transport-conformance.md)",
    )
    parser.add_argument("--only", metavar="PATTERN", help="tests whose name contains or matches PATTERN")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ours-only", action="store_true", help="do not measure the column of torch's class")
    which.add_argument("--stock-only", action="store_true", help="do not measure the column of our class")
    parser.add_argument(
        "--reload-midway",
        action="store_true",
        help="the suite's file:// mode: its end-to-end tests also save and reload the model while training",
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="for one test; default 60")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the tracebacks as well")
    return parser.parse_args(argv)


def _set_environment() -> None:
    """Must run before torch is imported: a process that forks can't have thread pools."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    # One test still relies on what torch.load did by default before 2.6.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    # On a fresh machine one test would spend its minute on compiling all of torch's headers ahead.
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"


def _load_suite(*, reload_midway: bool) -> ModuleType:
    warnings.simplefilter("ignore")  # what torch's suite warns about on import says nothing about us
    from . import devices
    from .lifting import import_suite
    from .swap import use_stock

    devices.map_amp()
    suite = import_suite(reload_midway=reload_midway)
    devices.map_methods()
    devices.map_suite(suite)
    use_stock()
    warnings.resetwarnings()
    return suite


if __name__ == "__main__":
    sys.exit(main())
