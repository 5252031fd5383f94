"""Starting a compiled training: each rank compiles, or one does for all; and what an agreement costs in a step.

    python -m benchmarks.compiling                 # 2 ranks; writes runs/bench/compiling.json
    python -m benchmarks.compiling --quick         # a smoke run

A start is the time from the first call to the end of the first backward, of the rank that takes longest, in processes
that have compiled nothing before. Caches are empty. Ranks have a cache each, as on different hosts, or share one,
as the ranks of a host do if nobody says otherwise: then Inductor itself keeps them from compiling a kernel twice.
Processor time is that of both ranks and of the compilers they started.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import paceline
from paceline.compiler import agreement

from .launch import RankFailedError, run
from .ranks import Emit, joined

OUT = Path("runs") / "bench"
MODES = ("each", "once")
CACHES = ("own", "shared")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run was asked to do; and, for the ranks of one start, which one it is."""

    layers: int = 4
    width: int = 64
    rounds: int = 3
    steps: int = 2000
    seed: int = 0
    world_size: int = 2
    threads: int = 1
    mode: str = ""
    folder: str = ""
    cache: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


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
    ddp = paceline.DDP(Net(settings))
    compiled = paceline.compile(ddp, once=settings.mode == "once")
    inputs = torch.randn(8, settings.width)
    dist.barrier()
    start = time.perf_counter()
    compiled(inputs).square().sum().backward()
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


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.compiling", description="Compiling on one rank or on each.")
    parser.add_argument("--layers", type=int, default=Settings.layers)
    parser.add_argument("--rounds", type=int, default=Settings.rounds)
    parser.add_argument("--quick", action="store_true", help="a smoke run: one layer, one round")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for compiling.json (default {OUT.as_posix()})")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    settings = Settings(layers=chosen.layers, rounds=chosen.rounds)
    if chosen.quick:
        settings = dataclasses.replace(settings, layers=1, rounds=1, steps=50)
    console = Console(width=120 if not sys.stdout.isatty() else None, highlight=False)
    found: dict[str, Any] = {f"{mode}, {cache}": [] for cache in CACHES for mode in MODES}
    try:
        for index in range(settings.rounds):
            for cache in CACHES:
                modes = list(MODES)
                random.Random(f"{settings.seed}/{index}/{cache}").shuffle(modes)
                for mode in modes:
                    with tempfile.TemporaryDirectory() as folder:
                        start = dataclasses.replace(settings, mode=mode, cache=cache, folder=folder)
                        run(start, found[f"{mode}, {cache}"].append, program="benchmarks.compiling")
        steps: list[dict[str, Any]] = []
        run(settings, steps.append, program="benchmarks.compiling")
    except KeyboardInterrupt:
        console.print("stopped; the ranks are ended and nothing is saved", style="yellow")
        return 130
    except RankFailedError as error:
        console.print(f"{error}; nothing is saved", style="red")
        return 1
    found.update(steps[0])
    show(found, settings, console)
    chosen.out.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "paceline": paceline.__version__, **dataclasses.asdict(settings)}
    (chosen.out / "compiling.json").write_text(json.dumps({"about": about, **found}, indent=1), encoding="utf-8")
    return 0


def show(found: dict[str, Any], settings: Settings, console: Console) -> None:
    table = Table(title=f"From the first call to the end of the first backward: {settings.layers} layers, 2 ranks")
    for heading in ("caches", "metric", "each compiles, s", "one compiles, s", "times faster"):
        table.add_column(heading, justify="left" if heading in ("caches", "metric") else "right", no_wrap=True)
    for cache in CACHES:
        for metric in ("seconds", "processor"):
            each, once = ([event[metric] for event in found[f"{mode}, {cache}"]] for mode in MODES)
            # Of the rounds' own ratios, so that a slow spell of the machine falls on both.
            ratio = statistics.median(a / b for a, b in zip(each, once, strict=True))
            middle = (f"{statistics.median(values):.1f}" for values in (each, once))
            table.add_row(cache, metric, *middle, f"{ratio:.2f}")
    console.print(table)
    without, with_ = (statistics.median(found["guards_us"][mode]) for mode in ("without", "with"))
    console.print(f"A call of compiled code: {without:.0f} us; in an agreement: {with_:.0f} us.")


def _is_rank() -> bool:
    return len(sys.argv) == 6 and all(argument.isdigit() for argument in sys.argv[1:5])


if __name__ == "__main__":
    if not _is_rank():
        sys.exit(main())
    warnings.simplefilter("ignore")
    with joined() as (rank, text, emit):
        settings = Settings(**json.loads(text))
        (measure_start if settings.mode else measure_steps)(settings, rank, emit)
