"""What the host does for a step, a parameter at a time, on an accelerator that is not there.

    python -m benchmarks.host_cost            # 1, 100 and 10,000 parameters; writes benchmarks/results/host_cost/
    python -m benchmarks.host_cost --quick    # a smoke run

Tensors of the device are torch's fake tensors: they have a shape and a device, and no memory, so nothing is computed.
The device has a name of its own and is not "cuda". Without a GPU, torch itself cannot run a backward of fake tensors on
"cuda": a build for the CPU has nothing that switches such devices, and a build with CUDA looks for the driver.

The group's backend for them is torch's "fake", which sends nothing. What is left is the host's own code: wrapping,
planning and the bookkeeping of a step. What ranks tell each other from host to host is real, and so are the two ranks.
The same step without a wrapper is taken off, since most of its time is what fake tensors cost. All times are processor
time, so that other programs on the machine matter less.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from paceline import DDP
from paceline.control import hang
from paceline.settings import HangWatch
from paceline.testing import RankPool

from .command import Command, Found, Start
from .settings import Sent

DEVICE = "absent"
SIZES = (1, 100, 10_000)


class FakeDevice(FakeTensorMode):
    """Tensors of the device are fake. Those of the CPU are real, because the host reads what other ranks have said."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        is_on_device = any(isinstance(leaf, FakeTensor) for leaf in leaves) or (
            torch.device(kwargs.get("device") or "cpu").type == DEVICE
        )
        return super().__torch_dispatch__(function, types, args, kwargs) if is_on_device else function(*args, **kwargs)


class Many(nn.Module):
    """A module of ``n`` parameters, each of which is used once."""

    def __init__(self, n: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.empty(width, device=DEVICE)) for _ in range(n))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([inputs, *self.parts]).sum()


@dataclasses.dataclass(frozen=True)
class Settings(Sent):
    """What a run was asked to do."""

    largest: int = SIZES[-1]
    steps: int = 5


def on_rank(rank: int, world_size: int, n: int, steps: int, width: int = 8) -> dict[str, float]:
    """Processor seconds for a module of ``n`` parameters: wrapping it, and steps with and without the wrapper."""
    if not hasattr(torch, DEVICE):
        # A process registers a device once.
        _setup_privateuseone_for_python_backend(DEVICE)
        dist.Backend.backend_capability["fake"].append(DEVICE)
    group = dist.new_group(backend=f"{DEVICE}:fake")
    # Processor time of all threads: autograd runs the nodes of a device on a thread of its own, and waiting is no cost.
    clock = time.process_time
    # What the fake backend was given never ends, which the watch would report.
    quiet = mock.patch.object(hang, "_settings", HangWatch("off"))
    with quiet, FakeDevice(allow_non_fake_inputs=True):
        bare, wrapped = Many(n, width), Many(n, width)
        inputs = torch.empty(width, device=DEVICE)
        # The first wrapper of a process imports things, and connects the hosts.
        DDP(Many(1, width), process_group=group)
        start = clock()
        ddp = DDP(wrapped, process_group=group)
        wrap_s = clock() - start

        def step(module: Callable[[Tensor], Tensor]) -> float:
            start = clock()
            module(inputs).backward()
            return clock() - start

        first_s, second_s = step(ddp), step(ddp)
        step(bare)
        taken: list[tuple[float, float]] = []
        for _ in range(steps):
            dist.barrier()
            taken.append((step(ddp), step(bare)))
        is_fake = all(
            isinstance(param.grad, FakeTensor) and param.grad.device.type == DEVICE for param in wrapped.parts
        )
        assert is_fake, "a gradient is not on the device"
        n_buckets = len(ddp.plan.buckets)
    return {
        "parameters": float(n),
        "buckets": float(n_buckets),
        "wrap_s": wrap_s,
        "first_step_s": first_s,
        "second_step_s": second_s,
        "step_s": statistics.median(with_ddp for with_ddp, _ in taken),
        "bare_step_s": statistics.median(without for _, without in taken),
        "cost_s": statistics.median(with_ddp - without for with_ddp, without in taken),
    }


def measure(settings: Settings, start: Start[Settings], console: Console) -> Found:
    with RankPool() as pool:
        sizes = [n for n in SIZES if n <= settings.largest]
        return {"sizes": [pool.run(on_rank, n, settings.steps, backend="gloo", timeout=600)[0] for n in sizes]}


def show(found: Found, settings: Settings, console: Console) -> None:
    columns = ("parameters", "buckets", "wrapping", "a step", "without", "cost of a step", "for a parameter")
    table = Table(*columns, title="host code on a device that is not there, 2 ranks")
    for row in found["sizes"]:
        n = row["parameters"]
        table.add_row(
            f"{n:,.0f}",
            f"{row['buckets']:.0f}",
            f"{row['wrap_s'] * 1e3:.1f} ms",
            f"{row['step_s'] * 1e3:.2f} ms",
            f"{row['bare_step_s'] * 1e3:.2f} ms",
            f"{row['cost_s'] * 1e3:.2f} ms",
            f"{row['cost_s'] / n * 1e6:.1f} us",
        )
    console.print(table)


COMMAND = Command(
    name="host_cost",
    about="What the host does for a step on a device that is not there.",
    settings=Settings(),
    quick={"largest": 100, "steps": 2},
    options=("steps",),
    on_rank=None,
    measure=measure,
    show=show,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
