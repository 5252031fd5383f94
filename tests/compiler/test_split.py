"""``DDPOptimizer``: where graphs are cut, what the parts are, and why; beside torch's class of that name."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends import distributed as torchs
from torch._dynamo.backends.debugging import ExplainWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from paceline import DDP
from paceline.compiler import DDPOptimizer
from paceline.errors import BadArgumentError
from tests.compiler._models import Attentive, Selective
from tests.compiler._split import MATRIX, WIDTH, Matrices, Recorder, cut_and_compare, rows
from tests.on_ranks import on_ranks


def _layers(n: int = 4, width: int = WIDTH) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(width, width, bias=False).double() for _ in range(n)]


def stack_of(n: int = 4, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(part for layer in _layers(n, width) for part in (layer, nn.ReLU())))


def biased() -> nn.Module:
    """Layers of very different sizes, as the model of torch's tests has."""
    torch.manual_seed(5)
    pairs = itertools.pairwise([10, 50, 50, 50, 5])
    return nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU()))).double()


class Functional(nn.Module):
    """Parameters that are used without their module being called; some also by calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layers())
        self.extra = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        for layer in self.layers[:3]:
            x = F.linear(x, layer.weight).relu()
        return self.layers[3](x * self.extra)


class Nested(nn.Module):
    """Modules whose forward is called as a method, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = stack_of(2), Functional()
        self.free = nn.ReLU()

    def forward(self, x):
        return self.outer.forward(self.free.forward(self.inner.forward(x)))


class Checkpointed(nn.Module):
    def __init__(self, *, wrapped: bool) -> None:
        super().__init__()
        layers = _layers()
        self.layers = nn.ModuleList(checkpoint_wrapper(layer) if wrapped else layer for layer in layers)
        self.wrapped = wrapped

    def forward(self, x):
        for layer in self.layers:
            x = torch.sin(layer(x) if self.wrapped else checkpoint(layer, x, use_reentrant=False))
        return x


class Contexts(nn.Module):
    """Cut inside of autocast, inside of no_grad, and inside of both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.float() for layer in _layers(6))

    def forward(self, x):
        first, second, third, fourth, fifth, last = self.layers
        x = first(x.float())
        with torch.autocast("cpu", torch.bfloat16):
            x = second(x)
            with torch.no_grad():
                y = third(fourth(x))
                with torch.autocast("cpu", enabled=False):
                    y = fifth(y.float())
            x = third(x + y)
        return last(x.float()).double()


def normed() -> nn.Module:
    """Buffers that forward changes, in two parts."""
    return nn.Sequential(*(part for layer in _layers() for part in (layer, nn.BatchNorm1d(WIDTH).double())))


class Buffered(Matrices):
    """Frozen parameters and buffers are not reduced, and nothing is cut for them."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)
        self.register_buffer("shift", torch.ones(WIDTH, WIDTH).double())

    def forward(self, x):
        return ((x @ self.a + 1) @ self.b @ self.shift) @ self.c


class Twice(Matrices):
    """A parameter that is used twice, in one part or in two."""

    def forward(self, x):
        return ((x @ self.a) @ self.b @ self.c).relu() @ self.b


# Each with the caps to try, and an input.
PAIRS = {
    "stack": (stack_of, [MATRIX, MATRIX + 1, 3 * MATRIX, 100 * MATRIX], rows()),
    "biased": (biased, [4400, 20400, 20401, 2**20], torch.ones(3, 10, dtype=torch.float64)),
    "functional": (Functional, [1, MATRIX, 2 * MATRIX], rows()),
    "nested": (Nested, [1, MATRIX, 3 * MATRIX], rows()),
    "checkpoint": (lambda: Checkpointed(wrapped=False), [MATRIX, 2 * MATRIX], rows()),
    "checkpoint_wrapper": (lambda: Checkpointed(wrapped=True), [MATRIX, 2 * MATRIX], rows()),
    "contexts": (Contexts, [MATRIX // 2], rows()),
    "norms": (normed, [MATRIX, 2 * MATRIX], rows()),
    "buffers": (Buffered, [MATRIX, 2 * MATRIX], rows()),
}


def _as_torch_does(rank, size, names):
    found = []
    for name in names:
        make, caps, x = PAIRS[name]
        for cap in caps:
            for first in {1, cap}:
                ours, theirs = (
                    cut_and_compare(make(), (x,), cap=cap, first_cap=first, optimizer=optimizer)
                    for optimizer in (DDPOptimizer, torchs.DDPOptimizer)
                )
                assert len(ours[1].graphs) == len(theirs[1].graphs), (name, cap, first)
                sizes = [bucket.size for bucket in ours[0].buckets]
                assert sizes == [bucket.size for bucket in theirs[0].buckets], (name, cap, first)
                for a, b in zip(ours[0].buckets, theirs[0].buckets, strict=True):
                    assert a.params == b.params
                found.append(len(sizes))
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_as_many_parts_as_torch_makes(ranks, name):
    (found,) = ranks(_as_torch_does, [name], world_size=1)
    assert len(set(found)) > 1 or name == "contexts"


def _in_compilers(rank, size, backend):
    for name in ("biased", "contexts", "nested", "norms", "checkpoint", "checkpoint_wrapper"):
        make, caps, x = PAIRS[name]
        cap = caps[0]
        optimizer, _ = cut_and_compare(make(), (x,), (x * 2,), cap=cap, backend=backend)
        assert len(optimizer.buckets) > 2, name
    optimizer, _ = cut_and_compare(Selective(), (rows(),), cap=2 * MATRIX, backend=backend)
    assert len(optimizer.buckets) == 2


@pytest.mark.full
def test_parts_in_aot_eager(ranks):
    ranks(_in_compilers, "aot_eager", world_size=1)


@on_ranks(world_size=1)
def test_contexts_are_left_and_entered_again(rank, size):
    _, recorder = cut_and_compare(Contexts(), (rows(),), cap=1)
    # Left where a part ends, entered where the next begins.
    assert recorder.calls("_enter_autocast") == recorder.calls("_exit_autocast")
    assert sum(recorder.calls("_enter_autocast")) > 2
    for gm in recorder.graphs:
        modes = [node.args[0] for node in gm.graph.nodes if node.target is torch._C._set_grad_enabled]
        assert not modes or modes[-1] is True
    assert torch.is_grad_enabled()


@on_ranks(world_size=1)
def test_buckets_say_what_is_in_them_and_cuts_why_they_are_there(rank, size):
    model = stack_of()
    optimizer, _ = cut_and_compare(model, (rows(),), cap=2 * MATRIX, first_cap=1)
    # The order is that of forward. The front, without a parameter, would be empty, and is not there.
    weights = [model[n].weight for n in (0, 2, 4, 6)]
    assert [bucket.param_ids for bucket in optimizer.buckets] == [
        [id(weights[0])],
        [id(weights[2]), id(weights[1])],
        [id(weights[3])],
    ]
    assert [bucket.size for bucket in optimizer.buckets] == [MATRIX, 2 * MATRIX, MATRIX]
    assert "modules" in optimizer.buckets[0].params[0]
    assert [str(cut) for cut in optimizer.cuts] == [
        f"cut before {cut.operator}: there backward completes a bucket of 0.00 MB ({', '.join(bucket.params)})"
        for cut, bucket in zip(optimizer.cuts, optimizer.buckets[1:], strict=True)
    ]


@on_ranks(world_size=1)
def test_a_parameter_that_is_used_twice(rank, size):
    optimizer, _ = cut_and_compare(Twice(), (rows(),))
    assert [len(bucket.params) for bucket in optimizer.buckets] == [1, 1, 1, 1]
    optimizer, _ = cut_and_compare(Twice(), (rows(),), cap=2 * MATRIX)
    assert [bucket.size for bucket in optimizer.buckets] == [2 * MATRIX, 2 * MATRIX]
    # Other than in torch's, it has one gradient, and is counted once in each bucket.
    optimizer, _ = cut_and_compare(Twice(), (rows(),), cap=3 * MATRIX)
    assert [bucket.size for bucket in optimizer.buckets] == [3 * MATRIX]


class Fronted(Matrices):
    """Operators in front that use no parameter."""

    def forward(self, x):
        x = torch.sin(torch.cos(x))
        return torch.tanh(x @ self.a) @ self.b


@on_ranks(world_size=1)
def test_a_front_without_parameters_joins_the_part_behind_it(rank, size):
    optimizer, recorder = cut_and_compare(Fronted(), (rows(),))
    assert [bucket.size for bucket in optimizer.buckets] == [MATRIX, MATRIX]
    assert recorder.calls("sin") == [1, 0]


def _kept_ids(model):
    """The ids of the parameters in the buckets of a compiled ``model``."""
    optimizer, _ = cut_and_compare(model, (rows(),))
    return [key for bucket in optimizer.buckets for key in bucket.param_ids]


@pytest.mark.parametrize("wrapper", ["is held", "is gone", "was never made"])
@pytest.mark.parametrize("wrap", [DDP, TorchDDP], ids=["ours", "torchs"])
@on_ranks(world_size=1)
def test_ignored_parameters_are_in_no_bucket(rank, size, wrap, wrapper):
    model = stack_of()
    wrap._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "4.weight"])
    ddp = None if wrapper == "was never made" else wrap(model)
    if wrapper == "is gone":
        ddp = None
    assert _kept_ids(model) == [id(model[0].weight), id(model[6].weight)]
    del ddp


@on_ranks(world_size=1)
def test_the_last_word_on_ignored_parameters_counts(rank, size):
    model = stack_of()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "4.weight"])
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    assert _kept_ids(model) == [id(model[n].weight) for n in (0, 4, 6)]
    # One wrapper ignores a parameter, and another reduces it.
    outer = nn.Sequential(model)
    ddp = DDP(outer)
    assert _kept_ids(model) == [id(model[n].weight) for n in (0, 2, 4, 6)]
    del ddp


@on_ranks(world_size=1)
def test_explain_shows_each_cut_with_its_reason(rank, size):
    torch._dynamo.reset()
    explain = ExplainWithBackend("eager")
    optimizer = DDPOptimizer(MATRIX, explain)
    torch.compile(stack_of(), backend=optimizer.compile_fn)(rows())
    found = explain.output()
    assert (found.graph_count, found.graph_break_count) == (4, 3)
    assert [reason.reason for reason in found.break_reasons] == [str(cut) for cut in optimizer.cuts]
    assert "a bucket of" in str(found)
    # Without splitting, a wrapper is one graph.
    found = torch._dynamo.explain(DDP(stack_of()))(rows())
    assert (found.graph_count, found.graph_break_count, found.break_reasons) == (1, 0, [])


@on_ranks(world_size=1)
def test_a_cap_of_half_a_megabyte_and_a_compilation_afterwards(rank, size):
    """torch refuses a cap below that of its first bucket."""
    torch._dynamo.reset()
    before = torch._dynamo.config.save_config(), torch._inductor.config.save_config()
    with pytest.raises(AssertionError):
        torchs.DDPOptimizer(2**19, Recorder())
    recorder = Recorder("aot_eager")
    optimizer = DDPOptimizer(2**19, recorder)
    assert optimizer.first_bucket_cap == 2**19
    model = stack_of(3, 256)
    torch.compile(model, backend=optimizer.compile_fn)(torch.ones(2, 256).double()).sum().backward()
    assert len(recorder.graphs) == 3
    # Compiled afterwards, it runs for real from its first call on.
    other = nn.Linear(2, 2)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = torch.ones(1, 2)
    assert torch.equal(compiled(x), other(x))
    assert type(compiled(x)) is torch.Tensor
    compiled(x).sum().backward()
    assert (torch._dynamo.config.save_config(), torch._inductor.config.save_config()) == before


def test_caps_below_one_byte_are_refused():
    with pytest.raises(BadArgumentError, match="bucket_bytes_cap is 0"):
        DDPOptimizer(0, lambda gm, inputs: gm)
    with pytest.raises(BadArgumentError, match="first_bucket_cap is -1"):
        DDPOptimizer(1, lambda gm, inputs: gm, first_bucket_cap=-1)


@pytest.mark.full
@on_ranks(world_size=1)
def test_graphs_without_parameters_or_inputs(rank, size):
    torch._dynamo.reset()
    recorder = Recorder()
    run = torch.compile(nn.Sequential(nn.ReLU(), nn.Tanh()), backend=DDPOptimizer(1, recorder).compile_fn)
    assert torch.equal(run(torch.ones(3)), torch.tanh(torch.ones(3)))
    assert len(recorder.graphs) == 1

    class Random(nn.Module):
        def forward(self):
            return torch.randn(3) * torch.randn(3)

    for backend in ("aot_eager", "inductor"):
        recorder = Recorder(backend)
        run = torch.compile(Random(), backend=DDPOptimizer(1, recorder).compile_fn)
        torch.manual_seed(1)
        assert run().shape == (3,)
        assert len(recorder.graphs) == 1
    empty = torch.compile(lambda: torch.distributed.get_world_size(), backend=DDPOptimizer(1, recorder).compile_fn)
    assert empty() == 1


@on_ranks(world_size=1)
def test_a_graph_that_dynamo_has_not_captured(rank, size):
    """A graph that was not captured by Dynamo, with modules and attributes in it."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*_layers(2))
            self.last = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64) * 2)

        def forward(self, x):
            return torch.sin(self.layers(x)) @ self.last

    model = Mixed()
    gm = torch.fx.symbolic_trace(model)
    recorder = Recorder()
    optimizer = DDPOptimizer(MATRIX, recorder)
    run = optimizer.compile_fn(gm, [rows()])
    assert [bucket.params for bucket in optimizer.buckets] == [["layers.0.weight"], ["layers.1.weight"], ["last"]]
    assert len(recorder.graphs) == 3
    assert torch.equal(run(rows()), model(rows()))


# -- attention -------------------------------------------------------------------------------------------


class AttentiveTwice(nn.Module):
    """One such model in another, in a checkpoint."""

    def __init__(self, attention=flex_attention) -> None:
        super().__init__()
        self.first, self.second = Attentive(attention), Attentive(attention)

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=False))


@pytest.mark.full
@on_ranks(world_size=1)
def test_flex_attention_in_a_part_by_itself_and_nested(rank, size):
    """Forward only: torch has no backward of it on the CPU."""
    x = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1))
    local = torch.compile(flex_attention, backend="aot_eager")
    with torch.no_grad():
        for kind, parts in ((Attentive, 3), (AttentiveTwice, 4)):
            torch._dynamo.reset()
            want = torch.compile(kind(), backend="eager")(x)
            for attention in (flex_attention, local):
                torch._dynamo.reset()
                recorder = Recorder("aot_eager")
                optimizer = DDPOptimizer(800, recorder)
                got = torch.compile(kind(attention), backend=optimizer.compile_fn)(x)
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
                assert len(recorder.graphs) == parts, [str(cut) for cut in optimizer.cuts]
                inside = [name for gm in recorder.graphs for name, _ in gm.named_modules() if "score_mod" in name]
                assert len(inside) == (1 if kind is Attentive else 2)
