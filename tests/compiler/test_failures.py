"""What goes wrong while compiling, or changes between steps: the run goes on right, or fails on every rank."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from paceline import DDP, errors
from tests.compiler._compare import batch, compare, plain_step, same_grads, stack


def _backend_fails(rank, size):
    torch._dynamo.reset()

    def backend(gm, example_inputs):
        if rank == 1:
            raise RuntimeError("no such instruction")
        return gm.forward

    ddp = DDP(stack())
    compiled = torch.compile(ddp, backend=backend)
    if rank == 1:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such instruction"):
            compiled(batch(rank))
    else:
        with pytest.raises(errors.PeerFailedError, match=r"(?s)rank 1.*no such instruction"):
            plain_step(compiled, rank, 0)


def test_a_backend_that_fails_on_one_rank_is_an_error_on_all(ranks):
    ranks(_backend_fails)


class Puzzling(nn.Module):
    """One that Dynamo cannot capture whole on some ranks."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.inner, self.breaks = stack(2), breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.inner(x)


def _dynamo_fails(rank, size):
    """Nobody lets the program end on it: the others are told all the same."""
    torch._dynamo.reset()
    ddp = DDP(Puzzling(breaks=rank == 1))
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    if rank == 1:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(batch(rank))
        return None
    with pytest.raises(errors.PeerFailedError, match=r"(?s)rank 1.*compiling.*graph_break"):
        plain_step(compiled, rank, 0)
    return None


def test_an_error_of_dynamo_on_one_rank_is_an_error_on_all(ranks):
    ranks(_dynamo_fails)


def _falls_back(rank, size):
    """Without fullgraph it is no error: rank 1 has two graphs, and all the same gradients."""
    return compare(
        rank,
        functools.partial(Puzzling, breaks=rank == 1),
        compile=functools.partial(torch.compile, backend="aot_eager"),
    )


def test_a_graph_break_on_one_rank_is_no_error(ranks):
    assert all(seen.rounds[-1] == seen.buckets for seen in ranks(_falls_back))


def _reset(rank, size):
    def step(model, rank, n):
        torch._dynamo.reset()
        plain_step(model, rank, n)

    return compare(rank, stack, compile=functools.partial(torch.compile, backend="aot_eager"), step=step)


def test_dynamo_reset_between_steps(ranks):
    assert all(min(seen.early) > 0 for seen in ranks(_reset))


def _limit(rank, size):
    def step(model, rank, n):
        with torch._dynamo.config.patch(recompile_limit=2):
            model(batch(rank, n, 3 + n, 8)).square().sum().backward()

    compile_ = functools.partial(torch.compile, backend="aot_eager", dynamic=False)
    return compare(rank, stack, compile=compile_, step=step, steps=5)


def test_recompiles_past_the_limit_run_eagerly(ranks):
    for seen in ranks(_limit):
        assert seen.graphs >= 2
        assert seen.early[1] > 0
        assert seen.rounds[-1] == seen.buckets


def _replaced(rank, size):
    def step(model, rank, n):
        inner = getattr(model, "_orig_mod", model).module
        if n == 2:
            inner[2].weight = nn.Parameter(inner[2].weight.detach() * 2)
        plain_step(model, rank, n)

    compile_ = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    seen = compare(rank, stack, compile=compile_, step=step, steps=5)
    return seen


def test_a_parameter_that_is_replaced(ranks):
    for seen in ranks(_replaced):
        # Once without taps, since it is not known yet that the wrapper has the new one; then compiled anew.
        assert seen.reasons == ["ran uncompiled: it was given other parameters than those it was compiled for"]
        assert seen.graphs == 2
        assert seen.early[2] == 0
        assert seen.early[4] > 0


def _raises(rank, size):
    torch._dynamo.reset()
    ddp = DDP(stack())
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    plain_step(compiled, rank, 0)
    out = compiled(batch(rank, 1))
    if rank == 1:

        def fail(grad):
            raise ValueError("a hook of the user's")

        out.register_hook(fail)
        with pytest.raises(ValueError, match="a hook of the user's"):
            out.sum().backward()
        # Nothing was under way: the next step is as good as any.
    else:
        pass
    ddp.zero_grad()
    eager = DDP(stack())
    plain_step(eager, rank, 2)
    plain_step(compiled, rank, 2)
    same_grads(eager, ddp)


def test_a_backward_that_raises_before_the_graph_is_forgotten(ranks):
    ranks(_raises)


class Salted(nn.Module):
    """A module that no cache has seen yet."""

    def __init__(self, salt: float) -> None:
        super().__init__()
        self.salt, self.inner = salt, stack(2)

    def forward(self, x):
        return self.inner(x * self.salt)


def _caches(rank, size, salt):
    """The second time, with another bucket size, everything comes from the caches."""
    found = []
    for cap_bytes in (600, 64):
        torch._dynamo.reset()
        counters.clear()
        ddp = DDP(Salted(salt + rank), bucket_cap_mb=cap_bytes / 2**20)
        plain_step(torch.compile(ddp, fullgraph=True), rank, 0)
        cache = counters["aot_autograd"]
        found.append([cache[f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")])
        del ddp
    return found


def test_caches_hit_whatever_the_bucket_size(ranks):
    # Other than this, a number that differs from run to run would have no place in a test.
    for found in ranks(_caches, float(time.time_ns() % 10**9)):
        assert found == [[0, 1, 0], [1, 0, 0]]
