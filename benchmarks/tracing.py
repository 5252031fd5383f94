"""A compiled training step with its collectives in the graph, against the same step with a graph break at each.

    python -m benchmarks.tracing                 # 2 ranks; writes benchmarks/results/tracing/
    python -m benchmarks.tracing --quick         # a smoke run

The step is a stack of layers that share statistics of their activations (a running mean, summed over the ranks while
the next product is computed; a scale that rank 0 decides on), then a backward and a sum of the gradients. Three modes
run it: not compiled; compiled with the collectives hidden from the compiler, which is what torch does by itself with
broadcast and asynchronous calls; compiled as one graph, with `import paceline`. All have the same weights and must
end with the same ones. See [Note: why ratios].
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .command import Command, Found, Start
from .ranks import Emit
from .settings import Sent
from .stats import paired_ratio

TITLES = {"eager": "not compiled", "breaks": "compiled, a break at each", "one graph": "compiled, one graph"}
REFERENCE = "breaks"


@dataclasses.dataclass(frozen=True)
class Settings(Sent):
    """What a run was asked to do."""

    layers: int = 12
    width: int = 128
    rows: int = 64
    rounds: int = 30
    steps: int = 5
    seed: int = 0
    world_size: int = 2
    threads: int = 1


# --- what is measured --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The calls of a step; hidden from the compiler or not."""

    begin_sum: Callable[[Tensor], Any]
    decide: Callable[[Tensor], None]
    wait: Callable[[Any], None]


def _begin_sum(tensor: Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def _decide(tensor: Tensor) -> None:
    dist.broadcast(tensor, 0)


def _wait(work: Any) -> None:
    work.wait()


TRACED = Collectives(_begin_sum, _decide, _wait)


def hidden() -> Collectives:
    calls = (torch.compiler.disable(call) for call in (_begin_sum, _decide, _wait))
    return Collectives(*calls)


class Layer(nn.Module):
    """A layer whose activations are centred by what all ranks have seen."""

    def __init__(self, settings: Settings, collectives: Collectives) -> None:
        super().__init__()
        self.linear = nn.Linear(settings.width, settings.width)
        self.collectives = collectives

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        work = self.collectives.begin_sum(mean)
        y = torch.tanh(self.linear(x))
        scale = 1 / (1 + y.detach().abs().mean())
        self.collectives.decide(scale)
        self.collectives.wait(work)
        return y * scale - mean / dist.get_world_size()


class Net(nn.Module):
    """A stack of such layers, and a loss."""

    def __init__(self, settings: Settings, layer: type[nn.Module], collectives: Collectives) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(settings, collectives) for _ in range(settings.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def apart(kind: type[nn.Module], mode: str) -> type[nn.Module]:
    """The class with code of its own: the compiler remembers by code what it has given up on (a break in a loop)."""
    forward = kind.forward
    own = FunctionType(forward.__code__.replace(co_name=f"forward_{mode}"), forward.__globals__, "forward")
    return type(kind.__name__, (kind,), {"forward": own})


class Trainer:
    """One mode: a net, and a step that trains it."""

    def __init__(self, mode: str, settings: Settings, rank: int) -> None:
        torch.manual_seed(settings.seed)
        collectives = hidden() if mode == "breaks" else TRACED
        self.net = apart(Net, mode)(settings, apart(Layer, mode), collectives)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.forward: Callable[[Tensor], Tensor] = self.net
        if mode != "eager":
            self.forward = torch.compile(self.net, fullgraph=mode == "one graph", dynamic=False)
        generator = torch.Generator().manual_seed(settings.seed + 1 + rank)
        self.batch = torch.randn(settings.rows, settings.width, generator=generator)

    def step(self) -> None:
        self.forward(self.batch).backward()
        flat = torch.cat([param.grad.flatten() for param in self.net.parameters()])
        dist.all_reduce(flat)
        start = 0
        for param in self.net.parameters():
            param.grad.copy_(flat[start : start + param.numel()].view_as(param))
            start += param.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()


def on_rank(settings: Settings, rank: int, emit: Emit) -> None:
    trainers = {mode: Trainer(mode, settings, rank) for mode in TITLES}
    for trainer in trainers.values():
        for _ in range(3):
            trainer.step()
    seconds: dict[str, list[float]] = {mode: [] for mode in TITLES}
    processor: dict[str, list[float]] = {mode: [] for mode in TITLES}
    for index in range(settings.rounds):
        order = list(trainers)
        random.Random(f"{settings.seed}/{index}").shuffle(order)
        for mode in order:
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            for _ in range(settings.steps):
                trainers[mode].step()
            taken = torch.tensor([time.perf_counter() - start[0], time.process_time() - start[1]], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            seconds[mode].append(taken[0].item() / settings.steps)
            processor[mode].append(taken[1].item() / settings.steps)
    weights = {mode: nn.utils.parameters_to_vector(trainer.net.parameters()) for mode, trainer in trainers.items()}
    differences = {mode: (value - weights["eager"]).abs().max().item() for mode, value in weights.items()}
    emit({"seconds": seconds, "processor": processor, "differences": differences})


# --- the command -------------------------------------------------------------------------------------------


def measure(settings: Settings, start: Start[Settings], console: Console) -> Found:
    found: list[Found] = []
    start(settings, found.append)
    return found[0]


def show(found: Found, settings: Settings, console: Console) -> None:
    table = Table(title=f"A step of {settings.layers} layers, {2 * settings.layers} collectives in forward, 2 ranks")
    for heading in ("mode", "ms", "to breaks", "95 %", "CPU ms", "to breaks", "95 %", "weights off"):
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for mode, title in TITLES.items():
        cells = []
        # Processor time leaves out what others on the machine took, and waiting: the steadier of the two.
        for metric in ("seconds", "processor"):
            ratio = paired_ratio(found[metric][mode], found[metric][REFERENCE])
            assert ratio is not None
            median = 1000 * statistics.median(found[metric][mode])
            cells += [f"{median:.2f}", f"{ratio.value:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}"]
        table.add_row(title, *cells, f"{found['differences'][mode]:.1e}")
    console.print(table)


COMMAND = Command(
    name="tracing",
    about="In-graph collectives against breaks.",
    settings=Settings(),
    quick={"layers": 2, "rounds": 2, "steps": 1},
    options=("layers", "width", "rounds"),
    on_rank=on_rank,
    measure=measure,
    show=show,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
