"""The ways in which a model gets compiled: around the wrapper, inside of it, by itself, with breaks."""

from __future__ import annotations

import functools
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import DDP
from paceline.compiler import Backend
from paceline.compiler.taps import ops
from tests.compiler._compare import batch, compare, in_sync, plain_step, stack
from tests.compiler._models import Broken
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "later"])
@on_ranks()
def test_a_module_that_is_compiled_inside_of_its_wrapper(rank, size, how, backend):
    """The module is compiled by itself, and wrapped then (or before)."""

    def inside(module):
        if how == "torch.compile":
            return torch.compile(module, backend=backend, fullgraph=True)
        if how == "module.compile":
            module.compile(backend=backend, fullgraph=True)
        return module

    def compile_(ddp):
        if how == "later":
            ddp.module.compile(backend=backend, fullgraph=True)
        return ddp

    seen = compare(rank, stack, inside=inside, compile=compile_)
    assert seen.graphs == 1
    assert seen.rounds == [seen.rounds[0], seen.buckets, seen.buckets]
    assert seen.early == [n - 1 for n in seen.rounds]


@pytest.mark.parametrize(("inner", "fullgraph"), [(False, True), (False, False), (True, True)])
@on_ranks()
def test_a_compiled_loss_that_calls_the_wrapper_or_the_module_inside(rank, size, inner, fullgraph):
    def loss(model, x):
        out = model(x * 2)
        # A use of parameters outside of the module, in the same graph.
        return out.square().sum() + sum(param.pow(3).sum() for param in model.parameters())

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=fullgraph)

    def step(model, rank, n):
        run, called = (loss, model) if isinstance(model, DDP) else (compiled, model())
        run(called, batch(rank, n)).backward()

    seen = compare(rank, stack, compile=lambda ddp: lambda: ddp.module if inner else ddp, step=step)
    assert seen.graphs == 1
    if not inner:
        assert seen.rounds[-1] == seen.buckets
        assert min(seen.early) > 0


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
    runs = []

    def mine(gm, example_inputs):
        def run(*args):
            runs.append(1)
            return gm.forward(*args)

        return run

    assert len({Backend(mine), Backend(mine), Backend(mine, split=True), Backend(print)}) == 3
    compiled = functools.partial(Blocks, functools.partial(paceline.compile, inner=mine))
    seen = compare(rank, Blocks, inside=lambda _: compiled(), compile=lambda ddp: ddp)
    assert len(runs) == 3 * 10
    # One for the first, whose input needs no gradient, and one for all others.
    assert (seen.graphs, seen.taps) == (2, 2)
    # All but the last, which leaves when backward has ended.
    assert seen.early == [seen.buckets - 1] * 3
    assert seen.buckets > 5


given = []


def mine(gm, example_inputs, **more):
    given.append((more, sum(node.target is ops.tap for node in gm.graph.nodes)))
    return gm.forward


def compile_method(ddp):
    ddp.compile(backend="aot_eager", fullgraph=True)
    return ddp


by_name = functools.partial(torch.compile, backend="paceline")
# Ways to compile, each with what a backend of the user's own is given besides the graph.
WAYS = {
    "a backend of the user's own": (functools.partial(torch.compile, backend=mine, fullgraph=True), {}),
    "by name": (functools.partial(by_name, options={"inner": mine, "depth": 3}), {"options": {"depth": 3}}),
    "by name, with another": (functools.partial(by_name, options={"inner": "aot_eager"}), None),
    "ddp.compile()": (compile_method, None),
    "inductor by name": (by_name, None),
    "mode by name": (functools.partial(by_name, mode="reduce-overhead"), None),
    "options by name": (functools.partial(by_name, options={"max_fusion_size": 8}), None),
    "options": (functools.partial(torch.compile, fullgraph=True, options={"max_fusion_size": 8}), None),
    "mode": (functools.partial(paceline.compile, mode="default", fullgraph=True), None),
}
QUICK = ("a backend of the user's own", "by name", "by name, with another", "ddp.compile()")


@pytest.mark.parametrize("way", [pytest.param(w, marks=[] if w in QUICK else pytest.mark.full) for w in WAYS])
@on_ranks()
def test_backends_modes_and_options(rank, size, way):
    assert "paceline" in torch._dynamo.list_backends()
    compile_, expected = WAYS[way]
    given.clear()
    seen = compare(rank, stack, compile=compile_)
    assert seen.graphs == 1
    assert min(seen.early) > 0
    assert given == ([] if expected is None else [(expected, seen.taps)])
    assert seen.taps > 0


MODE = "max-autotune-no-cudagraphs"
# Ways to compile with Inductor, each with the mode and the options that it is to be told.
FOR_INDUCTOR = {
    "by name": (by_name, None, {}),
    "mode by name": (functools.partial(by_name, mode=MODE), MODE, {}),
    "options by name": (functools.partial(by_name, options={"max_fusion_size": 8}), None, {"max_fusion_size": 8}),
    "options": (functools.partial(torch.compile, options={"max_fusion_size": 8}), None, {"max_fusion_size": 8}),
    "paceline.compile": (paceline.compile, None, {}),
    "its mode": (functools.partial(paceline.compile, mode=MODE), MODE, {}),
    "its options": (functools.partial(paceline.compile, options={"max_fusion_size": 8}), None, {"max_fusion_size": 8}),
}


@on_ranks()
def test_inductor_is_told_its_mode_and_options_and_to_keep_the_order(rank, size):
    """Inductor itself, which takes seconds, is not run: what calls it is looked at."""
    from torch._inductor import compile_fx as inductor
    from torch._inductor import list_mode_options

    for way, (compile_, mode, options) in FOR_INDUCTOR.items():
        torch._dynamo.reset()
        with mock.patch.object(inductor, "compile_fx", side_effect=lambda gm, *_, **__: gm.forward) as compile_fx:
            plain_step(compile_(DDP(stack(), bucket_cap_mb=600 / 2**20)), rank, 0)
        (call,) = compile_fx.call_args_list
        expected = {**(list_mode_options(mode) if mode else {}), **options, "reorder_for_peak_memory": False}
        assert call.kwargs["config_patches"] == expected, way
    assert list_mode_options(MODE)


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
    untapped = paceline.explain(DDP(Clamped(), bucket_cap_mb=600 / 2**20), batch(rank)).untapped
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


def test_type_checkers_see_what_was_given_to_compile():
    hints = typing.get_type_hints(paceline.compile)
    assert isinstance(hints["model"], typing.TypeVar)
    assert hints["return"] is hints["model"]
