"""Compiled training gives what eager training gives, and buckets leave from inside the backward graph."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP, MixedPrecision
from paceline.compiler.taps import tap
from paceline.hooks import allreduce, fp16_compress
from tests.compiler._compare import RTOL, batch, compare, plain_step, stack, whole
from tests.compiler._models import Checkpointed, Normed, Tied
from tests.on_ranks import on_ranks

BACKENDS = ["eager", "aot_eager", "inductor"]


def _unwrapped(model):
    """The wrapper, which may be compiled."""
    return getattr(model, "_orig_mod", model)


@pytest.mark.parametrize("cap_bytes", [64, 600, 1200, 2**20])
@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks()
def test_one_graph_and_the_same_gradients_for_any_bucket_size(rank, size, backend, cap_bytes):
    seen = compare(rank, stack, compile=whole(backend), steps=4, bucket_cap_mb=cap_bytes / 2**20)
    assert seen.graphs == 1
    # With one bucket there is nothing to report early.
    assert seen.taps == (0 if seen.buckets == 1 else 4)
    # These are all buckets but the last, which carries the status and leaves when backward is over.
    assert seen.early == [n - 1 for n in seen.rounds]
    assert seen.rounds[-1] == seen.buckets
    assert (seen.buckets == 1) == (cap_bytes == 2**20)
    # Autograd brought the stand-ins, and nothing with them.
    assert seen.more == 0


@on_ranks()
def test_backends_get_graphs_of_the_kind_that_dynamo_makes(rank, size):
    # A graph of that kind writes its code when it first runs, and not after each pass of a compiler.
    kinds = []

    def backend(gm, example_inputs):
        kinds.append([kind.__qualname__ for kind in type(gm).__mro__])
        return gm.forward

    for model in (DDP(stack(), bucket_cap_mb=600 / 2**20), stack()):
        torch._dynamo.reset()
        torch.compile(model, backend=backend)(batch(rank))
    ours, plain = kinds
    assert ours == plain


@on_ranks()
def test_a_tap_is_a_part_of_the_whole_and_has_a_limit(rank, size):
    ddp = DDP(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(64))), bucket_cap_mb=0.02)
    assert len(tap.group(ddp._reducer, ddp.parameters())) == 32
    # The limit is now the bytes of one layer.
    with mock.patch.object(tap, "MAX_TAP_BYTES", 4 * 32 * 32):
        assert len(tap.group(ddp._reducer, ddp.parameters())) == 64


@on_ranks()
def test_small_parameters_are_reported_with_the_large_one_behind_them(rank, size):
    layers = [nn.Linear(2, 128), nn.LayerNorm(128), nn.Linear(128, 128), nn.Linear(128, 128, bias=False)]
    ddp = DDP(nn.Sequential(*layers, nn.LayerNorm(128)), bucket_cap_mb=0.001)
    reducer = ddp._reducer
    groups = [[reducer.slots.of(param).name for param in members] for members in tap.group(reducer, ddp.parameters())]
    assert groups == [
        ["4.bias", "4.weight", "3.weight"],
        ["2.bias", "2.weight"],
        ["1.bias", "1.weight", "0.bias", "0.weight"],
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks()
def test_no_sync_and_accumulation_do_not_compile_again(rank, size, backend):
    def step(model, rank, n):
        with _unwrapped(model).no_sync():
            plain_step(model, rank, 3 * n)
            plain_step(model, rank, 3 * n + 1)
        plain_step(model, rank, 3 * n + 2)

    seen = compare(rank, stack, compile=whole(backend), step=step)
    assert seen.graphs == 1
    assert min(seen.early) > 0
    assert seen.rounds[-1] == seen.buckets


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks()
def test_buffers_are_broadcast_before_the_graph_runs(rank, size, backend):
    seen = compare(rank, Normed, compile=whole(backend))
    torch._dynamo.reset()
    ddp = DDP(Normed())
    # Each rank has its own numbers, until a forward broadcasts those of rank 0.
    ddp.module.norm.running_mean.fill_(float(rank + 1))
    compiled = whole(backend)(ddp)
    compiled.eval()
    with torch.no_grad():
        compiled(batch(rank))
    assert torch.equal(ddp.module.norm.running_mean, torch.ones(8).double())
    assert seen.graphs == 1
    assert min(seen.early) > 0


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.spare, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()
        self.use_spare = False

    def forward(self, x):
        x = self.first(x)
        if self.use_spare:
            x = self.spare(x)
        # The parameter is in the graph, yet it has no gradient.
        return self.last(x) + 0 * self.spare.weight.sum().detach()


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "find_unused"])
@on_ranks()
def test_unused_parameters(rank, size, options, varying):
    def step(model, rank, n):
        inner = _unwrapped(model).module
        inner.use_spare = varying and n >= 1 and rank == n % 2
        plain_step(model, rank, n)

    seen = compare(rank, Unused, compile=whole("aot_eager"), step=step, steps=4, **options)
    assert seen.graphs == 1 + varying


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(8, 8).double()
        self.use = True

    def forward(self, x):
        return self.linear(x) if self.use else x * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks()
def test_tied_weights_are_reported_once(rank, size, backend):
    seen = compare(rank, Tied, compile=whole(backend))
    assert seen.rounds[-1] == seen.buckets


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks()
def test_several_forwards_before_a_backward(rank, size, backend):
    def step(model, rank, n):
        losses = [model(batch(rank, 5 * n + k)).square().sum() for k in range(3)]
        sum(losses).backward()

    seen = compare(rank, stack, compile=whole(backend), step=step, steps=4)
    assert seen.graphs == 1
    # The first time some are late; then it is known how often they come.
    assert seen.rounds[-1] == seen.buckets
    assert seen.early[-1] > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@on_ranks()
def test_gradients_that_come_from_outside_of_the_graph_as_well(rank, size, backend):
    def step(model, rank, n):
        inner = _unwrapped(model).module
        # Two parameters get gradients from elsewhere in the same backward.
        (model(batch(rank, n)).square().sum() + inner[0].weight.pow(3).sum() + inner[6].bias.sum()).backward()

    seen = compare(rank, stack, compile=whole(backend), step=step, steps=4)
    assert seen.graphs == 1
    assert seen.more == 8  # two parameters in four steps


def _some_rank_uses_nothing(model, rank, n):
    _unwrapped(model).module.use = not (rank == 1 and n == 1)
    plain_step(model, rank, n)


def _same_on_all_ranks(model, rank, n):
    plain_step(model, 0, n)


def _weighted(model, rank, n):
    with _unwrapped(model).weighted(rank + 1 + n):
        plain_step(model, rank, n)


def _joined(model, rank, n):
    ddp = _unwrapped(model)
    with ddp.join():
        for k in range(1 + rank):
            ddp.zero_grad()
            plain_step(model, rank, 10 * n + k)


def _frozen_for_a_step(model, rank, n):
    _unwrapped(model).module[2].requires_grad_(n != 1)
    plain_step(model, rank, n)


def _two_backwards(model, rank, n):
    out = model(batch(rank, n))
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()


def _backward_of_some_parameters(model, rank, n):
    inner = _unwrapped(model).module
    model(batch(rank, n)).square().sum().backward(inputs=[inner[0].weight, inner[4].bias])


def _ignoring():
    module = stack()
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["2.weight"])
    return module


# What is given to ``compare``, how many graphs there are, and whether buckets leave early in every step.
KINDS = {
    "gradients that are not zeroed": ({"zero": False}, 1, True),
    "static_graph": ({"static_graph": True}, 1, True),
    "comm hook": ({"prepare": lambda ddp: ddp.register_comm_hook(None, allreduce)}, 1, True),
    "comm hook that compresses": ({"prepare": lambda ddp: ddp.register_comm_hook(None, fp16_compress)}, 1, True),
    "weighted": ({"step": _weighted}, 1, False),
    # A rank that has run out has no gradients, and is given the others' weights when the next join ends.
    "join": ({"step": _joined, "synced": False}, 1, False),
    "freezing and unfreezing": ({"step": _frozen_for_a_step, "steps": 4}, 3, True),
    "two backwards of one forward": ({"step": _two_backwards}, 1, False),
    "backward(inputs=...)": ({"step": _backward_of_some_parameters}, 1, False),
    "a rank uses no parameter": ({"make": Sometimes, "step": _some_rank_uses_nothing}, 2, False),
    "ignored parameters": ({"make": _ignoring, "step": _same_on_all_ranks}, 1, True),
    # A hook of the user's sees the gradient first.
    "tensor hook": ({"prepare": lambda ddp: ddp.module[2].weight.register_hook(lambda grad: grad * 3)}, 1, False),
    # This is torch's way to say that gradients stay as they are.
    "hooks that are removed": ({"prepare": lambda ddp: ddp._remove_autograd_hooks(), "synced": False}, 1, False),
}


LONG_TAIL = ("gradients that are not zeroed", "comm hook that compresses", "backward(inputs=...)")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full if k in LONG_TAIL else []) for k in KINDS])
@on_ranks()
def test_training_of_many_kinds(rank, size, kind):
    options, graphs, is_early = KINDS[kind]
    seen = compare(rank, **{"make": stack, "compile": whole("aot_eager"), **options})
    assert 1 <= seen.graphs <= graphs
    assert not is_early or min(seen.early) > 0
    assert kind != "ignored parameters" or seen.taps == 7


@on_ranks()
def test_hooks_of_the_user_on_accumulation_see_the_gradient_first(rank, size):
    """A hook that was there before the wrapper sees this rank's gradient, and may change it."""
    seen = []

    def make():
        module, mine = stack(), []
        seen.append(mine)
        module[2].weight.register_post_accumulate_grad_hook(lambda param: mine.append(param.grad.mul_(3).clone()))
        return module

    compare(rank, make, compile=whole("aot_eager"))
    eager, compiled = seen
    assert eager
    torch.testing.assert_close(compiled, eager)


@on_ranks()
def test_autograd_grad_stays_local(rank, size):
    torch._dynamo.reset()
    ddp = DDP(stack())
    compiled = whole("aot_eager")(ddp)
    params = list(ddp.parameters())
    # These are this rank's own gradients: no other rank takes part.
    if rank == 0:
        grads = torch.autograd.grad(compiled(batch(rank)).square().sum(), params)
        want = torch.autograd.grad(ddp.module(batch(rank)).square().sum(), params)
        for got, expected in zip(grads, want, strict=True):
            torch.testing.assert_close(got, expected)
        assert all(param.grad is None for param in params)
    dist.barrier()
    plain_step(compiled, rank, 0)
    assert all(param.grad is not None for param in params)


@on_ranks(allow_warnings=(("Using backward\\(\\) with create_graph=True", UserWarning),))
def test_create_graph_where_the_backend_can(rank, size):
    def step(model, rank, n):
        model(batch(rank, n)).square().sum().backward(create_graph=True)
        params = list(_unwrapped(model).parameters())
        penalty = sum(param.grad.square().sum() for param in params)
        grads = torch.autograd.grad(penalty, params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    # The second derivative is this rank's own.
    compare(rank, stack, compile=whole("eager"), step=step, steps=2, synced=False)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks()
def test_activation_checkpointing_in_the_graph(rank, size, backend):
    seen = compare(rank, Checkpointed, compile=whole(backend))
    assert seen.graphs == 1
    assert min(seen.early) > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@on_ranks()
def test_mixed_precision(rank, size, backend):
    config = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
    # It is computed in float32, which inductor rounds differently.
    tolerance = 1e-5 if backend == "inductor" else RTOL
    seen = compare(rank, stack, compile=whole(backend), mixed_precision=config, rtol=tolerance, atol=tolerance)
    assert seen.graphs == 1
    assert min(seen.early) > 0


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (None, 2), pytest.param(False, 4, marks=pytest.mark.full)])
@on_ranks()
def test_dynamic_shapes(rank, size, dynamic, graphs):
    def step(model, rank, n):
        model(batch(rank, n, 3 + n + rank, 8)).square().sum().backward()

    seen = compare(rank, stack, compile=whole("aot_eager", dynamic=dynamic), step=step, steps=4)
    assert seen.graphs == graphs
    assert min(seen.early) > 0


@on_ranks()
def test_wrappers_that_look_alike_are_not_mixed_up(rank, size):
    """They are alike to Dynamo, which looks at shapes only."""
    compare(rank, stack, compile=whole("aot_eager"))
    a, b = DDP(stack()), DDP(copy.deepcopy(stack()))
    both = [whole("aot_eager")(a), whole("aot_eager")(b)]
    for n in range(2):
        for k, model in enumerate(both):
            model.zero_grad()
            plain_step(model, rank, n + k)
    reference = DDP(stack())
    plain_step(reference, rank, 2)
    for p, q in zip(b.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
