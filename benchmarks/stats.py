"""Samples -> medians, paired ratios, and how far they can be trusted. See [Note: why ratios].

[Note: why launches]
Two replicas of the same mode in one process differ by up to 5% for as long as it lives: where their memory lies makes
the difference, and no number of rounds averages that out. So ranks are started several times, build the modes in
another order each time, and intervals are made by drawing launches first and rounds of those second. (With a few
launches such intervals are still narrower than they say.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from .modes import MODES

RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric of one model in every mode; the n-th values of all modes were taken in the same round."""

    suite: str
    model: str
    metric: str
    unit: str
    """s or bytes; lower is better."""
    values: dict[str, list[float]]
    goal: float | None = None
    """The most that a judged mode may be, as a multiple of the better torch mode."""
    pictured: bool = True
    launches: tuple[int, ...] = ()
    """How many of the values are of each launch, in order; empty if they are all of one."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.model, self.metric

    def followed_by(self, later: Series) -> Series:
        """The same with what a later launch found."""
        values = {mode: [*found, *later.values[mode]] for mode, found in self.values.items()}
        return dataclasses.replace(self, values=values, launches=(*self.sizes(), *later.sizes()))

    def sizes(self) -> tuple[int, ...]:
        return self.launches or (len(next(iter(self.values.values()))),)


@dataclasses.dataclass(frozen=True)
class Check:
    """Whether a mode's weights after a run are those of the reference mode."""

    suite: str
    model: str
    mode: str
    reference: str
    steps: int
    difference: float
    """Largest absolute difference of a parameter or buffer from the reference, over all ranks."""
    equal: bool
    """No bit differs from the reference, on any rank."""
    ranks_equal: bool
    """No parameter bit differs between ranks."""
    tolerance: float = 0.0
    """How large the difference may be: compilers round in their own ways."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.suite, self.model, self.mode

    @property
    def holds(self) -> bool:
        return self.ranks_equal and (self.equal or self.difference <= self.tolerance)

    def followed_by(self, later: Check) -> Check:
        """The same with what a later launch found: it holds if both do."""
        return dataclasses.replace(
            self,
            steps=min(self.steps, later.steps),
            difference=largest([self.difference, later.difference]),
            equal=self.equal and later.equal,
            ranks_equal=self.ranks_equal and later.ranks_equal,
        )


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median of paired ratios and the 95% bootstrap interval of that median."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One mode held against another one: for goals that are not about the better torch mode."""

    suite: str
    model: str
    mode: str
    reference: str
    ratio: Ratio | None
    goal: float
    """The most that the ratio may be."""
    word: str
    """As in a row's verdict."""


def largest(differences: Iterable[float]) -> float:
    """Not a number if one of them is not: a difference that cannot be told is no small one."""
    return float(np.max([0.0, *differences]))


def judge(series: Series, mode: str, reference: str, goal: float) -> Verdict | None:
    """Hold one mode against another; None where one of the two was not run."""
    if mode not in series.values or reference not in series.values:
        return None
    ratio = paired_ratio(series.values[mode], series.values[reference], series.sizes())
    return Verdict(series.suite, series.model, mode, reference, ratio, goal, _verdict(ratio, goal))


@dataclasses.dataclass(frozen=True)
class Row:
    suite: str
    model: str
    metric: str
    unit: str
    mode: str
    median: float
    quartiles: tuple[float, float]
    samples: int
    to_torch: Ratio | None
    """Against the better torch mode, which is `baseline`."""
    to_local: Ratio | None
    baseline: str | None
    goal: float | None
    verdict: str
    """met or missed by the whole interval, unclear if the goal lies inside it; empty without a goal."""


def paired_ratio(values: Sequence[float], base: Sequence[float], launches: Sequence[int] = ()) -> Ratio | None:
    """How `values` compare to `base`, round by round; None where the base is zero.

    ``launches`` is how many of them are of each launch. See [Note: why launches].
    """
    top, bottom = np.asarray(values, float), np.asarray(base, float)
    if top.shape != bottom.shape:
        raise ValueError(f"{top.size} samples can't be paired with {bottom.size}")
    if not bottom.all():
        return None
    ratios = top / bottom
    of_launch = np.split(ratios, np.cumsum(launches)[:-1]) if launches else [ratios]
    draw = np.random.default_rng(0)
    medians = []
    for _ in range(RESAMPLES):
        drawn = (of_launch[index] for index in draw.integers(len(of_launch), size=len(of_launch)))
        medians.append(np.median(np.concatenate([draw.choice(rounds, rounds.size) for rounds in drawn])))
    low, high = np.quantile(medians, [0.025, 0.975])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def rows(series: Series) -> list[Row]:
    """One row a mode, in the order of the registry."""
    names = [name for name in MODES if name in series.values]
    medians = {name: float(np.median(series.values[name])) for name in names}
    torch_modes = [name for name in names if MODES[name].family == "torch"]
    baseline = min(torch_modes, key=medians.__getitem__, default=None)
    local = next((name for name in names if MODES[name].family == "local"), None)
    result = []
    for name in names:
        values = series.values[name]
        low, high = np.quantile(values, [0.25, 0.75])
        to_torch = paired_ratio(values, series.values[baseline], series.sizes()) if baseline else None
        judged = MODES[name].family not in ("torch", "local")
        goal = series.goal if judged else None
        result.append(
            Row(
                suite=series.suite,
                model=series.model,
                metric=series.metric,
                unit=series.unit,
                mode=name,
                median=medians[name],
                quartiles=(float(low), float(high)),
                samples=len(values),
                to_torch=to_torch,
                to_local=paired_ratio(values, series.values[local], series.sizes()) if local else None,
                baseline=baseline,
                goal=goal,
                verdict=_verdict(to_torch, goal),
            )
        )
    return result


def _verdict(ratio: Ratio | None, goal: float | None) -> str:
    if ratio is None or goal is None:
        return ""
    # The judgement is as precise as what is printed: a few bytes of bookkeeping on top of 67 MB are not a miss.
    low, high = round(ratio.low, 3), round(ratio.high, 3)
    if high <= goal:
        return "met"
    return "missed" if low > goal else "unclear"
