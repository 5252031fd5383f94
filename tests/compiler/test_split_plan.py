"""``paceline.compile(..., split=True)``: graphs are cut where the buckets of the wrapper's plan end."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.debugging import ExplainWithBackend
from torch._dynamo.utils import counters

import paceline
from paceline import DDP, MixedPrecision
from paceline.compiler.record import records_of
from tests.compiler._compare import batch, compare, in_sync, plain_step, same_grads, stack
from tests.compiler._models import BERT_WARNINGS, Broken, Checkpointed, Normed, Selective, Tied, compare_bert
from tests.compiler._split import Recorder
from tests.on_ranks import on_ranks

# A layer of `stack()` is 576 bytes, with its bias: one bucket each.
LAYER = 8 * 8 * 8 + 8 * 8


def split(inner, **options):
    return functools.partial(paceline.compile, inner=inner, split=True, **options)


def _parameters_of(recorder, params):
    """The positions in ``params`` of those that each part was given."""
    place = {tuple(param.shape): n for n, param in enumerate(params)}
    return [
        sorted(place[tuple(value.shape)] for value in inputs if isinstance(value, nn.Parameter))
        for inputs in recorder.examples
    ]


def _gradients(rank, backend, kind):
    recorder = Recorder(backend)
    seen = compare(rank, kind, compile=split(recorder), bucket_cap_mb=LAYER / 2**20)
    # Gradients come to the reducer through autograd; none was reported by a graph.
    assert seen.taps == 0
    assert max(seen.early) == 0
    assert seen.rounds[-1] == seen.buckets
    return len(recorder.graphs), seen


@pytest.mark.parametrize("kind", [stack, Normed, Tied, Broken, Checkpointed, Selective])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks()
def test_gradients_are_those_of_eager_training(rank, size, backend, kind):
    parts, seen = _gradients(rank, backend, kind)
    # There are as many as buckets, or twice as many if the plan was made anew. A checkpoint of two layers is not cut.
    assert parts >= (2 if kind is Selective else seen.buckets) > 1


@pytest.mark.full
@pytest.mark.timeout(600)
@on_ranks(timeout=500)
def test_gradients_in_inductor(rank, size):
    parts, seen = _gradients(rank, "inductor", stack)
    assert parts == seen.buckets == 4


@on_ranks()
def test_ranks_agree_on_graphs_that_are_cut(rank, size):
    """Ranks see other sizes, which all take for dynamic at once."""

    def step(model, rank, n):
        model(batch(rank, n, 3 + rank + 2 * n, 8)).square().sum().backward()

    recorder = Recorder("aot_eager")
    compiled = []

    def compile_(ddp):
        compiled.append(split(recorder, agreement=True)(ddp))
        return compiled[0]

    seen = compare(rank, stack, compile=compile_, step=step, bucket_cap_mb=LAYER / 2**20)
    assert [compilation.difference for compilation in compiled[0].forward._agreement.compilations] == [""]
    assert len(recorder.graphs) == seen.rounds[-1] == seen.buckets == 4


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "options"),
    [("aot_eager", {}), ("aot_eager", {"static_graph": True}), ("inductor", {"static_graph": True})],
    ids=["aot_eager", "aot_eager-static_graph", "inductor-static_graph"],
)
@on_ranks(allow_warnings=BERT_WARNINGS, timeout=560)
def test_bert_in_parts(rank, size, backend, options):
    recorder = Recorder(backend)
    seen = compare_bert(rank, split(recorder), options)
    assert len(recorder.graphs) > 2
    assert seen.rounds[-1] == seen.buckets > 2


@pytest.mark.full
@on_ranks()
def test_mixed_precision_casts_belong_to_the_part_that_uses_them(rank, size):
    config = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
    recorder = Recorder("aot_eager")
    seen = compare(rank, stack, compile=split(recorder), bucket_cap_mb=LAYER / 2**20, mixed_precision=config)
    # Each part casts what it uses.
    assert recorder.calls("linear") == [1, 1, 1, 1]
    assert recorder.calls("to") == [3, 2, 2, 2]
    assert seen.rounds[-1] == seen.buckets == 4


class EightLayers(nn.Module):
    """Each 1 MiB in float32, and of a shape of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(512 + 8 * n, 512 + 8 * n) / 25) for n in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.pad(x, (0, layer.shape[0] - x.shape[1])) @ layer
        return x


# The parameters in each part, whenever the graph was compiled.
PARTS = {
    # Made anew in the order of gradients after the first step; the graph follows.
    "bucket_cap_mb=3": ({"bucket_cap_mb": 3}, [[[0, 1, 2], [3, 4, 5], [6, 7]], [[0, 1], [2, 3, 4], [5, 6, 7]]]),
    # Filled from the end from the start, so the order that is learnt changes nothing.
    "bucket_cap_mb_list": ({"bucket_cap_mb_list": [1, 2, 5]}, [[[0, 1, 2, 3, 4], [5, 6], [7]]]),
    "bucket_cap_mb=0.5": ({"bucket_cap_mb": 0.5}, [[[n] for n in range(8)]]),
}


@pytest.mark.parametrize("options", PARTS)
@on_ranks()
def test_parts_are_the_buckets_of_the_plan(rank, size, options):
    torch._dynamo.reset()
    options, expected = PARTS[options]
    ddp = DDP(EightLayers(), **options)
    params = list(ddp.parameters())
    recorder = Recorder("eager")
    compiled = paceline.compile(ddp, inner=recorder, split=True, fullgraph=True)
    found = []
    for _ in range(4):
        recorder.examples.clear()
        planned = [sorted(bucket.params) for bucket in reversed(ddp.plan.buckets)]
        compiled(torch.ones(2, 512)).sum().backward()
        if recorder.examples:
            # It was compiled in this step, for the plan of this step.
            assert _parameters_of(recorder, params) == planned
            found.append(planned)
    assert found == expected
    record = records_of(ddp._reducer)[-1]
    assert len(record.cuts) == len(ddp.plan.buckets) - 1
    # Records give parameters by their names in the module. Those that leave first stand at the end.
    last = ", ".join(ddp.plan.names(ddp.plan.buckets[0].params)[:3])
    assert last in record.cuts[-1]


@on_ranks()
def test_a_graph_is_compiled_anew_when_the_plan_has_learnt_the_order(rank, size):
    """Layers are registered in another order than the one they are used in."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).double()

        def forward(self, x):
            for n in (2, 0, 3, 1):
                x = self.layers[n](x).tanh()
            return x

    recorder = Recorder("aot_eager")
    seen = compare(rank, Shuffled, compile=split(recorder), steps=6, bucket_cap_mb=LAYER / 2**20)
    assert seen.graphs == 2
    # At first some bucket is complete only after one that comes later in the plan; then each has its own part.
    assert len(recorder.graphs) > seen.buckets == 4


@on_ranks()
def test_ways_to_compile(rank, size):
    """Also where the module is compiled by itself, where a function calls the wrapper, in ``no_sync``, without grad."""
    torch._dynamo.reset()
    cap = LAYER / 2**20
    eager = DDP(stack(), bucket_cap_mb=cap)
    recorder = Recorder("aot_eager")
    inside = DDP(paceline.compile(stack(), inner=recorder, split=True), bucket_cap_mb=cap)
    wrapper = DDP(stack(), bucket_cap_mb=cap)
    step = paceline.compile(lambda x: wrapper(x).square().sum(), inner=recorder, split=True)
    for n in range(3):
        for ddp in (eager, inside, wrapper):
            ddp.zero_grad()
            loss = step if ddp is wrapper else lambda x, ddp=ddp: ddp(x).square().sum()
            with ddp.no_sync():
                loss(batch(rank, 2 * n)).backward()
            loss(batch(rank, 2 * n + 1)).backward()
        same_grads(eager, inside)
        same_grads(eager, wrapper)
    in_sync(inside)
    assert len(recorder.graphs) == 2 * 4
    recorder.graphs.clear()
    with torch.no_grad():
        assert torch.allclose(inside(batch(rank)), eager(batch(rank)))
    # There is no backward to cut for.
    assert len(recorder.graphs) == 1
    recorder.graphs.clear()
    # A module that no wrapper has is compiled whole.
    alone = stack()
    plain_step(paceline.compile(alone, inner=recorder, split=True), rank, 0)
    assert len(recorder.graphs) == 1
    dist.barrier()


@on_ranks()
def test_two_wrappers_in_one_graph(rank, size):
    """Two wrappers in one graph: it is cut for both."""
    torch._dynamo.reset()
    models = [[DDP(stack(2), bucket_cap_mb=LAYER / 2**20) for _ in range(2)] for _ in range(2)]

    def step(pair, x):
        return pair[1](pair[0](x)).square().sum()

    recorder = Recorder("aot_eager")
    compiled = paceline.compile(step, inner=recorder, split=True, fullgraph=True)
    for n in range(2):
        for pair, run in zip(models, (step, compiled), strict=True):
            for ddp in pair:
                ddp.zero_grad()
            run(pair, batch(rank, n)).backward()
        for eager, ours in zip(*models, strict=True):
            same_grads(eager, ours)
        assert DDP._get_active_ddp_module() is None
    assert len(recorder.graphs) == 4


@on_ranks()
def test_explain_shows_where_a_wrapper_was_cut(rank, size):
    torch._dynamo.reset()
    counters.clear()
    ddp = DDP(stack(), bucket_cap_mb=LAYER / 2**20)
    explain = ExplainWithBackend("aot_eager")
    plain_step(paceline.compile(ddp, inner=explain, split=True), rank, 0)
    found = explain.output()
    assert (found.graph_count, found.graph_break_count) == (4, 3)
    (record,) = records_of(ddp._reducer)
    assert [reason.reason for reason in found.break_reasons] == record.cuts
    assert all(f"{n}.bias, {n}.weight" in cut for n, cut in zip((2, 4, 6), record.cuts, strict=True))
    ours = paceline.explain(ddp, batch(rank), split=True)
    assert [len(graph.cuts) for graph in ours.graphs] == [3]
    assert all(cut in str(ours) for cut in ours.graphs[0].cuts)
    assert "reported by no graph, as graphs are split: 0.weight" in str(ours)
    # The gradients of a part come when its backward ends, and buckets leave: all but the last before the end.
    assert [departure.fraction < 1 for departure in ours.departures] == [True, True, True, False]


@on_ranks()
def test_a_backend_that_fails_on_a_part(rank, size):
    """A backend that fails on the third part, on one rank."""
    torch._dynamo.reset()
    ddp = DDP(stack(), bucket_cap_mb=LAYER / 2**20)
    calls = []

    def fails(gm, example_inputs):
        calls.append(gm)
        if rank == 1 and len(calls) == 3:
            raise ValueError("no third part")
        return gm.forward

    compiled = paceline.compile(ddp, inner=fails, split=True)
    kind = torch._dynamo.exc.BackendCompilerFailed if rank == 1 else paceline.errors.PeerFailedError
    with pytest.raises(kind, match="no third part"):
        plain_step(compiled, rank, 0)


def test_one_rank_cannot_compile_parts_for_all():
    with pytest.raises(paceline.errors.BadArgumentError, match="split=True and once=True"):
        paceline.compile(nn.Linear(2, 2), split=True, once=True)
