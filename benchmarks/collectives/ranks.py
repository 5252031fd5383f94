"""The rank's side of a run: all methods live in the same processes and take turns; rank 0 reports."""

from __future__ import annotations

import mmap
import random
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist

from ..ranks import Emit, joined
from .limit import shared
from .methods import METHODS, MethodMissingError, Place, Turn
from .settings import Settings, calls_of
from .turn import Gate

MIN_ROUNDS, MAX_ROUNDS = 8, 60


def measure(settings: Settings, rank: int, emit: Emit) -> None:
    with ExitStack() as scope:
        gate = None if settings.warm else Gate(shared(rank, mmap.PAGESIZE), rank, settings.world_size)
        place = Place(rank, settings.world_size, max(settings.sizes), scope, {}, gate)
        turns: dict[str, Turn] = {}
        for name in settings.methods:
            emit({"event": "progress", "label": f"opening {name}", "done": 0, "total": 1})
            try:
                turns[name] = METHODS[name].open(place)
            except MethodMissingError as error:
                emit({"event": "text", "text": f"{name} is left out: {error}"})
        emit({"event": "facts", **place.facts})
        for name, turn in turns.items():
            for nbytes in settings.sizes:
                emit({"event": "progress", "label": f"warming up {name}", "done": 0, "total": 1})
                dist.barrier()
                turn(nbytes, 1)
        start = time.perf_counter()
        _round(settings, turns, "warm-up")
        rounds = _rounds(settings, time.perf_counter() - start)
        samples: dict[tuple[int, str], list[float]] = {}
        for index in range(rounds):
            label = f"all_reduce, {settings.world_size} ranks"
            emit({"event": "progress", "label": label, "done": index, "total": rounds})
            for key, seconds in _round(settings, turns, str(index)).items():
                samples.setdefault(key, []).append(seconds)
        for nbytes in settings.sizes:
            values = {name: _slowest(samples[nbytes, name]) for name in turns}
            emit({"event": "curve", "nbytes": nbytes, "seconds": values})


def _round(settings: Settings, turns: dict[str, Turn], label: str) -> dict[tuple[int, str], float]:
    """Every method at every size once. Seeded, so that the order is the same on each rank."""
    order = random.Random(f"{settings.seed}/{label}")
    seconds = {}
    for nbytes in order.sample(settings.sizes, len(settings.sizes)):
        for name in order.sample(list(turns), len(turns)):
            dist.barrier()
            seconds[nbytes, name] = turns[name](nbytes, calls_of(nbytes))
    return seconds


def _rounds(settings: Settings, round_s: float) -> int:
    """How many rounds to run, given what one takes; rank 0 decides."""
    if settings.rounds is not None:
        return settings.rounds
    decided = torch.tensor([min(max(round(settings.budget_s / round_s), MIN_ROUNDS), MAX_ROUNDS)])
    dist.broadcast(decided, 0)
    return int(decided.item())


def _slowest(values: list[float]) -> list[float]:
    """Turn by turn, the slowest rank's."""
    result = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return result.tolist()


if __name__ == "__main__":
    with joined() as (rank, text, emit):
        measure(Settings.from_json(text), rank, emit)
