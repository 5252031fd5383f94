"""The rank's side of a run: one process runs every suite, model and mode, and rank 0 reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .models import CASES, Case
from .modes import MODES, Job, Mode
from .settings import Settings

MIN_ROUNDS, MAX_ROUNDS = 8, 60

Emit = Callable[[dict[str, Any]], None]
"""Reports an event to the command; does nothing on ranks other than 0."""


class Bench:
    """What a suite may use on a rank."""

    def __init__(self, settings: Settings, rank: int, emit: Emit) -> None:
        self.settings = settings
        self.rank = rank
        self.modes: list[Mode] = []
        """Those of the suite that runs now."""
        self._emit = emit
        self._groups: dict[tuple[str | None, bool], dist.ProcessGroup] = {}
        self._reported_at = 0.0

    def job(self, case: Case, *, alone: bool = False) -> Job:
        return Job(
            case=case,
            rank=self.rank,
            world_size=1 if alone else self.settings.world_size,
            process_group=self._group(None, alone),
            new_group=lambda backend: self._group(backend, alone),
            seed=self.settings.seed,
        )

    def _group(self, backend: str | None, alone: bool) -> dist.ProcessGroup:
        if (backend, alone) not in self._groups:
            everybody = list(range(self.settings.world_size))
            # Every rank has to take part in making every group, its own or not.
            members = [[rank] for rank in everybody] if alone else [everybody]
            groups = [dist.new_group(ranks, backend=backend) for ranks in members]
            self._groups[backend, alone] = groups[self.rank if alone else 0]
        return self._groups[backend, alone]

    def barrier(self) -> None:
        dist.barrier()

    def shuffled(self, index: int) -> list[Mode]:
        """The modes in the order of a round: seeded, so that it is the same on each rank."""
        modes = list(self.modes)
        random.Random(f"{self.settings.seed}/{self.settings.launch}/{index}").shuffle(modes)
        return modes

    def rounds(self, round_s: float) -> int:
        """How many rounds to run, given what one takes; rank 0 decides."""
        if self.settings.rounds is not None:
            return self.settings.rounds
        launches = self.settings.launches
        fitting = round(self.settings.budget_s / launches / round_s)
        decided = torch.tensor([min(max(fitting, -(-MIN_ROUNDS // launches)), MAX_ROUNDS)])
        dist.broadcast(decided, 0)
        return int(decided.item())

    def gather(self, values: list[float], width: int) -> list[list[list[float]]]:
        """Every rank's values, indexed [rank][row][column] with rows of `width`."""
        mine = torch.tensor(values, dtype=torch.float64).view(-1, width)
        everybody = [torch.empty_like(mine) for _ in range(self.settings.world_size)]
        dist.all_gather(everybody, mine)
        return [of_rank.tolist() for of_rank in everybody]

    def progress(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported_at > 0.5:
            self._reported_at = now
            self._emit({"event": "progress", "label": label, "done": done, "total": total})


@contextlib.contextmanager
def joined() -> Iterator[tuple[int, str, Emit]]:
    """Join the run that `launch.run` started this process for: its rank, the settings as JSON, how to report."""
    rank, port, listener, report = map(int, sys.argv[1:5])
    settings = json.loads(sys.argv[5])
    torch.set_num_threads(settings["threads"])
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        settings["world_size"],
        is_master=rank == 0,
        master_listen_fd=listener if rank == 0 else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings["world_size"])
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        pipe = stack.enter_context(os.fdopen(report, "w")) if rank == 0 else None

        def emit(event: dict[str, Any]) -> None:
            if pipe is not None:
                print(json.dumps(event), file=pipe, flush=True)

        yield rank, sys.argv[5], emit


def main() -> None:
    from .suites import SUITES

    with joined() as (rank, text, emit):
        settings = Settings.from_json(text)
        bench = Bench(settings, rank, emit)
        for suite in (SUITES[name] for name in settings.suites):
            bench.modes = [MODES[name] for name in settings.modes or suite.modes]
            for case in (CASES[name] for name in settings.models or suite.models):
                emit({"event": "progress", "label": f"{suite.name} {case.name}", "done": 0, "total": 1})
                for result in suite.run(bench, case):
                    if isinstance(result, str):
                        emit({"event": "text", "text": result})
                    else:
                        emit({"event": type(result).__name__.lower(), **dataclasses.asdict(result)})


if __name__ == "__main__":
    main()
