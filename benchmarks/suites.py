"""What is measured. A suite runs on every rank at once, and yields what rank 0 reports.

Every rank must call the same collectives in the same order, so a suite may branch on nothing that differs
between ranks.
"""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from .memory import Footprint, footprint, gradient_bytes
from .models import Case
from .modes import MODES, Job, Mode, Replica
from .ranks import Bench
from .stats import Check, Series

Result = Series | Check | str
"""A string is printed as it is."""


@dataclasses.dataclass(frozen=True)
class Suite:
    name: str
    title: str
    models: tuple[str, ...]
    """What it runs on unless --model says otherwise."""
    run: Callable[[Bench, Case], Iterator[Result]]
    default: bool = True


SUITES: dict[str, Suite] = {}


def register(suite: Suite) -> Suite:
    if suite.name in SUITES:
        raise ValueError(f"the suite {suite.name!r} is registered twice")
    SUITES[suite.name] = suite
    return suite


# --- step time -------------------------------------------------------------------------------------------


def _step(bench: Bench, case: Case) -> Iterator[Result]:
    job = bench.job(case)
    replicas, times, steps = _take_turns(bench, job, "step")
    # A step ends when its slowest rank ends.
    values = {
        name: [statistics.median(map(max, zip(*ranks, strict=True))) for ranks in zip(*of_rank, strict=True)]
        for name, of_rank in times.items()
    }
    yield Series("step", case.name, "step", "s", values, goal=1.0)
    synchronised = {mode.name: replicas[mode.name] for mode in bench.modes if mode.synchronised}
    yield from _compare(bench, case, "step", synchronised, steps)


def _alone(bench: Bench, case: Case) -> Iterator[Result]:
    job = bench.job(case, alone=True)
    replicas, times, steps = _take_turns(bench, job, "world1")
    # Ranks do not wait for each other here, so each gives samples of its own.
    values = {name: [statistics.median(turn) for turns in of_rank for turn in turns] for name, of_rank in times.items()}
    yield Series("world1", case.name, "step, world size 1", "s", values, goal=1.0)
    yield from _compare(bench, case, "world1", replicas, steps)


def _take_turns(
    bench: Bench, job: Job, label: str
) -> tuple[dict[str, Replica], dict[str, list[list[list[float]]]], int]:
    """Train all modes in turns. The times are indexed [mode][rank][round][step]."""
    replicas = {mode.name: mode.build(job) for mode in bench.modes}
    settings = bench.settings
    taken = dict.fromkeys(replicas, 0)
    times: dict[str, list[float]] = {name: [] for name in replicas}

    def turn(name: str, count: int) -> None:
        replica, seconds = replicas[name], times[name]
        bench.barrier()
        for index in range(taken[name], taken[name] + count):
            start = time.perf_counter()
            replica.step(index)
            seconds.append(time.perf_counter() - start)
        taken[name] += count

    for mode in bench.modes:
        turn(mode.name, settings.warmup)
    # The objects of the other modes' replicas must not slow this one's garbage collections.
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    for mode in bench.modes:
        turn(mode.name, settings.steps)
    rounds = bench.rounds(time.perf_counter() - start)
    for name in times:
        times[name].clear()
    for index in range(rounds):
        bench.progress(f"{label} {job.case.name}", index, rounds)
        for mode in bench.shuffled(index):
            turn(mode.name, settings.steps)
    gc.unfreeze()
    steps = next(iter(taken.values()))
    return replicas, {name: bench.gather(seconds, settings.steps) for name, seconds in times.items()}, steps


def _compare(bench: Bench, case: Case, suite: str, replicas: dict[str, Replica], steps: int) -> Iterator[Check]:
    """All replicas were trained on the same batches from the same weights: are they still the same?"""
    reference_name, *others = replicas
    reference = _state(replicas[reference_name])
    for name in others:
        state = _state(replicas[name])
        difference = max((float((a - b).abs().max()) for a, b in zip(state, reference, strict=True)), default=0.0)
        equal = all(torch.equal(a, b) for a, b in zip(state, reference, strict=True))
        weights = torch.cat([p.detach().flatten().double() for p in replicas[name].module.parameters()])
        first = weights.clone()
        dist.broadcast(first, 0)
        verdicts = bench.gather([difference, float(equal), float(torch.equal(weights, first))], 1)
        differences, equals, ranks_equal = zip(*([row[0] for row in rank] for rank in verdicts), strict=True)
        # Alone, each rank trains on its own batches: nothing is promised between ranks.
        yield Check(
            suite,
            case.name,
            name,
            reference_name,
            steps,
            max(differences),
            all(equals),
            all(ranks_equal) or suite == "world1",
        )


def _state(replica: Replica) -> list[torch.Tensor]:
    tensors = [*replica.module.parameters(), *replica.module.buffers()]
    return [tensor.detach().double() for tensor in tensors if tensor.numel()]


# --- wrapping --------------------------------------------------------------------------------------------


def _wrap(bench: Bench, case: Case) -> Iterator[Result]:
    job = bench.job(case)

    def trial(mode: Mode) -> list[float]:
        module = job.module()
        gc.collect()
        bench.barrier()
        start = time.perf_counter()
        wrapped = mode.wrap(job, module)
        wrap = time.perf_counter() - start
        replica = mode.trainer(job, wrapped)
        bench.barrier()
        marks = [time.perf_counter()]
        for index in range(2):
            replica.step(index)
            marks.append(time.perf_counter())
        first, second = marks[1] - marks[0], marks[2] - marks[1]
        return [wrap, first, wrap + first, second]

    start = time.perf_counter()
    for mode in bench.modes:
        trial(mode)  # once for whatever is imported or connected on first use
    rounds = bench.rounds(time.perf_counter() - start)
    samples: dict[str, list[float]] = {mode.name: [] for mode in bench.modes}
    for index in range(rounds):
        bench.progress(f"wrap {case.name}", index, rounds)
        for mode in bench.shuffled(index):
            samples[mode.name] += trial(mode)
    metrics = ("wrap", "first step", "wrap + first step", "second step")
    times = {name: bench.gather(values, len(metrics)) for name, values in samples.items()}
    for column, metric in enumerate(metrics):
        values = {
            mode.name: [max(row[column] for row in ranks) for ranks in zip(*times[mode.name], strict=True)]
            for mode in bench.modes
            if mode.synchronised or "wrap" not in metric
        }
        yield Series("wrap", case.name, metric, "s", values, goal=1.0 if column == 2 else None)


# --- memory ----------------------------------------------------------------------------------------------

MEMORY_TRIALS = 3


def _memory(bench: Bench, case: Case) -> Iterator[Result]:
    job = bench.job(case)
    gradients = gradient_bytes(job.module())

    def measure(mode: Mode) -> Footprint:
        module = job.module()
        return footprint(lambda: mode.trainer(job, mode.wrap(job, module)))

    trials = min(MEMORY_TRIALS, bench.settings.rounds or MEMORY_TRIALS)
    samples: dict[str, list[float]] = {mode.name: [] for mode in bench.modes}
    for index in range(trials):
        bench.progress(f"memory {case.name}", index, trials)
        local_peak = measure(MODES["local"]).peak_bytes
        for mode in bench.shuffled(index):
            bench.barrier()
            size = measure(mode)
            samples[mode.name] += [
                gradients + size.peak_bytes - local_peak,
                size.held_bytes,
                size.idle_bytes,
                -1.0 if size.resident_bytes is None else size.resident_bytes,
            ]
    metrics = ("gradients at peak", "gradients + buckets", "after zero_grad", "resident growth")
    sizes = {name: bench.gather(values, len(metrics)) for name, values in samples.items()}
    for column, metric in enumerate(metrics):
        values = {
            name: [max(row[column] for row in ranks) for ranks in zip(*of_rank, strict=True)]
            for name, of_rank in sizes.items()
        }
        if min(map(min, values.values())) >= 0:
            yield Series("memory", case.name, metric, "bytes", values, goal=1.0 if column < 2 else None)


# --- where the time goes ---------------------------------------------------------------------------------


def _profile(bench: Bench, case: Case) -> Iterator[Result]:
    job = bench.job(case)
    steps = 10 * bench.settings.steps
    for mode in bench.modes:
        if mode.family in ("local", "torch"):
            continue
        replica = mode.build(job)
        for index in range(bench.settings.warmup):
            replica.step(index)
        bench.barrier()
        profiler = cProfile.Profile()
        # On every rank: a profiled rank is slower, and the others would only wait for it.
        profiler.enable()
        for index in range(steps):
            replica.step(index)
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(30)
        yield f"{mode.title}, {case.title}, {steps} steps of rank 0\n{text.getvalue()}"


ALL = ("gpt", "mlp", "resnet", "bert")

register(Suite("step", "Step time, 2 ranks over gloo", ALL, _step))
register(Suite("memory", "Gradient memory of a rank", ALL, _memory))
register(Suite("wrap", "Wrapping and the first steps", ("mlp",), _wrap))
register(Suite("world1", "Step time at world size 1", ("mlp", "gpt"), _alone))
register(Suite("profile", "Where the time goes (cProfile)", ("mlp",), _profile, default=False))
