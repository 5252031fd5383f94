"""A gradient's way from autograd's hook to its average, as docs/design.md draws it: which files it comes through."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.control import channel

ROOT = str(Path(paceline.__file__).parent) + "/"
ARRIVES = ["reduction/inbox.py", "reduction/reducer.py", "reduction/backward.py", "reduction/countdown.py"]
LEAVES = ["reduction/backward.py", "gradients/bucket.py", "reduction/exchange.py", "control/channel.py"]
COMES_BACK = ["reduction/backward_end.py", "reduction/reducer.py", "reduction/backward.py"]
IS_HANDED_OUT = ["control/channel.py", "gradients/bucket.py"]
IS_REPORTED = ["compiler/taps/ops.py", "compiler/taps/tap.py", *ARRIVES[1:]]
# The first two find the parameters and the reducer; the graph goes on with what the third makes.
FOR_A_REPORT = {"compiler/taps/parameter_binding.py", "reduction/ownership.py", "reduction/early_gradients.py"}
# What is read or noted on the way. Nothing of a gradient changes in these files.
VALUES = {f"gradients/{name}.py" for name in ("layout", "ledger", "plan", "slots", "status")} | {
    "reduction/origin.py",
    "reduction/weighing.py",
    "reduction/telemetry.py",
    "control/progress.py",
}
# How a backward begins, what is learnt from it in the end, and what others do, is not a gradient's own way.
AROUND = {f"reduction/{name}.py" for name in ("planner", "gradient_hooks", "one_thread", "turns", "usable")} | {
    "_torch/autograd.py"
}


def _visits(rank, world_size, is_compiled):
    """The files that a step runs code of: by the time from one call of ``all_reduce`` to the next, in order."""
    ddp = paceline.DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), bucket_cap_mb=0.01)
    model = torch.compile(ddp, backend="aot_eager") if is_compiled else ddp
    # Buckets are made anew once.
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
    visits, all_reduce = [[]], dist.all_reduce

    def watch(frame, event, arg):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT) and visits[-1][-1:] != [file.removeprefix(ROOT)]:
            visits[-1].append(file.removeprefix(ROOT))

    def watched(*args, **kwargs):
        visits.append([])
        return all_reduce(*args, **kwargs)

    output = model(torch.ones(1, 64)).sum()
    # On a busy machine a wait may last, and then this rank would look for the others.
    with mock.patch.object(channel, "PATIENCE_S", 60), mock.patch.object(dist, "all_reduce", watched):
        sys.setprofile(watch)
        try:
            output.backward()
        finally:
            sys.setprofile(None)
    return visits


def _in_order(wanted: list[str], files: list[str]) -> bool:
    found = iter(files)
    return all(file in found for file in wanted)


def test_the_way_of_an_eager_gradient(ranks):
    for visits in ranks(_visits, False):
        _begins, *while_it_runs, last, end = visits
        assert len(while_it_runs) > 1
        stations = {*ARRIVES, *LEAVES}
        for files in while_it_runs:
            assert _in_order(ARRIVES + LEAVES, files)
            assert set(files) - VALUES - AROUND == stations
        # The last bucket leaves when the backward is over. After that nothing arrives: ranks wait, and are done.
        assert _in_order(ARRIVES + COMES_BACK + LEAVES[1:], last)
        assert set(last) - VALUES - AROUND == stations | {COMES_BACK[0]}
        assert _in_order(IS_HANDED_OUT, end)
        assert set(end) - VALUES - AROUND <= stations
        assert len(stations | {COMES_BACK[0]}) == 8


def test_the_way_of_a_compiled_gradient(ranks):
    for visits in ranks(_visits, True):
        reports = [files for files in visits if "compiler/taps/ops.py" in files]
        assert len(reports) > 2
        # Before the first report the backward begins, and after the last one it ends.
        for files in reports[1:-1]:
            assert _in_order(IS_REPORTED + LEAVES, files)
            assert set(files) - VALUES - AROUND == {*IS_REPORTED, *LEAVES, *FOR_A_REPORT, ARRIVES[0]}
