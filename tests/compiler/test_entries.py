"""The ways in which a model gets compiled: around the wrapper, inside of it, by itself, with breaks."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

import paceline
from paceline import DDP
from paceline.compiler import Backend
from paceline.compiler.taps import ops
from tests.compiler._compare import Watch, batch, compare, in_sync, plain_step, same_grads, stack
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "later"])
@on_ranks()
def test_a_module_that_is_compiled_inside_of_its_wrapper(rank, size, how, backend):
    """The module is compiled by itself, and wrapped then (or before)."""

    def compiled():
        module = stack()
        if how == "torch.compile":
            return torch.compile(module, backend=backend, fullgraph=True)
        if how == "module.compile":
            module.compile(backend=backend, fullgraph=True)
        return module

    torch._dynamo.reset()
    counters.clear()
    cap = 600 / 2**20
    eager, ours = DDP(stack(), bucket_cap_mb=cap), DDP(compiled(), bucket_cap_mb=cap)
    if how == "later":
        ours.module.compile(backend=backend, fullgraph=True)
    watch = Watch(ours)
    for n in range(3):
        for model in (eager, ours):
            model.zero_grad()
            plain_step(model, rank, n)
        same_grads(eager, ours, f"step {n}")
    seen = watch.result()
    assert seen.graphs == 1
    assert seen.rounds == [seen.rounds[0], seen.buckets, seen.buckets]
    assert seen.early == [n - 1 for n in seen.rounds]


@on_ranks()
def test_the_compile_method_of_the_wrapper(rank, size):
    def compile_(ddp):
        ddp.compile(backend="aot_eager", fullgraph=True)
        return ddp

    seen = compare(rank, stack, compile=compile_)
    assert seen.graphs == 1
    assert min(seen.early) > 0


def _training_step(rank, size, inner, fullgraph):
    """A compiled function that computes the loss, through the wrapper or through its module."""
    torch._dynamo.reset()
    counters.clear()
    cap = 600 / 2**20
    eager, ours = DDP(stack(), bucket_cap_mb=cap), DDP(stack(), bucket_cap_mb=cap)
    watch = Watch(ours)

    def loss(model, x):
        out = model(x * 2)
        # A use of parameters outside of the module, in the same graph.
        return out.square().sum() + sum(param.pow(3).sum() for param in model.parameters())

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=fullgraph)
    for n in range(3):
        for model, run in ((eager, loss), (ours, compiled)):
            model.zero_grad()
            run(model.module if inner and model is ours else model, batch(rank, n)).backward()
        same_grads(eager, ours)
    return watch.result()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_loss_that_calls_the_wrapper(ranks, fullgraph):
    for seen in ranks(_training_step, False, fullgraph):
        assert seen.graphs == 1
        assert seen.rounds[-1] == seen.buckets
        assert min(seen.early) > 0


def test_a_compiled_loss_that_calls_the_module_inside(ranks):
    for seen in ranks(_training_step, True, True):
        assert seen.graphs == 1


@on_ranks()
def test_a_compiled_training_step(rank, size):
    """Forward, backward and the optimizer in one compiled function."""
    torch._dynamo.reset()
    eager, ours = DDP(stack()), DDP(stack())
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, ours)}

    def step(model, x):
        optimizers[model].zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizers[model].step()
        return loss

    compiled = torch.compile(step, backend="aot_eager")
    for n in range(3):
        step(eager, batch(rank, n))
        compiled(ours, batch(rank, n))
        for a, b in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    in_sync(ours)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = stack(2), stack(2)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("how", ["around", "paceline.compile"])
@on_ranks()
def test_graph_breaks_are_counted_across(rank, size, how):
    compile_ = {
        "around": functools.partial(torch.compile, backend="aot_eager"),
        "paceline.compile": functools.partial(paceline.compile, inner="aot_eager"),
    }[how]
    seen = compare(rank, Broken, compile=compile_, steps=4)
    assert seen.rounds[-1] == seen.buckets
    if how == "paceline.compile":
        assert seen.taps == 4
        assert seen.early[-1] == seen.buckets - 1


@on_ranks()
def test_the_backend_by_name(rank, size):
    assert "paceline" in torch._dynamo.list_backends()
    seen = compare(rank, stack, compile=functools.partial(torch.compile, backend="paceline"))
    assert seen.graphs == 1
    assert min(seen.early) > 0


@pytest.mark.full
@pytest.mark.parametrize("backend", ["inductor", "paceline"])
@on_ranks()
def test_inductor_keeps_the_order_of_the_graph(rank, size, backend):
    """What inductor is told when it compiles a graph with taps."""
    from torch._inductor import compile_fx as inductor  # warns of a deprecated part of torch, which ranks let through

    torch._dynamo.reset()
    told = []
    compile_fx = inductor.compile_fx

    def spy(*args, **kwargs):
        # It calls itself once more, with the patches in force.
        told.extend([kwargs["config_patches"]] if kwargs.get("config_patches") else [])
        return compile_fx(*args, **kwargs)

    with mock.patch.object(inductor, "compile_fx", spy):
        plain_step(torch.compile(DDP(stack(), bucket_cap_mb=600 / 2**20), backend=backend), rank, 0)
    assert told == [{"reorder_for_peak_memory": False}]


@pytest.mark.full
@on_ranks()
def test_the_backend_by_name_takes_modes_and_options(rank, size):
    compile_ = functools.partial(torch.compile, backend="paceline")
    found = [compare(rank, stack, compile=functools.partial(compile_, options={"inner": "aot_eager"}))]
    given = []

    def mine(gm, example_inputs, options):
        given.append((options, sum(node.target is ops.tap for node in gm.graph.nodes)))
        return gm.forward

    found.append(compare(rank, stack, compile=functools.partial(compile_, options={"inner": mine, "depth": 3})))
    ((options, taps),) = given
    assert options == {"depth": 3}
    assert taps > 0
    found.append(compare(rank, stack, compile=functools.partial(compile_, mode="reduce-overhead")))
    found.append(compare(rank, stack, compile=functools.partial(compile_, options={"max_fusion_size": 8})))
    assert all(seen.graphs == 1 and min(seen.early) > 0 for seen in found)


class Blocks(nn.Module):
    """More blocks than Dynamo compiles one piece of code for, each compiled by itself."""

    def __init__(self, compile_=None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(stack(1) for _ in range(10))
        self.calls = [compile_(block) if compile_ else block for block in self.blocks]

    def forward(self, x):
        for call in self.calls:
            x = torch.tanh(call(x))
        return x


@on_ranks()
def test_blocks_that_are_compiled_one_by_one_share_a_graph_and_report_their_own(rank, size):
    torch._dynamo.reset()
    counters.clear()
    runs = []

    def mine(gm, example_inputs):
        def run(*args):
            runs.append(1)
            return gm.forward(*args)

        return run

    assert len({Backend(mine), Backend(mine), Backend(mine, split=True), Backend(print)}) == 3
    models = Blocks(functools.partial(paceline.compile, inner=mine)), Blocks()
    ours, plain = (DDP(model, bucket_cap_mb=600 / 2**20) for model in models)
    watch = Watch(ours)
    for n in range(3):
        for ddp in (ours, plain):
            ddp.zero_grad()
            runs.clear()
            plain_step(ddp, rank, n)
            assert len(runs) == (10 if ddp is ours else 0)
        same_grads(ours, plain)
    seen = watch.result()
    # One for the first, whose input needs no gradient, and one for all others.
    assert (seen.graphs, seen.taps) == (2, 2)
    # All but the last, which leaves when backward has ended.
    assert seen.early == [seen.buckets - 1] * 3
    assert seen.buckets > 5


@on_ranks()
def test_a_backend_of_the_users_own(rank, size):
    calls = []

    def mine(gm, example_inputs):
        calls.append(len(gm.graph.nodes))
        return gm.forward

    seen = compare(rank, stack, compile=functools.partial(torch.compile, backend=mine, fullgraph=True))
    assert len(calls) == 1
    assert min(seen.early) > 0


@on_ranks()
def test_modes_and_options(rank, size):
    compile_ = functools.partial(torch.compile, fullgraph=True, options={"max_fusion_size": 8})
    first = compare(rank, stack, compile=compile_)
    second = compare(rank, stack, compile=functools.partial(paceline.compile, mode="default", fullgraph=True))
    pair = first, second
    assert all(seen.graphs == 1 and min(seen.early) > 0 for seen in pair)


@on_ranks()
def test_sparse_gradients_fall_back_with_a_reason(rank, size):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embed, self.last = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8)
            self.double()

        def forward(self, x):
            return self.last(self.embed((x.abs() * 3).long().clamp(max=9)))

    compare(rank, Words, compile=functools.partial(torch.compile, backend="aot_eager"))
    found = paceline.explain(DDP(Words(), bucket_cap_mb=600 / 2**20), batch(rank))
    assert found.untapped["embed.weight"] == "its gradient is sparse"
    assert "reported by no graph, as its gradient is sparse: embed.weight" in str(found)


class Clamped(nn.Module):
    """Parameters that forward itself changes, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()

    def forward(self, x):
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.2, 0.2)
        self.layers[2].weight.detach().clamp_(-0.2, 0.2)
        self.layers[4].weight.data.clamp_(-0.2, 0.2)
        return self.layers(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks()
def test_parameters_that_forward_changes_in_place_are_not_tapped(rank, size, backend):
    seen = compare(rank, Clamped, compile=functools.partial(torch.compile, backend=backend, fullgraph=True))
    seen, untapped = seen, paceline.explain(DDP(Clamped(), bucket_cap_mb=600 / 2**20), batch(rank)).untapped
    # With eager it may be one of these, which autograd brings in between, that completes a bucket.
    assert max(seen.early) > 0
    names = [f"layers.{n}.weight" for n in (0, 2, 4)]
    assert {name: untapped.get(name) for name in names} == dict.fromkeys(names, "forward changes it in place")


@on_ranks()
def test_no_configuration_is_changed(rank, size):
    """Nothing of torch's own configuration is changed by any of this."""
    torch._dynamo.reset()
    before = torch._dynamo.config.save_config(), torch._inductor.config.save_config()
    ddp = DDP(stack())
    plain_step(torch.compile(ddp, backend="aot_eager"), rank, 0)
    assert (torch._dynamo.config.save_config(), torch._inductor.config.save_config()) == before
    dist.barrier()
