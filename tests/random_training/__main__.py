"""Random training programs, with the wrapper and without one.

python -m tests.random_training --programs 20000      the soak
python -m tests.random_training --seed 1234           one program again, printed, and cut down if it fails
python -m tests.random_training --listing FILE        a program that was printed, perhaps changed by hand
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paceline.testing import RankPool

from .generate import generate
from .program import Program, parse
from .session import Session


def main(argv: list[str] | None = None) -> int:
    """Run programs and print the counts by outcome; each failure as its smallest program."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.random_training", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=200, metavar="N", help="how many; default 200")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="seed of the first; default 0")
    parser.add_argument("--seed", type=int, help="only this program")
    parser.add_argument("--listing", type=Path, help="only the program in this file")
    parser.add_argument("--shrink", type=int, default=10, metavar="N", help="cut down so many failures; default 10")
    options = parser.parse_args(argv)
    started = time.monotonic()
    with RankPool(preload=("tests.preloaded",)) as pool:
        session = Session(pool)
        if options.seed is not None or options.listing is not None:
            program = generate(options.seed) if options.listing is None else parse(options.listing.read_text())
            return _show(session, program)
        programs = (generate(seed) for seed in range(options.start, options.start + options.programs))
        failed = 0
        for program, outcome in session.outcomes(programs):
            if not outcome.failed:
                continue
            failed += 1
            print(f"\n== {outcome.kind}: {outcome.cause} (python -m tests.random_training --seed {program.seed})")
            small = session.smallest(program, outcome) if failed <= options.shrink else program
            print(f"{small.listing()}\n{outcome.told}", flush=True)
    print(f"\n{options.programs} programs in {time.monotonic() - started:.0f} s")
    print(session.table())
    return 1 if failed else 0


def _show(session: Session, program: Program) -> int:
    print(program.listing())
    outcome = session.outcome(program)
    print(f"{outcome.kind}: {outcome.cause}\n{outcome.told}")
    if outcome.failed:
        small = session.smallest(program, outcome)
        print(f"the smallest program that fails so:\n{small.listing()}\n{session.outcome(small).told}")
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
