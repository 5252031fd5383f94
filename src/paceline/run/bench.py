"""``paceline bench``: all-reduce over gloo and over shared memory on this machine, in less than a minute.

Both backends take turns in the same processes, so that whatever else the machine does slows both. For figures with
intervals there is ``make bench-shm``.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.run.init import init
from paceline.run.spawn import spawn
from paceline.transport.shm import kernel

SIZES_BYTES = (4 * 1024, 64 * 1024, 1024 * 1024, 8 * 1024 * 1024, 64 * 1024 * 1024)
BUDGET_S = 4.0
"""How long each size is measured. Starting the ranks takes longest, so that all of it takes less than a minute."""
_ROUNDS = (5, 400)


def bench(nproc: int) -> int:
    """Measure, print a table, and return an exit code."""
    if reason := kernel.reason_unavailable():
        print(f"paceline bench: there is no shared memory to compare gloo with: {reason}")
        return 1
    try:
        spawn(measure, nproc)
    except PacelineError as error:
        print(f"paceline bench: {error}")
        return 1
    return 0


def measure(sizes_bytes: tuple[int, ...] = SIZES_BYTES, budget_s: float = BUDGET_S) -> None:
    """What each rank does."""
    with contextlib.redirect_stderr(io.StringIO()):  # the table says which backends these are
        world = init(device="cpu", backend="cpu:shm")
    groups = {"gloo": dist.new_group(backend="gloo"), "shm": dist.group.WORLD}
    if world.rank == 0:
        print(f"All-reduce of float32 on {world.world_size} ranks, {torch.get_num_threads()} threads each")
        print(f"{'size':>10}{'gloo':>12}{'shm':>12}{'gloo / shm':>12}")
    for nbytes in sizes_bytes:
        tensor = torch.zeros(nbytes // 4)
        found: dict[str, list[float]] = {name: [] for name in groups}
        rounds = _rounds(tensor, groups, budget_s)
        for _ in range(rounds):
            for name, group in groups.items():
                found[name].append(_time(tensor, group))
        if world.rank == 0:
            gloo, shm = (statistics.median(found[name]) for name in ("gloo", "shm"))
            print(f"{_size(nbytes):>10}{_duration(gloo):>12}{_duration(shm):>12}{gloo / shm:>12.1f}", flush=True)


def _rounds(tensor: torch.Tensor, groups: dict[str, dist.ProcessGroup | None], budget_s: float) -> int:
    """How many rounds fit the budget; the same number on all ranks."""
    for _ in range(2):  # the first one connects
        took_s = sum(_time(tensor, group) for group in groups.values())
    fewest, most = _ROUNDS
    # The barriers take time as well.
    rounds = torch.tensor(min(most, max(fewest, int(budget_s / (2 * took_s)))))
    dist.broadcast(rounds, 0)
    return int(rounds)


def _time(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    return time.perf_counter() - start


def _size(nbytes: int) -> str:
    return f"{nbytes // 2**20} MB" if nbytes >= 2**20 else f"{nbytes // 2**10} KB"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
