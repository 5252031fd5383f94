"""A gradient's way from autograd's hook to its average, as docs/design.md draws it: which files it comes through."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline

ROOT = str(Path(paceline.__file__).parent) + "/"
ARRIVES = ["reduction/inbox.py", "reduction/reducer.py", "reduction/backward.py", "reduction/countdown.py"]
LEAVES = ["reduction/backward.py", "gradients/bucket.py", "reduction/exchange.py", "control/channel.py"]
COMES_BACK = ["reduction/backward_end.py", "reduction/reducer.py", "reduction/backward.py"]
WAITS = ["control/channel.py", "control/peer_wait.py"]
# What is read on the way: they are told nothing of a gradient, but one.
VALUES = {f"gradients/{name}.py" for name in ("layout", "ledger", "plan", "slots", "status")} | {
    "reduction/weighing.py",
    "reduction/telemetry.py",
    "control/progress.py",
}
# How a backward begins, and what is learnt from it in the end, is not a gradient's own way.
AROUND = {"reduction/planner.py", "_torch/autograd.py"}


def _visits(rank, world_size):
    """The files that a step runs code of: by the time from one call of ``all_reduce`` to the next, in order."""
    ddp = paceline.DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.01)
    # Buckets are made anew once.
    for _ in range(2):
        ddp(torch.ones(1, 64)).sum().backward()
    visits, all_reduce = [[]], dist.all_reduce

    def watch(frame, event, arg):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and visits[-1][-1:] != [file.removeprefix(ROOT)]:
            visits[-1].append(file.removeprefix(ROOT))

    def watched(*args, **kwargs):
        visits.append([])
        return all_reduce(*args, **kwargs)

    output = ddp(torch.ones(1, 64)).sum()
    dist.all_reduce = watched
    sys.setprofile(watch)
    try:
        output.backward()
    finally:
        sys.setprofile(None)
        dist.all_reduce = all_reduce
    return visits


def _in_order(wanted: list[str], files: list[str]) -> bool:
    found = iter(files)
    return all(file in found for file in wanted)


def test_the_way_of_an_eager_gradient(ranks):
    for visits in ranks(_visits):
        _begins, *while_it_runs, last, end = visits
        assert len(while_it_runs) > 1
        stations = {*ARRIVES, *LEAVES}
        for files in while_it_runs:
            assert _in_order(ARRIVES + LEAVES, files)
            assert set(files) - VALUES - AROUND == stations
        # The last bucket leaves when the backward is over. After that nothing arrives: ranks wait, and are done.
        assert _in_order(ARRIVES + COMES_BACK + LEAVES[1:], last)
        assert set(last) - VALUES - AROUND == stations | {COMES_BACK[0]}
        assert _in_order([*WAITS, "gradients/slots.py"], end)
        assert set(end) - VALUES - AROUND == {
            *WAITS,
            "reduction/countdown.py",
            *COMES_BACK[1:],
            "reduction/exchange.py",
        }
