"""Mixed precision on the CPU, delayed all-reduce, and averages weighted by tokens or samples."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from paceline.errors import DisagreementError, StateError

from ._ddp import DDP, Branches, assert_grads, assert_in_sync, batch, compare_with_reference, no_sync, ours_only


def _mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


# -- mixed precision -----------------------------------------------------------------------------------------


class _Spy(nn.Module):
    """Notes the dtypes that forward computes in."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.first.weight.dtype, self.scale.dtype, self.count.dtype))
        return self.second(self.first(x).tanh()) * self.scale


def _expected_low_precision(model, world_size, step, param_dtype):
    """The same computation by hand: weights and input cast down, gradients averaged, cast up."""
    means = None
    for r in range(world_size):
        low = _Spy().to(param_dtype)
        low.load_state_dict({k: v.to(param_dtype) for k, v in model.state_dict().items()})
        low(batch(r, step).to(param_dtype)).float().square().mean().backward()
        grads = [p.grad.float() / world_size for p in low.parameters()]
        means = grads if means is None else [m + g for m, g in zip(means, grads, strict=True)]
    return means


def _mixed(rank, world_size, precision, options):
    torch.manual_seed(rank)
    model = _Spy()
    ddp = DDP(model, mixed_precision=precision, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    compute = precision.param_dtype or torch.float32
    for i in range(3):
        expected = _expected_low_precision(model, world_size, i, compute)
        optimizer.zero_grad()
        out = ddp(batch(rank, i).float())
        assert out.dtype == compute
        assert model.seen[-1][:2] == (compute, compute)
        assert model.seen[-1][2] == (precision.buffer_dtype or torch.float32)
        assert model.seen[-1][3] == torch.int64
        out.float().square().mean().backward()
        for (name, p), want in zip(model.named_parameters(), expected, strict=True):
            # The optimizer works in full precision on full-precision weights.
            assert p.dtype == torch.float32, name
            assert p.grad.dtype == torch.float32, name
            torch.testing.assert_close(p.grad, want, rtol=2e-2, atol=2e-3)
        assert_in_sync(model)
        optimizer.step()


PRECISIONS = [
    _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
    _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16),
]


def _precision_id(precision):
    return "_".join(str(d).removeprefix("torch.") for d in (precision.param_dtype, precision.reduce_dtype))


@ours_only
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.00005}], ids=["plain", "view", "small"]
)
@pytest.mark.parametrize("precision", PRECISIONS, ids=_precision_id)
def test_mixed_precision_on_cpu(ranks, precision, options):
    ranks(_mixed, precision, options)


def _master_weights(rank, world_size):
    """Updates too small for bfloat16 are not lost: the weights themselves stay float32."""
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ddp = DDP(model, mixed_precision=PRECISIONS[1])
    for _ in range(4):
        ddp(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            model.weight.sub_(model.weight.grad, alpha=1e-4)
        ddp.zero_grad()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), 1 - 4e-4), rtol=0, atol=1e-7)
    assert all(value.dtype == torch.float32 for value in ddp.state_dict().values())


@ours_only
def test_mixed_precision_keeps_full_precision_weights(ranks):
    ranks(_master_weights)


def _mixed_accumulation(rank, world_size):
    torch.manual_seed(0)
    model = _Spy()
    ddp = DDP(model, mixed_precision=PRECISIONS[1])
    parts = [_expected_low_precision(model, world_size, i, torch.bfloat16) for i in (0, 1)]
    with ddp.no_sync():
        ddp(batch(rank, 0).float()).float().square().mean().backward()
    ddp(batch(rank, 1).float()).float().square().mean().backward()
    for p, first, second in zip(model.parameters(), *parts, strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, first + second, rtol=2e-2, atol=4e-3)
    assert_in_sync(model)


@ours_only
def test_mixed_precision_with_accumulation(ranks):
    ranks(_mixed_accumulation)


def _mixed_eval(rank, world_size):
    torch.manual_seed(0)
    ddp = DDP(_Spy(), mixed_precision=PRECISIONS[0])
    with torch.no_grad():
        assert ddp(batch(rank).float()).dtype == torch.bfloat16
    ddp(batch(rank).float()).float().sum().backward()
    assert_in_sync(ddp.module)


@ours_only
def test_mixed_precision_forward_without_grad(ranks):
    ranks(_mixed_eval)


def _mixed_sparse(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    ddp = DDP(model, mixed_precision=PRECISIONS[1])
    expected = torch.zeros(8, 4)
    for r in range(world_size):
        twin = copy.deepcopy(model).to(torch.bfloat16)
        twin(torch.tensor([r, 3])).float().square().mean().backward()
        expected += twin[0].weight.grad.to_dense().float() / world_size
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([rank, 3])).float().square().mean().backward()
        assert model[0].weight.grad.is_sparse
        assert model[0].weight.grad.dtype == torch.float32
        torch.testing.assert_close(model[0].weight.grad.to_dense(), expected, rtol=2e-2, atol=4e-3)
        assert_in_sync(model)


@ours_only
def test_mixed_precision_with_sparse_gradients(ranks):
    ranks(_mixed_sparse)


# -- delayed all-reduce --------------------------------------------------------------------------------------


def _delayed(rank, world_size, which, options):
    """Delayed parameters are averaged like all others."""

    def wrap(model):
        named = [(name, p) for name, p in model.named_parameters() if which == "all" or name.startswith(which)]
        return DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight, **options)

    def step(model, r, i):
        model(batch(r, i)).square().mean().backward()

    compare_with_reference(rank, world_size, _mlp, step, wrap=wrap, steps=4)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "view"])
@pytest.mark.parametrize(
    "which",
    [
        # Ready before the parameter that is hooked, which itself is not delayed: what torch's class can do.
        "2.",
        pytest.param("0.", marks=ours_only),
        pytest.param("all", marks=ours_only),
    ],
)
def test_delayed_all_reduce(ranks, which, options):
    ranks(_delayed, which, options)


def _delayed_broadcast(rank, world_size):
    torch.manual_seed(rank)
    model = _mlp()
    named = list(model.named_parameters())
    DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight)
    assert_in_sync(model)


@ours_only
def test_delayed_parameters_are_broadcast_at_the_start(ranks):
    ranks(_delayed_broadcast)


def _delayed_accumulation(rank, world_size):
    def wrap(model):
        named = [(name, p) for name, p in model.named_parameters() if name.startswith("0.")]
        return DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight)

    def step(model, r, i):
        with no_sync(model):
            model(batch(r, 10 + i)).square().mean().backward()
        model(batch(r, i)).square().mean().backward()

    compare_with_reference(rank, world_size, _mlp, step, wrap=wrap)


@ours_only
def test_delayed_all_reduce_with_accumulation(ranks):
    ranks(_delayed_accumulation)


# -- weighted averaging --------------------------------------------------------------------------------------

# Samples of each rank at each step; rank 1 has none at step 2.
SAMPLES = [[1, 4, 3, 2], [5, 2, 0, 2]]


def _rows(rank, step):
    return batch(rank, step, 6, 4)[: SAMPLES[rank][step]]


def _weighted(model, weight):
    return model.weighted(weight) if isinstance(model, DDP) else contextlib.nullcontext()


def _uneven_batches(rank, world_size, options):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    reference = _mlp()
    torch.manual_seed(rank)
    ddp = DDP(_mlp(), **options)
    for i in range(4):
        reference.zero_grad()
        whole = torch.cat([_rows(r, i) for r in range(world_size)])
        reference(whole).square().sum(1).mean().backward()
        rows = _rows(rank, i)
        # A mean over no rows is nan; a rank without rows says so with its weight and a loss of zero.
        out = ddp(rows).square().sum(1)
        loss = out.mean() if len(rows) else out.sum()
        with ddp.weighted(len(rows)):
            loss.backward()
        assert_grads(ddp, {name: p.grad for name, p in reference.named_parameters()}, f"step {i}")
        assert_in_sync(ddp.module)
        ddp.zero_grad()


WEIGHTED = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.0001},
    {"static_graph": True},
    {"batched_grad_copy": True},
]


@ours_only
@pytest.mark.parametrize("options", WEIGHTED, ids=lambda options: "+".join(options) or "plain")
def test_weighted_equals_the_mean_over_all_samples(ranks, options):
    ranks(_uneven_batches, options)


def _weighted_sum(world_size, weights, make, run):
    """sum(w_r g_r) / sum(w_r), from each rank's own gradients."""
    totals = {}
    for r in range(world_size):
        model = make()
        run(model, r)
        for name, p in model.named_parameters():
            if p.grad is not None:
                totals[name] = totals.get(name, 0) + weights[r] * p.grad.to_dense()
    return {name: total / sum(weights) for name, total in totals.items()}


def _seeded():
    torch.manual_seed(0)
    return _mlp()


def _fractions(rank, world_size, weights):
    torch.set_default_dtype(torch.float64)
    ddp = DDP(_seeded())

    def run(model, r):
        model(batch(r)).square().mean().backward()

    with ddp.weighted(weights[rank]):
        run(ddp, rank)
    assert_grads(ddp, _weighted_sum(world_size, weights, _seeded, run))


@ours_only
@pytest.mark.parametrize("weights", [(1, 1), (0.25, 3.5), (0, 7), (1e-3, 1e6), (2, 3, 5)], ids=str)
def test_weights_of_any_size(ranks, weights):
    ranks(_fractions, weights, world_size=len(weights))


def _tensor_weight(rank, world_size):
    torch.set_default_dtype(torch.float64)
    weights = (3, 5)
    ddp = DDP(_seeded())

    def run(model, r):
        model(batch(r)).square().mean().backward()

    with ddp.weighted(torch.tensor(weights[rank])):
        run(ddp, rank)
    assert_grads(ddp, _weighted_sum(world_size, weights, _seeded, run))


@ours_only
def test_a_weight_may_be_a_tensor(ranks):
    ranks(_tensor_weight)


# Tokens of each rank in each micro-step.
MICRO = [[2, 5, 1], [6, 1, 3]]


def _weighted_accumulation(rank, world_size, options):
    """Micro-steps with different weights: every sample of the whole step counts the same."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    reference = _mlp()
    torch.manual_seed(rank)
    ddp = DDP(_mlp(), **options)
    for i in range(2):
        reference.zero_grad()
        pieces = [batch(r, 10 * i + k, 6, 4)[: MICRO[r][k]] for r in range(world_size) for k in range(3)]
        reference(torch.cat(pieces)).square().sum(1).mean().backward()
        for k in range(3):
            rows = batch(rank, 10 * i + k, 6, 4)[: MICRO[rank][k]]
            with no_sync(ddp) if k < 2 else contextlib.nullcontext(), ddp.weighted(len(rows)):
                ddp(rows).square().sum(1).mean().backward()
        assert_grads(ddp, {name: p.grad for name, p in reference.named_parameters()}, f"step {i}")
        ddp.zero_grad()


@ours_only
@pytest.mark.parametrize("options", WEIGHTED[:3], ids=lambda options: "+".join(options) or "plain")
def test_weighted_across_no_sync_accumulation(ranks, options):
    ranks(_weighted_accumulation, options)


def _weighted_then_plain(rank, world_size):
    """The weight ends with its context: the next step is the plain mean again."""
    torch.set_default_dtype(torch.float64)
    ddp = DDP(_seeded())

    def run(model, r):
        model(batch(r)).square().mean().backward()

    with ddp.weighted(1 + 4 * rank):
        run(ddp, rank)
    ddp.zero_grad()
    run(ddp, rank)
    assert_grads(ddp, _weighted_sum(world_size, (1, 1), _seeded, run))


@ours_only
def test_a_weight_ends_with_its_context(ranks):
    ranks(_weighted_then_plain)


def _seeded_branches():
    torch.manual_seed(0)
    return Branches()


def _weighted_unused(rank, world_size):
    torch.set_default_dtype(torch.float64)
    weights = (1, 3)
    ddp = DDP(_seeded_branches())

    def run(model, r):
        model(batch(r), r).square().mean().backward()

    with ddp.weighted(weights[rank]):
        run(ddp, rank)
    expected = _weighted_sum(world_size, weights, _seeded_branches, run)
    assert_grads(ddp, {name: expected.get(name) for name, _ in ddp.module.named_parameters()})


@ours_only
def test_weighted_with_parameters_used_on_one_rank_only(ranks):
    ranks(_weighted_unused)


def _weighted_beyond_float16(rank, world_size, dtype, reduce_dtype):
    precision = _MixedPrecision(reduce_dtype=reduce_dtype) if reduce_dtype else None
    ddp = DDP(nn.Linear(1, 1, bias=False).to(dtype), mixed_precision=precision)
    param = ddp.module.weight
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A fraction is fine; the gradient is 100 on each rank.
        for weight in (4, 4096, 4096):
            with ddp.weighted(weight):
                ddp(torch.full((1, 1), 100.0, dtype=dtype)).sum().backward()
            assert param.grad.item() == (100.0 if weight == 4 else float("inf"))
            ddp.zero_grad()
    (told,) = caught
    return str(told.message)


@ours_only
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"), [(torch.float16, None), (torch.float32, torch.float16)], ids=["params", "reduction"]
)
def test_weights_too_large_for_float16_are_told_once(ranks, dtype, reduce_dtype):
    for text in ranks(_weighted_beyond_float16, dtype, reduce_dtype):
        assert "bucket 0 (weight)" in text
        assert "weighted(n / 1024)" in text


def _only_one_rank_weighs(rank, world_size):
    """One rank forgot its weight: no average is right, so every rank is told."""
    torch.set_default_dtype(torch.float64)
    ddp = DDP(_seeded())
    loss = ddp(batch(rank)).square().mean()
    with ddp.weighted(3) if rank == 1 else contextlib.nullcontext(), pytest.raises(DisagreementError) as caught:
        loss.backward()
    return str(caught.value)


@ours_only
def test_weights_on_some_ranks_only_is_an_error_on_every_rank(ranks):
    for text in ranks(_only_one_rank_weighs):
        assert "weighted" in text


def _sparse_weighted(rank, world_size):
    torch.set_default_dtype(torch.float64)
    weights = (1, 3)

    def make():
        torch.manual_seed(0)
        return nn.EmbeddingBag(10, 4, sparse=True, mode="sum")

    def run(model, r):
        model(torch.tensor([[r, 3, 4 + r]])).square().mean().backward()

    ddp = DDP(make())
    with ddp.weighted(weights[rank]):
        run(ddp, rank)
    expected = _weighted_sum(world_size, weights, make, run)
    assert_grads(ddp, expected)


@ours_only
def test_weighted_sparse_gradients(ranks):
    ranks(_sparse_weighted)


def _weighted_hook(rank, world_size):
    """A comm hook averages as it likes; weights come out right with those that take the mean."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.set_default_dtype(torch.float64)
    weights = (1, 3)
    ddp = DDP(_seeded())
    ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)

    def run(model, r):
        model(batch(r)).square().mean().backward()

    with ddp.weighted(weights[rank]):
        run(ddp, rank)
    assert_grads(ddp, _weighted_sum(world_size, weights, _seeded, run))


@ours_only
def test_weighted_with_a_comm_hook(ranks):
    ranks(_weighted_hook)


def _weighted_through_the_inner_module(rank, world_size):
    """A backward that is noticed by its first gradient: that one is there already, and is of this backward."""
    torch.set_default_dtype(torch.float64)
    weights = (2, 5)
    ddp = DDP(_seeded())

    def run(model, r):
        getattr(model, "module", model)(batch(r)).square().mean().backward()

    expected = _weighted_sum(world_size, weights, _seeded, run)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.weighted(weights[rank]), ddp.no_sync():
            run(ddp, rank)
        with ddp.weighted(weights[rank]):
            run(ddp, rank)
        assert_grads(ddp, expected)
    with pytest.raises(StateError, match="earlier step"), ddp.weighted(weights[rank]):
        run(ddp, rank)
    ddp.zero_grad()
    with ddp.weighted(weights[rank]):
        run(ddp, rank)
    assert_grads(ddp, expected)


@ours_only
def test_weighted_through_the_inner_module(ranks):
    ranks(_weighted_through_the_inner_module)


def _weighted_create_graph(rank, world_size):
    """What an earlier step left is added afterwards, with a graph as without."""
    torch.set_default_dtype(torch.float64)
    weights = (2, 5)
    ddp = DDP(_seeded())

    def run(model, r, **options):
        model(batch(r)).square().mean().backward(**options)

    expected = _weighted_sum(world_size, weights, _seeded, run)
    with ddp.weighted(weights[rank]):
        run(ddp, rank)
        assert_grads(ddp, expected)
        run(ddp, rank, create_graph=True)
    assert_grads(ddp, {name: 2 * grad for name, grad in expected.items()})


@ours_only
def test_weighted_with_a_graph_on_top_of_an_earlier_step(ranks):
    ranks(_weighted_create_graph, allow_warnings=(("Using backward", UserWarning),))
