"""What a compiled forward returns: a backward of any of it is noticed, as in eager mode."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from paceline import DDP
from tests.compiler._compare import batch, compare, same_grads, stack
from tests.on_ranks import on_ranks


@dataclass
class Pair:
    main: Tensor
    stray: Tensor


# How two outputs are returned, and how they are read.
KINDS = {
    "tuple": (lambda main, stray: (main, stray), lambda output: output),
    "dict": (
        lambda main, stray: {"first": [main], "second": (stray,)},
        lambda output: (output["first"][0], output["second"][0]),
    ),
    "dataclass": (Pair, lambda output: (output.main, output.stray)),
}


class TwoHeads(nn.Module):
    """Of two outputs one uses no parameter."""

    def __init__(self, kind: str, *, breaks: bool) -> None:
        super().__init__()
        self.layers, self.kind, self.breaks = stack(), kind, breaks

    def forward(self, x, z):
        main = self.layers(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return KINDS[self.kind][0](main, z * 2)


def _step(model, rank, n, kind):
    z = batch(rank, n).requires_grad_()
    main, stray = KINDS[kind][1](model(batch(rank, n), z))
    if rank == 0:
        # This gradient is this rank's own.
        torch.autograd.grad(stray.sum(), z, retain_graph=True)
    used = stray if rank == 0 and n != 1 else main
    used.square().sum().backward()
    assert used is main or torch.equal(z.grad, 8 * z)


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks()
def test_an_output_that_leads_to_no_parameter(rank, size, backend, breaks):
    for kind in KINDS:
        seen = compare(
            rank,
            functools.partial(TwoHeads, kind, breaks=breaks),
            compile=functools.partial(torch.compile, backend=backend, fullgraph=not breaks),
            step=functools.partial(_step, kind=kind),
            steps=3,
        )
        assert len(seen.rounds) == 3
        assert breaks or seen.graphs == 1


@on_ranks()
def test_what_else_is_in_the_graph_is_none_of_its_outputs(rank, size):
    """A compiled step with something else in it, whose backward is none of the wrapper's business."""
    torch._dynamo.reset()
    counters.clear()
    ddp, other = DDP(stack()), stack(1)

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def both(x):
        return ddp(x).sum(), other(x).sum()

    mine, others = both(batch(rank))
    if rank == 0:
        others.backward()
        assert all(param.grad is None for param in ddp.parameters())
    dist.barrier()
    mine.backward()
    eager = DDP(stack())
    eager(batch(rank)).sum().backward()
    same_grads(eager, ddp)


@on_ranks()
def test_unused_parameters_are_looked_for_behind_a_graph_break(rank, size):
    told = []

    def listen(ddp):
        expect = ddp._reducer.expect_unused

        def listening(unused):
            told.append(unused)
            expect(unused)

        ddp._reducer.expect_unused = listening

    compare(
        rank,
        functools.partial(TwoHeads, "tuple", breaks=True),
        compile=functools.partial(torch.compile, backend="aot_eager"),
        step=lambda model, rank, n: model(batch(rank, n), batch(rank, n))[0].square().sum().backward(),
        prepare=listen,
        find_unused_parameters=True,
    )
    # Three steps in eager mode and three compiled: all are used.
    assert told == [frozenset()] * 6


class Passing(nn.Module):
    """Returns what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()

    def forward(self, x, z):
        return self.layers(x), z


@on_ranks()
def test_an_input_that_is_returned(rank, size):
    def step(model, rank, n):
        main, passed = model(batch(rank, n), batch(rank, n).requires_grad_())
        (passed if rank == 0 and n == 1 else main).square().sum().backward()

    seen = compare(
        rank,
        Passing,
        compile=functools.partial(torch.compile, backend="aot_eager", fullgraph=True),
        step=step,
    )
    assert seen.graphs == 1
    assert len(seen.rounds) == 3
