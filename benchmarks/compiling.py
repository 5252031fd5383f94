"""Starting a compiled training: each rank compiles, or one does for all; and what an agreement costs in a step.

    python -m benchmarks.compiling                 # 2 ranks; writes benchmarks/results/compiling/
    python -m benchmarks.compiling --quick         # a smoke run

A start is the time from the first call to the end of the first backward, of the rank that takes longest, in processes
that have compiled nothing before. Caches are empty. Ranks have a cache each, as on different hosts, or share one,
as the ranks of a host do if nobody says otherwise: then Inductor itself keeps them from compiling a kernel twice.
Headers that Inductor has compiled are not part of its cache, and are there before.
Processor time is that of both ranks and of the compilers they started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import paceline
from paceline.compiler import agreement

from .command import Command, Found, Start
from .models import CASES
from .ranks import Emit
from .settings import Sent

MODES = ("each", "once")


@dataclasses.dataclass(frozen=True)
class Settings(Sent):
    """What a run was asked to do; and, for the ranks of one start, which one it is."""

    models: tuple[str, ...] = ("layers", "gpt")
    caches: tuple[str, ...] = ("own", "shared")
    layers: int = 4
    width: int = 64
    rounds: int = 3
    steps: int = 2000
    seed: int = 0
    world_size: int = 2
    threads: int = 1
    model: str = ""
    mode: str = ""
    folder: str = ""
    cache: str = ""


class Net(nn.Module):
    """Layers of different widths: no kernel is of use to another."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for n in range(settings.layers):
            inner = settings.width + 8 * n
            self.layers.append(
                nn.Sequential(
                    nn.Linear(settings.width, inner),
                    (nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus)[n % 4](),
                    nn.LayerNorm(inner),
                    nn.Linear(inner, settings.width),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


# --- what is measured --------------------------------------------------------------------------------------


def measure_start(settings: Settings, rank: int, emit: Emit) -> None:
    place = f"rank{rank}" if settings.cache == "own" else "all"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(settings.folder) / place)
    torch.manual_seed(settings.seed)
    case = CASES.get(settings.model)
    ddp = paceline.DDP(case.build() if case else Net(settings))
    compiled = paceline.compile(ddp, once=settings.mode == "once")
    batch = case.batch(torch.Generator().manual_seed(settings.seed)) if case else (torch.randn(8, settings.width),)
    loss = case.loss if case else lambda model, batch: model(*batch).square().sum()
    dist.barrier()
    start = time.perf_counter()
    loss(compiled, batch).backward()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    processor = torch.tensor(_used_s(), dtype=torch.float64)
    grads = torch.cat([param.grad.flatten() for param in ddp.parameters() if param.grad is not None])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    emit({"seconds": seconds.item(), "processor": processor.item(), "gradient": grads.norm().item()})


def _used_s() -> float:
    """The processor time of this process and of all it has started: compilers live on in a pool."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))
    ours, found = {os.getpid()}, set[int]()
    while ours:
        found |= ours
        ours = {number for number, parent in parents.items() if parent in ours}
    return sum(ticks[number] for number in found) / os.sysconf("SC_CLK_TCK")


def measure_steps(settings: Settings, rank: int, emit: Emit) -> None:
    """A compiled function that does next to nothing: what is left is what is done before it runs."""
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    x = torch.zeros(4)
    found: dict[str, list[float]] = {"without": [], "with": []}
    for index in range(2 * settings.rounds + 2):
        mode = "with" if index % 2 else "without"
        with agreement(True) if mode == "with" else contextlib.nullcontext():
            compiled(x)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(settings.steps):
                compiled(x)
            taken = (time.perf_counter() - start) / settings.steps
        # The first of each compiles, and makes the group that ranks talk over.
        if index > 1:
            found[mode].append(1e6 * taken)
    emit({"guards_us": found})


# --- the command -------------------------------------------------------------------------------------------


def on_rank(settings: Settings, rank: int, emit: Emit) -> None:
    (measure_start if settings.mode else measure_steps)(settings, rank, emit)


def measure(settings: Settings, start: Start[Settings], console: Console) -> Found:
    kinds = list(itertools.product(settings.models, settings.caches))
    found: Found = {f"{model}, {cache}, {mode}": [] for model, cache in kinds for mode in MODES}
    for index in range(settings.rounds):
        for model, cache in kinds:
            modes = list(MODES)
            random.Random(f"{settings.seed}/{index}/{model}/{cache}").shuffle(modes)
            for mode in modes:
                with tempfile.TemporaryDirectory() as folder:
                    one = dataclasses.replace(settings, model=model, mode=mode, cache=cache, folder=folder)
                    start(one, found[f"{model}, {cache}, {mode}"].append)
    start(settings, found.update)
    return found


def show(found: Found, settings: Settings, console: Console) -> None:
    table = Table(title="From the first call to the end of the first backward: 2 ranks")
    for heading in ("model", "caches", "metric"):
        table.add_column(heading, no_wrap=True)
    for heading in ("each compiles, s", "one compiles, s", "times faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model, cache in itertools.product(settings.models, settings.caches):
        title = CASES[model].title if model in CASES else f"{settings.layers} {model}"
        for metric in ("seconds", "processor"):
            each, once = ([event[metric] for event in found[f"{model}, {cache}, {mode}"]] for mode in MODES)
            # It is the median of the ratios within rounds, so that a slow spell of the machine falls on both.
            ratio = statistics.median(a / b for a, b in zip(each, once, strict=True))
            middle = (f"{statistics.median(values):.1f}" for values in (each, once))
            table.add_row(title, cache, metric, *middle, f"{ratio:.2f}")
    console.print(table)
    without, with_ = (statistics.median(found["guards_us"][mode]) for mode in ("without", "with"))
    console.print(f"A call of compiled code: {without:.0f} us; in an agreement: {with_:.0f} us.")


COMMAND = Command(
    name="compiling",
    about="Compiling on one rank or on each.",
    settings=Settings(),
    quick={"models": ("layers",), "caches": ("own",), "layers": 1, "rounds": 1, "steps": 50},
    options=("layers", "rounds"),
    on_rank=on_rank,
    measure=measure,
    show=show,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
