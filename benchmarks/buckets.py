"""Compiled training against the bucket size: graphs, compile time, step time, overlap. torch's class and ours.

    python -m benchmarks.buckets            # 2 ranks; writes benchmarks/results/buckets/
    python -m benchmarks.buckets --quick    # a smoke run

The model is deep and plain: residual layers of one size. Each class is wrapped and compiled with inductor anew for each
bucket size, with empty caches, several times in turns; then both take steps in turns. See [Note: why ratios].
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import paceline

from .command import Command, Found, Start
from .ranks import Emit
from .settings import Sent
from .stats import paired_ratio

TITLES = {"torch": "torch DDP, views", "paceline": "Paceline, views"}
COLOURS = {"torch": "#d9772b", "paceline": "#1d5fa8"}
MOMENT = 0.9
"""Of backward: how many bytes have started to move by then is what overlap means here."""


@dataclasses.dataclass(frozen=True)
class Settings(Sent):
    """What a run was asked to do."""

    # torch's class fails below 1 MB, and so does what is compiled after that: the smallest comes last.
    sizes_mb: tuple[float, ...] = (64, 25, 4, 1, 0.5)
    layers: int = 48
    width: int = 1024
    rows: int = 64
    compilations: int = 3
    """Of each class at each size; all but the last are thrown away."""
    rounds: int = 5
    steps: int = 2
    seed: int = 0
    world_size: int = 2
    threads: int = 1


# --- what is measured --------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Deep(nn.Module):
    """Not a bare Sequential: torch's class splits no graph of one, as Dynamo captures its layers one by one."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Trainer:
    """One class at one bucket size."""

    def __init__(self, mode: str, size_mb: float, settings: Settings, rank: int) -> None:
        torch.manual_seed(settings.seed)
        net = Deep(settings.layers, settings.width)
        wrap = nn.parallel.DistributedDataParallel if mode == "torch" else paceline.DistributedDataParallel
        self.ddp = wrap(net, bucket_cap_mb=size_mb, gradient_as_bucket_view=True)
        self.forward = torch.compile(self.ddp)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(settings.seed + 1 + rank)
        self.batch = torch.randn(settings.rows, settings.width, generator=generator)

    def step(self) -> float:
        """Take one, and tell when its backward began."""
        loss = self.forward(self.batch).square().mean()
        start = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return start

    def compile(self) -> tuple[float, int]:
        """Take the first step, with nothing in any cache: how long it took, and the number of graphs."""
        counters.clear()
        with fresh_cache():
            start = time.perf_counter()
            self.step()
            taken_s = time.perf_counter() - start
        # Each graph that goes to the backend passes through AOTAutograd once.
        return taken_s, counters["aot_autograd"]["total"]

    def started(self, steps: int) -> float:
        """The part of all bytes that has started to move at MOMENT of a backward, by the clock."""
        launches: list[tuple[float, int]] = []

        # The hook has no annotations, because torch compares them with its own class of buckets.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            launches.append((time.perf_counter(), bucket.buffer().nbytes))
            work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        self.ddp.register_comm_hook(None, hook)
        shares = []
        for _ in range(steps):
            launches.clear()
            start = self.step()
            # The last bucket leaves with the last gradient.
            duration = launches[-1][0] - start
            early = sum(nbytes for at, nbytes in launches if at - start <= MOMENT * duration)
            shares.append(early / sum(nbytes for _, nbytes in launches))
        return statistics.median(shares)


def measure_size(size_mb: float, settings: Settings, rank: int) -> dict[str, Any]:
    trainers: dict[str, Trainer] = {}
    found: dict[str, Any] = {"size_mb": size_mb} | {mode: {"compile_s": []} for mode in TITLES}
    for index in range(settings.compilations):
        # There is no reset between the two modes, because the steps below are taken by what was compiled last.
        torch.compiler.reset()
        if any("error" in found[mode] for mode in TITLES):
            break  # what is compiled after a failure of torch's class may fail for that
        for mode in sorted(TITLES, reverse=index % 2 == 1):
            dist.barrier()
            trainer = Trainer(mode, size_mb, settings, rank)
            try:
                taken_s, found[mode]["graphs"] = trainer.compile()
                trainer.step()
            except Exception as error:
                # The same on every rank: nothing has been communicated yet.
                found[mode] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
                trainers.pop(mode, None)
                continue
            found[mode]["compile_s"].append(taken_s)
            trainers[mode] = trainer
    seconds: dict[str, list[float]] = {mode: [] for mode in trainers}
    for index in range(settings.rounds):
        order = list(trainers)
        random.Random(f"{settings.seed}/{index}").shuffle(order)
        for mode in order:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(settings.steps):
                trainers[mode].step()
            taken = torch.tensor([(time.perf_counter() - start) / settings.steps], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[mode].append(taken.item())
    for mode, trainer in trainers.items():
        found[mode] |= {"step_s": seconds[mode], "started": trainer.started(1 + 2 * settings.steps)}
    return found


# --- the command -------------------------------------------------------------------------------------------


def on_rank(settings: Settings, rank: int, emit: Emit) -> None:
    # Once for what the compiler imports and builds on first use; else it counts for whoever comes first.
    Trainer("paceline", 1, dataclasses.replace(settings, layers=1, width=8), rank).compile()
    for size_mb in settings.sizes_mb:
        emit(measure_size(size_mb, settings, rank))


def measure(settings: Settings, start: Start[Settings], console: Console) -> Found:
    found: list[Found] = []

    def on_event(event: Found) -> None:
        found.append(event)
        console.print(f"{event['size_mb']} MB measured", markup=False)

    start(settings, on_event)
    return {"sizes": sorted(found, key=lambda size: size["size_mb"])}


def show(found: Found, settings: Settings, console: Console) -> None:
    table = Table(title="Compiled training by bucket size, 2 ranks over gloo, inductor, empty caches")
    for heading in (
        "bucket",
        "class",
        "graphs",
        "compile s",
        "step ms",
        "to torch",
        "95 %",
        f"started at {MOMENT:.0%}",
    ):
        table.add_column(heading, justify="left" if heading == "class" else "right", no_wrap=True)
    for size in found["sizes"]:
        for mode, title in TITLES.items():
            cells = size[mode]
            if "error" in cells:
                table.add_row(f"{size['size_mb']:g} MB", title, "fails")
                console.print(f"{title} at {size['size_mb']:g} MB: {cells['error']}", markup=False)
                continue
            base = size["torch"].get("step_s")
            ratio = paired_ratio(cells["step_s"], base) if base and mode != "torch" else None
            table.add_row(
                f"{size['size_mb']:g} MB",
                title,
                str(cells["graphs"]),
                f"{statistics.median(cells['compile_s']):.1f}",
                f"{1000 * statistics.median(cells['step_s']):.0f}",
                f"{ratio.value:.3f}" if ratio else "",
                f"{ratio.low:.3f} - {ratio.high:.3f}" if ratio else "",
                f"{cells['started']:.0%}",
            )
    console.print(table)


PANELS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    ("graphs", lambda cells: cells["graphs"]),
    ("seconds to compile", lambda cells: statistics.median(cells["compile_s"])),
    ("step, ms", lambda cells: 1000 * statistics.median(cells["step_s"])),
    (f"% of bytes started at {MOMENT:.0%} of backward", lambda cells: 100 * cells["started"]),
)


def save_picture(found: Found, settings: Settings, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, len(PANELS), figsize=(15, 3.8), layout="constrained")
    sizes = found["sizes"]
    sizes_mb = [size["size_mb"] for size in sizes]
    for axes, (title, value) in zip(grid, PANELS, strict=True):
        for mode, label in TITLES.items():
            points = [(size["size_mb"], value(size[mode])) for size in sizes if "error" not in size[mode]]
            axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[mode], label=label)
            for size in sizes:
                if "error" in size[mode]:
                    axes.plot(size["size_mb"], 0, "x", color=COLOURS[mode], markersize=9, clip_on=False, zorder=5)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes_mb, [f"{size_mb:g}" for size_mb in sizes_mb])
        axes.set_xlabel("bucket size, MB")
        axes.set_ylim(bottom=0)
        axes.grid(color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    millions = settings.layers * settings.width * (settings.width + 1) / 1e6
    model = f"{settings.layers} layers, {millions:.0f} M parameters"
    setting = f"{settings.world_size} ranks x {settings.threads} thread, gloo, inductor, torch {torch.__version__}"
    figure.supxlabel(f"{model}; {setting}; x: fails", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


COMMAND = Command(
    name="buckets",
    about="Compiled training by bucket size.",
    settings=Settings(),
    quick={"sizes_mb": (0.02,), "layers": 3, "width": 64, "compilations": 1, "rounds": 1, "steps": 1},
    options=("rounds", "compilations"),
    on_rank=on_rank,
    measure=measure,
    show=show,
    picture=save_picture,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
