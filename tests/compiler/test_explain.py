"""``paceline.explain``, the log, and what is said of fallbacks."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch import nn

import paceline
from paceline import DDP
from tests.compiler._compare import batch, messages, plain_step, stack
from tests.compiler._models import Broken
from tests.on_ranks import on_ranks


def _explained(rank, make):
    torch._dynamo.reset()
    ddp = DDP(make(), bucket_cap_mb=600 / 2**20)
    plain_step(ddp, rank, 0)
    before = [param.grad.clone() for param in ddp.parameters()]
    found = paceline.explain(ddp, batch(rank))
    for param, grad in zip(ddp.parameters(), before, strict=True):
        assert torch.equal(param.grad, grad)
    assert found.total_bytes == ddp.plan.size_bytes
    assert [departure.bucket for departure in found.departures] == list(range(len(ddp.plan.buckets)))
    fractions = [departure.fraction for departure in found.departures]
    assert fractions == sorted(fractions)
    # The last one carries the status, and waits for the end.
    assert fractions[0] < 1.0 == fractions[-1]
    return found


@on_ranks()
def test_a_whole_graph(rank, size):
    found = _explained(rank, stack)
    assert len(found.graphs) == 1
    assert not found.breaks
    assert not found.untapped
    assert 0 < found.started_bytes() < found.total_bytes
    assert "1 graph(s) report gradients, 0 graph break(s)" in str(found)
    assert "starts before backward ends" in str(found)


class Branching(Broken):
    """Breaks where a branch depends on a tensor, too."""

    def forward(self, x):
        x = super().forward(x)
        if x.sum() > 1e6:
            x = x + 1
        return x


def _place(function, text):
    """The file of a function and the line of it that has ``text``."""
    lines, start = inspect.getsourcelines(function)
    return inspect.getsourcefile(function), start + next(n for n, line in enumerate(lines) if text in line)


@on_ranks()
def test_breaks_with_their_reasons_and_places(rank, size):
    found = _explained(rank, Branching)
    assert len(found.graphs) == 2
    told = {(one.file, one.line): one for one in found.breaks}
    asked, branch = _place(Broken.forward, "graph_break()"), _place(Branching.forward, "if x.sum()")
    assert told.keys() == {asked, branch}
    assert "graph_break()" in told[asked].reason
    assert f"break at {asked[0]}:{asked[1]} ({told[asked].count}x): Call to `torch._dynamo.graph_break()`" in str(found)
    assert f"break at {branch[0]}:{branch[1]} (" in str(found)
    assert told[branch].reason == "A branch depends on the value of a tensor"
    assert "2 graph break(s)" in str(found)


@on_ranks()
def test_the_plan_and_the_placement_are_logged_once(rank, size):
    torch._dynamo.reset()
    with messages(logging.INFO) as told:
        ddp = DDP(stack(), bucket_cap_mb=600 / 2**20)
        compiled = torch.compile(ddp, backend="aot_eager", dynamic=False)
        for n in range(6):
            # It is compiled a second time, for another shape. That is no reason to log the table again.
            compiled(batch(rank, n, 3 + n // 4, 8)).sum().backward()
    (table,) = told
    lines = table.splitlines()
    assert lines[1].split() == ["bucket", "MB", "params", "starts", "at"]
    assert len(lines) == 3 + len(ddp.plan.buckets)
    assert "of backward" in lines[2]
    assert lines[-2].endswith("the end of backward")


@on_ranks()
def test_something_else_is_refused(rank, size):
    with pytest.raises(paceline.errors.BadTypeError, match="not a Linear"):
        paceline.explain(nn.Linear(2, 2), torch.ones(1, 2))
