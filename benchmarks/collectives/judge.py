"""Samples -> medians, paired ratios and the goals they are held against."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..stats import Ratio, paired_ratio
from .settings import MB, size_name

JUDGED = "shm-zero-copy"
"""What gradients use. Ordinary tensors are copied once more and are judged against gloo alone."""
OF_LIMIT = 0.8
"""Of the limit's speed, at least, where moving bytes is the work: see [Note: latency]."""
FROM_BYTES = 1 * MB
TIMES_GLOO = {
    2: {4 << 10: 50.0, 1 * MB: 10.0, 26_000_000: 5.0, 67_000_000: 4.0},
    4: None,
}
"""By ranks and bytes; None: three times at every size."""
CROWDED = 3.0

# [Note: latency] Summing 4 KB takes a fraction of a microsecond when nobody waits, and one rank cannot even learn of
# the other's arrival in that time: the share of the limit is shown at every size and judged from 1 MB on.


@dataclasses.dataclass(frozen=True)
class Curve:
    """One size: the n-th values of all methods were taken in the same round."""

    nbytes: int
    seconds: dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Point:
    """One method at one size."""

    ranks: int
    nbytes: int
    method: str
    median_s: float
    quartiles_s: tuple[float, float]
    samples: int
    times_gloo: Ratio | None
    """How many times as fast as gloo."""
    of_limit: Ratio | None
    """Which part of the limit's speed."""
    goal_gloo: float | None
    goal_limit: float | None
    verdict: str
    """met or missed by the whole interval, unclear if a goal lies inside one; empty without a goal."""

    @property
    def gigabytes_a_second(self) -> float:
        return self.nbytes / self.median_s / 1e9


def points(curve: Curve, ranks: int) -> list[Point]:
    result = []
    for method, seconds in curve.seconds.items():
        times_gloo = _speed(curve, "gloo", seconds) if method != "gloo" else None
        of_limit = _speed(curve, "limit", seconds) if method != "limit" else None
        goal_gloo = _goal_gloo(ranks, curve.nbytes) if method.startswith("shm") and times_gloo else None
        limited = method == JUDGED and ranks == 2 and curve.nbytes >= FROM_BYTES
        goal_limit = OF_LIMIT if limited and of_limit else None
        low, high = np.quantile(seconds, [0.25, 0.75])
        result.append(
            Point(
                ranks=ranks,
                nbytes=curve.nbytes,
                method=method,
                median_s=float(np.median(seconds)),
                quartiles_s=(float(low), float(high)),
                samples=len(seconds),
                times_gloo=times_gloo,
                of_limit=of_limit,
                goal_gloo=goal_gloo,
                goal_limit=goal_limit,
                verdict=_worst([verdict(times_gloo, goal_gloo), verdict(of_limit, goal_limit)]),
            )
        )
    return result


def _goal_gloo(ranks: int, nbytes: int) -> float | None:
    goals = TIMES_GLOO.get(ranks, {})
    return CROWDED if goals is None else goals.get(nbytes)


def _speed(curve: Curve, base: str, seconds: Sequence[float]) -> Ratio | None:
    return paired_ratio(curve.seconds[base], seconds) if base in curve.seconds else None


def verdict(ratio: Ratio | None, goal: float | None) -> str:
    """Against the least a ratio may be."""
    if ratio is None or goal is None:
        return ""
    # The judgement is as precise as what is printed.
    low, high = round(ratio.low, 3), round(ratio.high, 3)
    if low >= goal:
        return "met"
    return "missed" if high < goal else "unclear"


def _worst(verdicts: list[str]) -> str:
    return next((word for word in ("missed", "unclear", "met") if word in verdicts), "")


def sentences(found: list[Point]) -> list[str]:
    """The goals one by one, as plain text."""
    lines = []
    for point in found:
        where = f"{point.ranks} ranks, {size_name(point.nbytes)}, {point.method}"
        for ratio, goal, unit in (
            (point.times_gloo, point.goal_gloo, "x gloo"),
            (point.of_limit, point.goal_limit, "of the limit"),
        ):
            if ratio is not None and goal is not None:
                lines.append(
                    f"{verdict(ratio, goal):7} {where}: {ratio.value:.3g} [{ratio.low:.3g}, {ratio.high:.3g}] {unit},"
                    f" at least {goal:g} wanted"
                )
    return lines
