"""What the control channel costs: a step without trouble, the watch, an agreement, a comparison of replicas.

    python -m benchmarks.control            # 2 ranks; prints a table, writes runs/bench/control.json
    python -m benchmarks.control --quick    # a smoke run

The bookkeeping of a step and a look of the watch's thread are timed by themselves, since a step varies by far more than
they take; steps with the watch on and off take turns as a check. The bound is the larger of 0.5% of a step and 50 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
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
from paceline.options import HangWatch
from paceline.testing import RankPool

OUT = Path("runs") / "bench"
BOUND_SHARE, BOUND_S = 0.005, 50e-6
VERIFY_EVERY = 100


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


def measure(rank: int, world_size: int, layers: int, width: int, rounds: int) -> dict[str, float]:
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.control", description="What the control channel costs.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: a small model, few rounds")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for control.json (default {OUT.as_posix()})")
    chosen = parser.parse_args(arguments)
    layers, width, rounds = (2, 64, 5) if chosen.quick else (8, 1024, 60)
    with RankPool() as pool:
        found = pool.run(measure, layers, width, rounds, backend="cpu:shm", timeout=600)[0]
    table = Table("what", "measured", title=f"control channel, 2 ranks over shm, {layers} layers of {width}")
    for row in rows(found):
        table.add_row(*row)
    Console(width=120 if not sys.stdout.isatty() else None, highlight=False).print(table)
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "control.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
