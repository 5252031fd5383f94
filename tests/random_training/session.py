"""Many programs on one pair of live ranks: run, judged, counted, and shrunk where they fail."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice

from paceline.testing import RankPool

from .judge import Outcome, judge
from .program import Program
from .ranks import Around, run
from .reference import Result, expected
from .shrink import shrink

BATCH = 20


@dataclass
class Session:
    """Runs programs on a pool of ranks."""

    pool: RankPool
    around: Around = contextlib.nullcontext
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def outcomes(self, programs: Iterable[Program]) -> Iterator[tuple[Program, Outcome]]:
        """What became of each program, in some order."""
        left = iter(programs)
        while batch := list(islice(left, BATCH)):
            # Programs of one backend, in which no rank waits in vain, share a process group.
            ready = sorted(((program, expected(program)) for program in batch), key=lambda each: _group(*each))
            for (backend, refused), some in groupby(ready, key=lambda each: _group(*each)):
                del backend
                together = list(some)
                for each in [[one] for one in together] if refused else [together]:
                    for program, outcome in self._run(each, refused=refused):
                        self.counts[outcome.kind, outcome.cause] += 1
                        yield program, outcome

    def _run(self, batch: list[tuple[Program, list[Result]]], *, refused: bool) -> Iterator[tuple[Program, Outcome]]:
        valid = [(program, wanted) for program, wanted in batch if all(each.error is None for each in wanted)]
        for program, wanted in batch:
            if any(each.error is not None for each in wanted):
                yield program, judge(program, wanted, [])
        answers = run(self.pool, [program for program, _ in valid], refused=refused, around=self.around)
        for (program, wanted), ended in zip(valid, answers, strict=True):
            yield program, judge(program, wanted, ended)

    def outcome(self, program: Program) -> Outcome:
        """What becomes of one program, which is not counted."""
        wanted = expected(program)
        refused = any(each.mismatch for each in wanted)
        return next(self._run([(program, wanted)], refused=refused))[1]

    def smallest(self, program: Program, outcome: Outcome) -> Program:
        """The smallest program with a failure of the same kind and cause."""

        def fails(smaller: Program) -> bool:
            found = self.outcome(smaller)
            return (found.kind, found.cause) == (outcome.kind, outcome.cause)

        return shrink(program, fails)

    def table(self) -> str:
        """The counts by outcome."""
        rows = sorted(self.counts.items(), key=lambda row: (row[0][0], -row[1]))
        return "\n".join(f"{count:7}  {kind}{f': {cause}' if cause else ''}" for (kind, cause), count in rows)


def _group(program: Program, wanted: list[Result]) -> tuple[str, bool]:
    return program.backend, any(each.mismatch for each in wanted)
