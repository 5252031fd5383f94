"""When in backward each bucket left, by the clock: as values, and as a table."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.compiler.taps.graph_run import Announcement
from paceline.gradients.plan import MB
from paceline.reduction.reducer import Reducer

logger = logging.getLogger("paceline.compiler")
# The first step learns the order of gradients. The second is the first with the buckets that stay.
SETTLED_STEPS = 2


@dataclass(frozen=True)
class Departure:
    """A bucket, and when its collective started."""

    bucket: int
    size_bytes: int
    n_params: int
    fraction: float
    """How much of backward's time had passed: 0 at its start, 1 at its end or later."""


def departures(reducer: Reducer) -> tuple[Departure, ...]:
    """The departures of the last step."""
    times = reducer.telemetry.last
    duration_ns = max(1, times.backward_compute_ns)
    return tuple(
        Departure(
            spec.index,
            spec.size_bytes,
            len(spec.params),
            min(1.0, (at_ns - times.backward_start_ns) / duration_ns),
        )
        for spec, at_ns in zip(reducer.plan.buckets, times.launches_ns, strict=False)
    )


def table(left: Sequence[Departure]) -> list[str]:
    """The plan and the placement in lines of text."""
    lines = [f"{'bucket':>6} {'MB':>8} {'params':>6}  starts at"]
    for departure in left:
        at = f"{departure.fraction:.0%} of backward" if departure.fraction < 1 else "the end of backward"
        lines.append(f"{departure.bucket:>6} {departure.size_bytes / MB:>8.2f} {departure.n_params:>6}  {at}")
    total_bytes = sum(departure.size_bytes for departure in left)
    share = sum(departure.size_bytes for departure in left if departure.fraction < 1) / max(1, total_bytes)
    lines.append(f"{share:.0%} of {total_bytes / MB:.2f} MB starts before backward ends")
    return lines


_announced: weakref.WeakSet[Reducer] = weakref.WeakSet()


def announcement(reducers: Sequence[Reducer]) -> Announcement | None:
    """A function that logs the table of each reducer once, after the steps that its buckets need to settle."""
    if not logger.isEnabledFor(logging.INFO):
        return None
    waiting = [(weakref.ref(reducer), reducer.telemetry.steps + SETTLED_STEPS) for reducer in reducers]

    def announce() -> bool:
        for pair in list(waiting):
            reducer, due = pair[0](), pair[1]
            if reducer is None or reducer in _announced or reducer.telemetry.steps >= due:
                waiting.remove(pair)
            if reducer is not None and reducer not in _announced and reducer.telemetry.steps >= due:
                _announced.add(reducer)
                logger.info("Buckets of a compiled step:\n%s", "\n".join(table(departures(reducer))))
        return not waiting

    return announce
