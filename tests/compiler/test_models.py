"""Models of real kinds: BERT, attention with a score function, checkpointing of chosen operators, convolutions."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from paceline import DDP
from tests.compiler._compare import batch, compare, whole
from tests.compiler._models import BERT_WARNINGS, Attentive, Selective, compare_bert
from tests.on_ranks import on_ranks


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["", "static_graph"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(allow_warnings=BERT_WARNINGS, timeout=560)
def test_bert(rank, size, backend, options):
    seen = compare_bert(rank, functools.partial(torch.compile, backend=backend), options)
    assert seen.graphs == 1
    assert seen.early[-1] > 1
    assert seen.rounds[-1] == seen.buckets


@on_ranks()
def test_flex_attention_compiled_with_the_model_and_by_itself(rank, size):
    """Forward only: torch has no backward of it on the CPU."""
    torch._dynamo.reset()
    local = torch.compile(flex_attention, backend="aot_eager")
    eager, in_part, ours = (DDP(Attentive(attention)) for attention in (flex_attention, local, flex_attention))
    x = batch(rank, 0, 2, 16, 16).float()
    with torch.no_grad():
        want = torch.compile(eager, backend="eager")(x)
        torch.testing.assert_close(in_part(x), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole("aot_eager")(ours)(x), want, rtol=1e-4, atol=1e-4)


@on_ranks()
def test_checkpointing_of_chosen_operators(rank, size):
    seen = compare(rank, Selective, compile=whole("aot_eager"))
    assert seen.graphs == 1
    assert min(seen.early) > 0


class Convolutional(nn.Module):
    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        torch.manual_seed(5)
        # There is no bias: the norm would take it out again, and leave nothing but rounding for its gradient.
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)
        self.double().to(memory_format=memory_format)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["", "channels_last"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks()
def test_convolutions(rank, size, backend, memory_format):
    def step(model, rank, n):
        x = batch(rank, n, 2, 3, 8, 8).to(memory_format=memory_format)
        model(x).square().sum().backward()

    seen = compare(rank, functools.partial(Convolutional, memory_format), compile=whole(backend), step=step)
    assert seen.graphs == 1
    assert seen.rounds[-1] == seen.buckets
    # Inductor has layouts of its own for the gradients: what goes on has that of the parameter, and is not copied.
    assert seen.unknown[-1] == 0


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@on_ranks()
def test_gradients_are_reported_where_they_are_computed(rank, size, backend):
    """Inductor would compute the gradients of all weights at the end, to save memory, were it not asked not to."""
    torch._dynamo.reset()
    ddp = DDP(Residual(), bucket_cap_mb=0.05)
    reducer, blocks = ddp._reducer, []
    report = reducer.gradients_early

    def noted(pairs):
        blocks.extend(int(reducer.slots.of(param).name.split(".")[1]) for param, *_ in pairs if param.dim() == 2)
        return report(pairs)

    reducer.gradients_early = noted
    whole(backend)(ddp)(batch(rank, 0, 32, 64).float()).square().sum().backward()
    assert blocks == [3, 3, 2, 2, 1, 1, 0, 0]
