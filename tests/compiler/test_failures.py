"""What goes wrong while compiling, or changes between steps: the run goes on right, or fails on every rank."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from paceline import DDP, errors
from tests.compiler._compare import batch, compare, plain_step, same_grads, stack
from tests.on_ranks import on_ranks


@on_ranks()
def test_a_backend_that_fails_on_one_rank_is_an_error_on_all(rank, size):
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


class Puzzling(nn.Module):
    """One that Dynamo cannot capture whole on some ranks."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.inner, self.breaks = stack(2), breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.inner(x)


@on_ranks()
def test_an_error_of_dynamo_on_one_rank_is_an_error_on_all(rank, size):
    """Nobody lets the program end on it: the others are told all the same."""
    torch._dynamo.reset()
    ddp = DDP(Puzzling(breaks=rank == 1))
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    if rank == 1:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(batch(rank))
    else:
        with pytest.raises(errors.PeerFailedError, match=r"(?s)rank 1.*compiling.*graph_break"):
            plain_step(compiled, rank, 0)


@on_ranks()
def test_compiling_while_an_error_is_handled_is_no_failure(rank, size):
    """Compiled while the program handles an error of its own: nothing has failed."""
    torch._dynamo.reset()
    ddp = DDP(stack())
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    try:
        raise ValueError("a bad batch")
    except ValueError:
        plain_step(compiled, rank, 0)
    plain_step(compiled, rank, 1)
    assert not ddp.logbook.last_error


@on_ranks()
def test_an_interrupted_forward_leaves_nothing_behind(rank, size):
    torch._dynamo.reset()
    interrupts = [True]

    def backend(gm, example_inputs):
        def run(*args):
            if interrupts and interrupts.pop():
                raise KeyboardInterrupt
            return gm.forward(*args)

        return run

    ddp = DDP(stack())
    compiled = torch.compile(ddp, backend=backend)
    with pytest.raises(KeyboardInterrupt):
        compiled(batch(rank))
    assert DDP._get_active_ddp_module() is None
    assert not ddp._forward._outer
    # Nobody was told that this rank has failed.
    plain_step(compiled, rank, 1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks()
def test_a_graph_break_on_one_rank_is_no_error(rank, size, backend):
    """Without fullgraph it is no error: rank 1 has two graphs, and all the same gradients."""
    seen = compare(
        rank,
        functools.partial(Puzzling, breaks=rank == 1),
        compile=functools.partial(torch.compile, backend=backend),
    )
    # The end of forward is in another graph than its beginning, and must not be dropped from it.
    assert DDP._get_active_ddp_module() is None
    assert seen.rounds[-1] == seen.buckets


@on_ranks()
def test_dynamo_reset_between_steps(rank, size):
    def step(model, rank, n):
        torch._dynamo.reset()
        plain_step(model, rank, n)

    seen = compare(rank, stack, compile=functools.partial(torch.compile, backend="aot_eager"), step=step)
    assert min(seen.early) > 0


@on_ranks()
def test_recompiles_past_the_limit_run_eagerly(rank, size):
    def step(model, rank, n):
        with torch._dynamo.config.patch(recompile_limit=2):
            model(batch(rank, n, 3 + n, 8)).square().sum().backward()

    compile_ = functools.partial(torch.compile, backend="aot_eager", dynamic=False)
    seen = compare(rank, stack, compile=compile_, step=step, steps=5)
    assert seen.graphs >= 2
    assert seen.early[1] > 0
    assert seen.rounds[-1] == seen.buckets


@on_ranks()
def test_a_parameter_that_is_replaced(rank, size):
    def step(model, rank, n):
        inner = getattr(model, "_orig_mod", model).module
        if n == 2:
            inner[2].weight = nn.Parameter(inner[2].weight.detach() * 2)
        plain_step(model, rank, n)

    compile_ = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    seen = compare(rank, stack, compile=compile_, step=step, steps=5)
    # The old graph reports the others. Then it is compiled anew, as it may have a place for more.
    assert seen.graphs == 2
    assert min(seen.early[2:]) > 0


def fail(grad):
    raise ValueError("a hook of the user's")


@on_ranks()
def test_a_backward_that_raises_before_the_graph_is_forgotten(rank, size):
    torch._dynamo.reset()
    ddp = DDP(stack())
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    plain_step(compiled, rank, 0)
    out = compiled(batch(rank, 1))
    if rank == 1:
        out.register_hook(fail)
        with pytest.raises(ValueError, match="a hook of the user's"):
            out.sum().backward()
        # Nothing was under way: the next step is as good as any.
    ddp.zero_grad()
    eager = DDP(stack())
    plain_step(eager, rank, 2)
    plain_step(compiled, rank, 2)
    same_grads(eager, ddp)


@on_ranks()
def test_a_backend_that_fails_on_all_ranks_leaves_a_wrapper_that_works(rank, size):
    torch._dynamo.reset()

    def backend(gm, example_inputs):
        raise RuntimeError("no such instruction")

    eager, ours = DDP(stack()), DDP(stack())
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such instruction"):
        torch.compile(ours, backend=backend)(batch(rank))
    # Nothing was under way. Without the compiler the wrapper is as good as ever.
    for n in range(2):
        for model in (eager, ours):
            model.zero_grad()
            plain_step(model, rank, n)
        same_grads(eager, ours)


@on_ranks()
def test_an_interrupted_backward_in_no_sync_keeps_what_was_accumulated(rank, size):
    """A backward without synchronisation that fails loses nothing of those before it."""
    torch._dynamo.reset()
    ddp = DDP(stack(), bucket_cap_mb=600 / 2**20)
    compiled = torch.compile(ddp, backend="aot_eager", fullgraph=True)
    with ddp.no_sync():
        plain_step(compiled, rank, 0)
        before = [param.grad.clone() for param in ddp.parameters()]
        x = batch(rank).requires_grad_()
        x.register_hook(fail)
        with pytest.raises(ValueError, match="a hook of the user's"):
            (compiled(x) * 0).sum().backward()
    for param, grad in zip(ddp.parameters(), before, strict=True):
        assert torch.equal(param.grad, grad)
