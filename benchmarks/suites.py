"""What is measured. A suite runs on every rank at once, and yields what rank 0 reports.

Every rank must call the same collectives in the same order, so a suite may branch on nothing that differs
between ranks.
"""

from __future__ import annotations

import contextlib
import cProfile
import dataclasses
import gc
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from .memory import footprint, gradient_bytes, resident_growth
from .models import Case
from .modes import COMPILED, MODES, USUAL, Job, Mode, Replica
from .ranks import Bench
from .stats import Check, Series, largest

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
    modes: tuple[str, ...] = USUAL
    """What it compares unless --mode says otherwise."""
    goals: Mapping[str, tuple[tuple[str, str, float], ...]] = dataclasses.field(default_factory=dict)
    """By model, the goals that are not about the better torch mode. Each has a mode, the mode that it is compared with,
    and the largest ratio of their step times that meets the goal."""
    once: bool = False
    """Its figures do not depend on where memory lies: one launch of the ranks is enough."""


SUITES: dict[str, Suite] = {}


def register(suite: Suite) -> Suite:
    if suite.name in SUITES:
        raise ValueError(f"the suite {suite.name!r} is registered twice")
    SUITES[suite.name] = suite
    return suite


# --- step time -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Clock:
    """Seconds on the wall, and seconds of processor time of all threads of this process.

    On a crowded machine the second is the steadier one: it leaves out what others took, but also waiting.
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def lap(self) -> Iterator[None]:
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self.processor.append(time.process_time() - processor)
        self.wall.append(time.perf_counter() - wall)


def _step(bench: Bench, case: Case, *, suite: str = "step", step_goal: float | None = 1.0) -> Iterator[Result]:
    replicas, clocks, steps = _take_turns(bench, bench.job(case), suite)
    width = bench.settings.steps
    for metric, part, goal in (("step", "wall", step_goal), ("step, CPU time", "processor", None)):
        values = {}
        for name, clock in clocks.items():
            everybody = bench.gather(getattr(clock, part), width)
            # A step ends when its slowest rank ends; a turn counts as the median of its steps.
            values[name] = [
                statistics.median(map(max, zip(*turn, strict=True))) for turn in zip(*everybody, strict=True)
            ]
        yield Series(suite, case.name, metric, "s", values, goal=goal, pictured=part == "wall")
    synchronised = {mode.name: replicas[mode.name] for mode in bench.modes if mode.synchronised}
    yield from _compare(bench, case, suite, synchronised, steps)


def _alone(bench: Bench, case: Case) -> Iterator[Result]:
    replicas, clocks, steps = _take_turns(bench, bench.job(case, alone=True), "world1")
    width = bench.settings.steps
    for metric, part, goal in (
        ("step, world size 1", "wall", 1.0),
        ("CPU time, world size 1", "processor", None),
    ):
        # Ranks do not wait for each other here, so each gives samples of its own.
        values = {
            name: [statistics.median(turn) for turns in bench.gather(getattr(clock, part), width) for turn in turns]
            for name, clock in clocks.items()
        }
        yield Series("world1", case.name, metric, "s", values, goal=goal, pictured=goal is not None)
    yield from _compare(bench, case, "world1", replicas, steps)


def _take_turns(bench: Bench, job: Job, label: str) -> tuple[dict[str, Replica], dict[str, Clock], int]:
    """Train all modes in turns; give the replicas, a clock of each with a lap a step, and the steps taken."""
    built = {mode.name: mode.build(job) for mode in bench.shuffled(-1)}
    replicas = {mode.name: built[mode.name] for mode in bench.modes}
    settings = bench.settings
    taken = dict.fromkeys(replicas, 0)

    def turn(name: str, count: int, clock: Clock) -> None:
        replica = replicas[name]
        bench.barrier()
        for index in range(taken[name], taken[name] + count):
            with clock.lap():
                replica.step(index)
        taken[name] += count

    for mode in bench.modes:
        turn(mode.name, settings.warmup, Clock())
    # The objects of the other modes' replicas must not slow this one's garbage collections.
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    for mode in bench.modes:
        turn(mode.name, settings.steps, Clock())
    rounds = bench.rounds(time.perf_counter() - start)
    clocks = {name: Clock() for name in replicas}
    for index in range(rounds):
        bench.progress(f"{label} {job.case.name}", index, rounds)
        for mode in bench.shuffled(index):
            turn(mode.name, settings.steps, clocks[mode.name])
    gc.unfreeze()
    return replicas, clocks, next(iter(taken.values()))


def _compare(bench: Bench, case: Case, suite: str, replicas: dict[str, Replica], steps: int) -> Iterator[Check]:
    """All replicas were trained on the same batches from the same weights: are they still the same?"""
    reference_name, *others = replicas
    reference = _state(replicas[reference_name])
    for name in others:
        state = _state(replicas[name])
        difference = largest(float((a - b).abs().max()) for a, b in zip(state, reference, strict=True))
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
            largest(differences),
            all(equals),
            all(ranks_equal) or suite == "world1",
        )


def _state(replica: Replica) -> list[torch.Tensor]:
    tensors = [*replica.module.parameters(), *replica.module.buffers()]
    return [tensor.detach().double() for tensor in tensors if tensor.numel()]


SHM_GOALS = {
    "gpt": (
        ("paceline-shm", "torch-views", 1 / 1.35),
        ("paceline-shm", "two-threads", 1.0),
        ("torch-shm", "torch-views", 1 / 1.2),
    ),
    "bert": (("paceline-shm", "torch-views", 1 / 1.15),),
}


def _shm(bench: Bench, case: Case) -> Iterator[Result]:
    return _step(bench, case, suite="shm", step_goal=None)


COMPILED_GOALS = {"gpt": (("paceline-compiled-shm", "torch-compiled", 1 / 1.35),)}
COMPILED_TOLERANCE = 1e-3


def _compile(bench: Bench, case: Case) -> Iterator[Result]:
    """Each mode has graphs of its own, with operations fused in its own way: weights are not equal to the bit."""
    modes = bench.modes
    if case.name not in COMPILED_GOALS:
        bench.modes = [mode for mode in modes if not mode.name.endswith("shm")]
    for result in _step(bench, case, suite="compile"):
        if isinstance(result, Check):
            yield dataclasses.replace(result, tolerance=COMPILED_TOLERANCE)
        else:
            yield result
    bench.modes = modes
    # The next model must not be counted as one more compilation of this one.
    torch.compiler.reset()


# --- wrapping --------------------------------------------------------------------------------------------


def _wrap(bench: Bench, case: Case) -> Iterator[Result]:
    job = bench.job(case)

    def trial(mode: Mode) -> list[float]:
        module = job.module()
        gc.collect()
        clock = Clock()
        bench.barrier()
        with clock.lap():
            wrapped = mode.wrap(job, module)
        replica = mode.trainer(job, wrapped)
        bench.barrier()
        for index in range(2):
            with clock.lap():
                replica.step(index)
        wrap, first, second = clock.wall
        return [wrap, first, wrap + first, second, sum(clock.processor[:2])]

    start = time.perf_counter()
    for mode in bench.modes:
        trial(mode)  # once for whatever is imported or connected on first use
    rounds = bench.rounds(time.perf_counter() - start)
    samples: dict[str, list[float]] = {mode.name: [] for mode in bench.modes}
    for index in range(rounds):
        bench.progress(f"wrap {case.name}", index, rounds)
        for mode in bench.shuffled(index):
            samples[mode.name] += trial(mode)
    metrics = ("wrap", "first step", "wrap + first step", "second step", "wrap + first, CPU time")
    times = {name: bench.gather(values, len(metrics)) for name, values in samples.items()}
    for column, metric in enumerate(metrics):
        values = {
            mode.name: [max(row[column] for row in ranks) for ranks in zip(*times[mode.name], strict=True)]
            for mode in bench.modes
            if mode.synchronised or "wrap" not in metric
        }
        goal = 1.0 if column == 2 else None
        yield Series("wrap", case.name, metric, "s", values, goal=goal, pictured="CPU" not in metric)


# --- memory ----------------------------------------------------------------------------------------------

MEMORY_TRIALS = 3


def _memory(bench: Bench, case: Case) -> Iterator[Result]:
    job = bench.job(case)
    gradients = gradient_bytes(job.module())

    def fresh(mode: Mode) -> Callable[[], Replica]:
        module = job.module()
        return lambda: mode.trainer(job, mode.wrap(job, module))

    footprint(fresh(MODES["local"]))  # once for what the kernels keep from their first call on
    trials = min(MEMORY_TRIALS, bench.settings.rounds or MEMORY_TRIALS)
    samples: dict[str, list[float]] = {mode.name: [] for mode in bench.modes}
    for index in range(trials):
        bench.progress(f"memory {case.name}", index, trials)
        local_peak = footprint(fresh(MODES["local"])).peak_bytes
        for mode in bench.shuffled(index):
            bench.barrier()
            size = footprint(fresh(mode))
            resident = resident_growth(fresh(mode))
            samples[mode.name] += [
                gradients + size.peak_bytes - local_peak,
                size.held_bytes,
                size.idle_bytes,
                -1.0 if resident is None else resident,
            ]
    metrics = ("gradients at peak", "gradients + buckets", "after zero_grad", "resident growth")
    sizes = {name: bench.gather(values, len(metrics)) for name, values in samples.items()}
    for column, metric in enumerate(metrics):
        # The least of all trials and ranks: see [Note: what is counted].
        values = {name: [min(row[column] for rows in of_rank for row in rows)] for name, of_rank in sizes.items()}
        if min(map(min, values.values())) >= 0:
            # The first two are what a user feels; the others help to explain them.
            asked = column < 2
            goal = 1.0 if asked else None
            yield Series("memory", case.name, metric, "bytes", values, goal=goal, pictured=asked)


# --- where the time goes ---------------------------------------------------------------------------------


def _profile(bench: Bench, case: Case) -> Iterator[Result]:
    """Every rank is profiled: a profiled rank is slower, and the others would only wait for it."""
    job = bench.job(case)
    steps = 10 * bench.settings.steps
    for mode in bench.modes:
        if mode.family in ("local", "torch"):
            continue
        mode.build(job).step(0)  # what is imported or connected on first use is not of interest
        start, settled = cProfile.Profile(), cProfile.Profile()
        for _ in range(5):
            module = job.module()
            bench.barrier()
            start.enable()
            wrapped = mode.wrap(job, module)
            start.disable()
            replica = mode.trainer(job, wrapped)
            start.runcall(replica.step, 0)
        for index in range(bench.settings.warmup):
            replica.step(index)
        for index in range(steps):
            settled.runcall(replica.step, index)
        for profiler, what in ((start, "5 times wrap and first step"), (settled, f"{steps} steps")):
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(30)
            yield f"{mode.title}, {case.title}, rank 0, {what}\n{text.getvalue().strip()}\n"


ALL = ("gpt", "mlp", "resnet", "bert")

register(Suite("step", "Step time, 2 ranks over gloo", ALL, _step))
register(Suite("memory", "Gradient memory of a rank", ALL, _memory, once=True))
register(Suite("wrap", "Wrapping and the first steps", ("mlp",), _wrap))
register(Suite("world1", "Step time at world size 1", ("mlp", "gpt"), _alone))
register(
    Suite(
        "shm",
        "Step time, 2 ranks through shared memory",
        ("gpt", "bert"),
        _shm,
        default=False,
        modes=("local", "torch-views", "torch-shm", "paceline-shm", "two-threads"),
        goals=SHM_GOALS,
    )
)
register(
    Suite(
        "compile",
        "Compiled step time, inductor, 2 ranks",
        ALL,
        _compile,
        default=False,
        modes=COMPILED,
        goals=COMPILED_GOALS,
    )
)
register(Suite("profile", "Where the time goes (cProfile)", ("mlp",), _profile, default=False, once=True))
