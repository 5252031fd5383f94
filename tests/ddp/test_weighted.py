"""``ddp.weighted(weight)``: averages in which each backward counts its number of tokens or samples."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline import MixedPrecision, SyncBatchNorm
from paceline.errors import BadArgumentError, BadTypeError, DisagreementError, StateError
from tests.ddp.exact import Sum, assert_grad, line, step
from tests.on_ranks import on_ranks
from tests.reference import DDP, Branches, assert_grads, assert_in_sync, batch, mlp, ours_only

pytestmark = ours_only

# Weights of the ranks in tests with exact numbers: the mean of gradients 1 and 2 is then 1.75.
WEIGHTS = (1, 3)


def _bag():
    return nn.EmbeddingBag(10, 4, sparse=True, mode="sum")


def _seeded(make):
    torch.manual_seed(0)
    return make()


def _weighted_mean(weights, make, run):
    """sum(w_r g_r) / sum(w_r), from each rank's own gradients; None for a parameter that no rank uses."""
    totals = dict.fromkeys(name for name, _ in make().named_parameters())
    for r, weight in enumerate(weights):
        model = _seeded(make)
        run(model, r)
        for name, p in model.named_parameters():
            if p.grad is not None:
                totals[name] = (0 if totals[name] is None else totals[name]) + weight * p.grad.to_dense() / sum(weights)
    return totals


def _loss(model, rank, **options):
    model(batch(rank)).square().mean().backward(**options)


def _loss_through_the_inner_module(model, rank):
    _loss(getattr(model, "module", model), rank)


def _loss_of_one_branch(model, rank):
    model(batch(rank), rank).square().mean().backward()


def _loss_of_some_rows(model, rank):
    model(torch.tensor([[rank, 3, 4 + rank]])).square().mean().backward()


def _equals_the_weighted_mean(rank, world_size, weights, make=mlp, run=_loss, as_weight=float, hook=None):
    torch.set_default_dtype(torch.float64)
    ddp = DDP(_seeded(make))
    if hook is not None:
        ddp.register_comm_hook(dist.group.WORLD, hook)
    with ddp.weighted(as_weight(weights[rank])):
        run(ddp, rank)
    assert_grads(ddp, _weighted_mean(weights, make, run))


@pytest.mark.parametrize("weights", [(1, 1), (0.25, 3.5), (0, 7), (1e-3, 1e6), (2, 3, 5)], ids=str)
def test_weights_of_any_size(ranks, weights):
    ranks(_equals_the_weighted_mean, weights, world_size=len(weights))


@pytest.mark.parametrize(
    "case",
    [
        (mlp, _loss, torch.tensor),
        (Branches, _loss_of_one_branch),
        (_bag, _loss_of_some_rows),
        # A comm hook averages as it likes; weights come out right with those that take the mean.
        (mlp, _loss, float, default_hooks.allreduce_hook),
    ],
    ids=["tensor", "parameters used on one rank only", "sparse", "comm hook"],
)
def test_weights_of_any_kind(ranks, case):
    ranks(_equals_the_weighted_mean, WEIGHTS, *case)


# Samples of each rank at each step; rank 1 has none at step 2.
SAMPLES = [[1, 4, 3, 2], [5, 2, 0, 2]]
OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.0001},
    {"static_graph": True},
    {"batched_grad_copy": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@on_ranks()
def test_equals_the_mean_over_all_samples(rank, world_size, options):
    torch.set_default_dtype(torch.float64)
    reference = _seeded(mlp)
    torch.manual_seed(rank)
    ddp = DDP(mlp(), **options)
    for i in range(4):
        reference.zero_grad()
        rows = [batch(r, i, 6, 4)[: SAMPLES[r][i]] for r in range(world_size)]
        reference(torch.cat(rows)).square().sum(1).mean().backward()
        # A mean over no rows is nan; a rank without rows says so with its weight and a loss of zero.
        out = ddp(rows[rank]).square().sum(1)
        loss = out.mean() if len(rows[rank]) else out.sum()
        with ddp.weighted(len(rows[rank])):
            loss.backward()
        assert_grads(ddp, {name: p.grad for name, p in reference.named_parameters()}, f"step {i}")
        assert_in_sync(ddp.module)
        ddp.zero_grad()


# Tokens of each rank in each micro-step.
MICRO = [[2, 5, 1], [6, 1, 3]]


@pytest.mark.parametrize("options", OPTIONS[:3], ids=lambda options: "+".join(options) or "plain")
@on_ranks()
def test_across_no_sync_accumulation(rank, world_size, options):
    """Micro-steps with different weights: every sample of the whole step counts the same."""
    torch.set_default_dtype(torch.float64)
    reference = _seeded(mlp)
    torch.manual_seed(rank)
    ddp = DDP(mlp(), **options)
    for i in range(2):
        reference.zero_grad()
        rows = [[batch(r, 10 * i + k, 6, 4)[: MICRO[r][k]] for k in range(3)] for r in range(world_size)]
        reference(torch.cat([*rows[0], *rows[1]])).square().sum(1).mean().backward()
        for k, mine in enumerate(rows[rank]):
            with ddp.no_sync() if k < 2 else contextlib.nullcontext(), ddp.weighted(len(mine)):
                ddp(mine).square().sum(1).mean().backward()
        assert_grads(ddp, {name: p.grad for name, p in reference.named_parameters()}, f"step {i}")
        ddp.zero_grad()


@on_ranks()
def test_through_the_inner_module(rank, world_size):
    """A backward that is noticed by its first gradient: that one is there already, and is of this backward."""
    torch.set_default_dtype(torch.float64)
    ddp, run = DDP(_seeded(mlp)), _loss_through_the_inner_module
    expected = _weighted_mean(WEIGHTS, mlp, run)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.weighted(WEIGHTS[rank]), ddp.no_sync():
            run(ddp, rank)
        with ddp.weighted(WEIGHTS[rank]):
            run(ddp, rank)
        assert_grads(ddp, expected)
    with pytest.raises(StateError, match="earlier step"), ddp.weighted(WEIGHTS[rank]):
        run(ddp, rank)
    ddp.zero_grad()
    with ddp.weighted(WEIGHTS[rank]):
        run(ddp, rank)
    assert_grads(ddp, expected)


@on_ranks(allow_warnings=(("Using backward", UserWarning),))
def test_with_a_graph_on_top_of_an_earlier_step(rank, world_size):
    """What an earlier step left is added afterwards, with a graph as without."""
    torch.set_default_dtype(torch.float64)
    ddp = DDP(_seeded(mlp))
    expected = _weighted_mean(WEIGHTS, mlp, _loss)
    with ddp.weighted(WEIGHTS[rank]):
        _loss(ddp, rank)
        assert_grads(ddp, expected)
        _loss(ddp, rank, create_graph=True)
    assert_grads(ddp, {name: 2 * grad for name, grad in expected.items()})


# -- the end of a block --------------------------------------------------------------------------------------


@on_ranks()
def test_a_parameter_unfrozen_before_a_weighted_backward_is_weighted(rank, world_size):
    model = Sum(frozen="b")
    ddp = DDP(model)
    step(ddp, rank)
    ddp.zero_grad()
    model.b.requires_grad_(True)
    for _ in range(2):
        with ddp.weighted(WEIGHTS[rank]):
            step(ddp, rank)
        for part in (model.a, model.b, model.c):
            assert_grad(part, 1.75)
        ddp.zero_grad()


@on_ranks()
def test_a_parameter_frozen_before_a_weighted_backward_leaves_no_weights_behind(rank, world_size):
    model = Sum()
    ddp = DDP(model)
    model.b.requires_grad_(False)
    with ddp.weighted(WEIGHTS[rank]):
        step(ddp, rank)
    assert_grad(model.a, 1.75)
    assert model.b.weight.grad is None
    ddp.zero_grad()
    # Nothing of the block is left: this one counts every rank alike.
    step(ddp, rank)
    assert_grad(model.a, 1.5)


@on_ranks()
def test_blocks_do_not_nest(rank, world_size):
    ddp = DDP(line())
    with ddp.weighted(WEIGHTS[rank]):
        with pytest.raises(StateError, match="nested"), ddp.weighted(3):
            pass
        # The outer block is as it was.
        step(ddp, rank)
    assert_grad(ddp.module, 1.75)
    ddp.zero_grad()
    step(ddp, rank)
    assert_grad(ddp.module, 1.5)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kept_before", [False, True])
@on_ranks()
def test_zero_grad_throws_away_the_weights_of_what_it_throws_away(rank, world_size, kept_before, set_to_none):
    ddp = DDP(line())
    if kept_before:
        step(ddp, rank)
    with ddp.no_sync(), ddp.weighted(WEIGHTS[rank]):
        step(ddp, rank)
    ddp.zero_grad(set_to_none=set_to_none)
    with ddp.weighted(WEIGHTS[rank]):
        step(ddp, rank)
    assert_grad(ddp.module, 1.75)


@pytest.mark.parametrize("weighted_last", [False, True])
@on_ranks()
def test_a_backward_without_a_weight_beside_one_with_counts_one(rank, world_size, weighted_last):
    ddp = DDP(line())
    with ddp.no_sync(), contextlib.nullcontext() if weighted_last else ddp.weighted(WEIGHTS[rank]):
        step(ddp, rank)
    with ddp.weighted(WEIGHTS[rank]) if weighted_last else contextlib.nullcontext():
        step(ddp, rank)
    assert ddp.module.weight.grad[0, 0].item() == pytest.approx((1 + 1 * 1 + 2 + 3 * 2) / (2 + 4))


@on_ranks()
def test_weights_cannot_tell_an_earlier_step_from_a_backward_without(rank, world_size):
    ddp = DDP(line())
    step(ddp, rank)
    with ddp.no_sync():
        step(ddp, rank)
    with pytest.raises(StateError, match="earlier step"), ddp.weighted(WEIGHTS[rank]):
        step(ddp, rank)


@pytest.mark.parametrize("by_initial", [True, False])
@on_ranks()
def test_inside_join(rank, world_size, by_initial):
    ddp = DDP(line())
    got = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for _ in range(1 + 2 * rank):
            ddp.zero_grad()
            with ddp.weighted(WEIGHTS[rank]):
                step(ddp, rank)
            got.append(ddp.module.weight.grad[0, 0].item())
    step(ddp, rank)
    # A rank without inputs weighs nothing, whatever plain averages would be divided by.
    assert got == [[1.75], [1.75, 2.0, 2.0]][rank]


# -- what is refused or told ---------------------------------------------------------------------------------


@pytest.mark.parametrize("in_join", [False, True])
@on_ranks()
def test_weights_on_some_ranks_only_is_an_error_on_every_rank(rank, world_size, in_join):
    """One rank forgot its weight: no average is right, so every rank is told."""
    ddp = DDP(line())
    with pytest.raises(DisagreementError, match="weighted"), ddp.join(enable=in_join):  # noqa: SIM117
        with ddp.weighted(3) if rank == 1 else contextlib.nullcontext():
            step(ddp, rank)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [(-1.0, BadArgumentError), (float("nan"), BadArgumentError), (float("inf"), BadArgumentError), ("3", BadTypeError)],
)
@on_ranks()
def test_bad_weights_are_refused(rank, world_size, weight, kind):
    ddp = DDP(line())
    with pytest.raises(kind), ddp.weighted(weight):
        pass
    step(ddp, rank)
    assert_grad(ddp.module, 1.5)


@on_ranks()
def test_weights_that_sum_to_zero_give_zeros(rank, world_size):
    ddp = DDP(line())
    with ddp.weighted(0):
        step(ddp, rank)
    assert_grad(ddp.module, 0.0)


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"), [(torch.float16, None), (torch.float32, torch.float16)], ids=["params", "reduction"]
)
@on_ranks()
def test_weights_too_large_for_float16_are_told_once(rank, world_size, dtype, reduce_dtype):
    precision = MixedPrecision(reduce_dtype=reduce_dtype) if reduce_dtype else None
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
    assert "bucket 0 (weight)" in str(told.message)
    assert "weighted(n / 1024)" in str(told.message)


@on_ranks()
def test_weights_are_refused_with_sync_batchnorm(rank, world_size):
    """Weights cannot follow gradients through SyncBatchNorm; a loss that is multiplied can."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    whole = copy.deepcopy(model)
    rows = [2, 5]
    batches = [batch(r, 0, rows[r], 4) for r in range(world_size)]
    whole(torch.cat(batches)).square().mean().backward()
    ddp = DDP(SyncBatchNorm.convert_sync_batchnorm(model))
    loss = ddp(batches[rank]).square().mean()
    with pytest.raises(StateError, match="Multiply the loss"), ddp.weighted(rows[rank]):
        loss.backward()
    (loss * rows[rank] * world_size / sum(rows)).backward()
    for p, q in zip(ddp.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    ddp.eval()
    with ddp.weighted(rows[rank]):
        ddp(batches[rank]).square().mean().backward()


@on_ranks()
def test_weights_that_are_all_zero_give_plain_zeros(rank, world_size):
    """Not those with a sign, which differ between ranks, nor what an infinite gradient would make of them."""
    ddp = DDP(nn.Linear(4, 1, bias=False), verify_every=1)
    with ddp.weighted(0):
        if rank == 0:
            with ddp.no_sync():
                ddp(-torch.ones(1, 4)).sum().backward()
        ddp(torch.tensor([[-1.0, 1.0, -2.0, 2.0]])).sum().backward()
    grad = ddp.module.weight.grad
    assert not grad.any()
    assert not grad.signbit().any()
