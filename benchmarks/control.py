"""What the control channel costs: a step without trouble, the watch, an agreement, a comparison of replicas.

    python -m benchmarks.control            # 2 ranks; writes benchmarks/results/control/
    python -m benchmarks.control --quick    # a smoke run

The bookkeeping of a step and a look of the watch's thread are timed by themselves, since a step varies by far more than
they take; steps with the watch on and off take turns as a check. The bound is the larger of 0.5% of a step and 50 us.
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
from torch import nn

from paceline import DDP
from paceline.control import hang
from paceline.control.hang import LOOK_S
from paceline.settings import HangWatch
from paceline.testing import RankPool

from .command import Command, Found, Start
from .settings import Sent

BOUND_SHARE, BOUND_S = 0.005, 50e-6
VERIFY_EVERY = 100


@dataclasses.dataclass(frozen=True)
class Settings(Sent):
    """What a run was asked to do."""

    layers: int = 8
    width: int = 1024
    rounds: int = 60


def _model(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


def _timed(call: Callable[[], Any], count: int) -> float:
    """Seconds a call, the median of ``count``."""
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def on_rank(rank: int, world_size: int, layers: int, width: int, rounds: int) -> dict[str, float]:
    ddps, optimizers = {}, {}
    for mode in ("off", "observe", "verify"):
        with mock.patch.object(hang, "_settings", HangWatch("off" if mode == "off" else "observe")):
            ddps[mode] = DDP(_model(layers, width), verify_every=1 if mode == "verify" else 0)
        optimizers[mode] = torch.optim.AdamW(ddps[mode].parameters(), lr=1e-3)
    batch = torch.randn(32, width)

    def step(mode: str) -> None:
        ddps[mode](batch).square().mean().backward()
        optimizers[mode].step()
        optimizers[mode].zero_grad()

    for mode in ddps:
        for _ in range(3):
            step(mode)
    seconds: dict[str, list[float]] = {mode: [] for mode in ddps}
    for _ in range(rounds):
        for mode, taken in seconds.items():
            dist.barrier()
            start = time.perf_counter()
            step(mode)
            taken.append(time.perf_counter() - start)
    channel = ddps["observe"].channel
    tensor = torch.ones(1)
    before = channel.progress.started
    step("observe")
    collectives = channel.progress.started - before

    def look() -> None:
        channel.inquiries.answer()
        channel.hear()

    return {
        "step_s": statistics.median(seconds["off"]),
        "watched_step_s": statistics.median(seconds["observe"]),
        "verified_step_s": statistics.median(seconds["verify"]),
        "held_bytes": 4.0 * 4 * sum(param.numel() for param in ddps["off"].parameters()),
        "collectives": float(collectives),
        "bookkeeping_s": _timed(lambda: channel.progress.start("all-reduce", "bucket 0 (weight)", tensor), 2000)
        + _timed(channel.check_news, 2000),
        "look_s": _timed(look, 500),
        "agree_s": _timed(lambda: channel.agree("benchmark", rank), 50 * rounds // 10 + 5),
    }


def rows(found: dict[str, float]) -> list[tuple[str, str]]:
    """What was measured, and what follows from it."""
    step_s = found["step_s"]
    cost_s = found["collectives"] * found["bookkeeping_s"] + found["look_s"] / LOOK_S * step_s
    bound_s = max(BOUND_SHARE * step_s, BOUND_S)
    verify_s = found["verified_step_s"] - found["watched_step_s"]
    return [
        ("step without the watch", f"{step_s * 1e3:.2f} ms"),
        ("the same with it, taking turns", f"{found['watched_step_s'] * 1e3:.2f} ms"),
        ("cost a step: bookkeeping, and looks of the thread", f"{cost_s * 1e6:.1f} us ({cost_s / step_s:.3%})"),
        ("bound", f"{bound_s * 1e6:.0f} us: {'kept' if cost_s <= bound_s else 'EXCEEDED'}"),
        ("an agreement of all ranks", f"{found['agree_s'] * 1e6:.0f} us"),
        (f"comparing replicas ({found['held_bytes'] / 2**20:.0f} MiB held)", f"{verify_s * 1e3:.2f} ms"),
        (f"the same with verify_every={VERIFY_EVERY}", f"{verify_s / VERIFY_EVERY / step_s:.3%} of a step"),
    ]


def measure(settings: Settings, start: Start[Settings], console: Console) -> Found:
    with RankPool() as pool:
        numbers = dataclasses.astuple(settings)
        found: Found = pool.run(on_rank, *numbers, backend="cpu:shm", timeout=600)[0]
    return found


def show(found: Found, settings: Settings, console: Console) -> None:
    title = f"control channel, 2 ranks over shm, {settings.layers} layers of {settings.width}"
    table = Table("what", "measured", title=title)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)


COMMAND = Command(
    name="control",
    about="What the control channel costs.",
    settings=Settings(),
    quick={"layers": 2, "width": 64, "rounds": 5},
    options=(),
    on_rank=None,
    measure=measure,
    show=show,
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
