"""Parameters frozen, unfrozen, added, replaced or moved after wrapping: noticed, never silently local."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ParameterMismatchError, PeerError
from tests.ddp.exact import Sum, assert_grad, step
from tests.on_ranks import on_ranks
from tests.reference import (
    DDP,
    assert_grads,
    assert_in_sync,
    batch,
    compare_with_reference,
    mean_over_ranks,
    mlp,
    ours_only,
    square,
)

pytestmark = ours_only


def _inner(model):
    return model.module if isinstance(model, DDP) else model


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}],
    ids=["plain", "view", "unused", "small"],
)
@on_ranks()
def test_freezing_and_unfreezing(rank, world_size, options):
    """Freeze and unfreeze at several steps; a frozen parameter has no gradient, an unfrozen one the mean."""
    script = {1: ("0.", False), 2: ("2.bias", False), 3: ("0.", True), 5: ("2.", True)}

    def step(model, r, i):
        prefix, trainable = script.get(i, ("none", True))
        for name, p in _inner(model).named_parameters():
            if name.startswith(prefix):
                p.requires_grad_(trainable)
        square(model, r, i)

    compare_with_reference(rank, world_size, mlp, step, steps=7, **options)


@on_ranks()
def test_frozen_parameters_are_broadcast_at_the_start_too(rank, world_size):
    torch.manual_seed(rank)
    model = mlp()
    model[0].weight.requires_grad_(False)
    DDP(model)
    assert_in_sync(model)


CHANGES = {
    "0.weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.randn(6, 4))),
    "0.weight in place": lambda model: setattr(model[0].weight, "data", torch.randn(6, 4)),
    "0.bias": lambda model: setattr(model[0], "bias", None),
    "2": lambda model: model.__setitem__(2, nn.Linear(6, 3)),
    "extra": lambda model: model.add_module("extra", nn.Linear(2, 2)),
    "extra, frozen": lambda model: model.add_module("extra", nn.Linear(2, 2).requires_grad_(False)),
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks()
def test_parameters_changed_after_wrapping_are_reduced(rank, world_size, change):
    torch.set_default_dtype(torch.float64)
    model = mlp()
    ddp = DDP(model)
    square(ddp, rank, 0)
    ddp.zero_grad()
    CHANGES[change](model)
    reference = copy.deepcopy(model)
    for i in (1, 2):
        square(ddp, rank, i)
        assert_grads(ddp, mean_over_ranks(reference, lambda m, r, i=i: square(m, r, i), world_size), f"step {i}")
        assert_in_sync(model)
        ddp.zero_grad()


@pytest.mark.parametrize("name", ["extra.weight", "0.weight"])
@on_ranks()
def test_a_change_on_one_rank_only_is_an_error_on_every_rank(rank, world_size, name):
    """Rank 1 alone adds a layer, or unfreezes a parameter."""
    model = mlp()
    model[0].weight.requires_grad_(False)
    ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    if rank == 1:
        model.add_module("extra", nn.Linear(2, 2)) if name == "extra.weight" else model.requires_grad_(True)
    with pytest.raises(PeerError, match=rf"rank 1 changed .*'{name}' was"):
        ddp(batch(rank).float()).sum().backward()


@pytest.mark.parametrize("mixed", [False, True])
@on_ranks()
def test_the_inner_module_alone_synchronises(rank, world_size, mixed):
    def step(model, r, i):
        square(model if mixed and i % 2 else _inner(model), r, i)

    compare_with_reference(rank, world_size, mlp, step, steps=4)


@on_ranks()
def test_a_part_of_the_inner_module_synchronises(rank, world_size):
    """Part of the inner module, used directly, with the rest unused."""

    def step(model, r, i):
        _inner(model)[0](batch(r, i)).square().sum().backward()

    compare_with_reference(rank, world_size, mlp, step)


@on_ranks()
def test_dtype_changed_after_wrapping(rank, world_size):
    """``ddp.double()`` after wrapping changes every parameter in place."""
    torch.manual_seed(0)
    model = mlp()
    ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    ddp.zero_grad()
    ddp.double()
    torch.manual_seed(0)
    reference = mlp().double()
    for i in range(2):
        square(ddp, rank, i)
        assert all(p.grad.dtype == torch.float64 for p in model.parameters())
        expected = mean_over_ranks(reference, lambda m, r, i=i: square(m, r, i), world_size)
        assert_grads(ddp, expected)
        ddp.zero_grad()


def _linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


EVAL_WARNING = (("Backward through the bare module in eval mode", UserWarning),)


@on_ranks(group_timeout_s=60, allow_warnings=EVAL_WARNING)
def test_a_rank_alone_may_freeze_a_layer_and_look_at_gradients_in_eval_mode(rank, world_size):
    """Rank 0 alone freezes a layer and runs the bare module in eval mode: nobody else is there for it."""
    model = _linear()
    ddp = DDP(model)
    x = torch.full((1, 3), rank + 1.0)
    ddp(x).sum().backward()
    ddp.zero_grad()
    ddp.eval()
    if rank == 0:
        model[0].requires_grad_(False)
        model(x).sum().backward()
        assert model[0].weight.grad is None
        assert torch.equal(model[1].weight.grad, model[0](x))  # its own, not a mean
        model[0].requires_grad_(True)
        ddp.zero_grad()
    dist.barrier()
    ddp.train()
    ddp(x).sum().backward()
    assert_in_sync(model)


@pytest.mark.parametrize("held", [False, True])
@on_ranks(group_timeout_s=60, allow_warnings=EVAL_WARNING)
def test_a_rank_alone_may_look_at_gradients_after_a_validation_forward(rank, world_size, held):
    """A validation forward that made a graph has no say in what a later backward of the bare module is."""
    model = _linear()
    ddp = DDP(model)
    x = torch.full((1, 3), rank + 1.0)
    ddp(x).sum().backward()
    ddp.zero_grad()
    ddp.eval()
    output = ddp(x)
    if not held:
        del output
    if rank == 0:
        model(x).sum().backward()
        assert torch.equal(model[1].weight.grad, model[0](x))
    dist.barrier()


@on_ranks()
def test_ranks_that_unfreeze_differently_are_refused_until_they_are_alike(rank, world_size):
    model = Sum(frozen="ab")
    ddp = DDP(model)
    step(ddp, rank)
    ddp.zero_grad()
    mine = model.b if rank else model.a
    mine.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ParameterMismatchError, match=r"[ab]\.weight"):
            step(ddp, rank)
        ddp.zero_grad()
    model.requires_grad_(True)
    for _ in range(2):
        step(ddp, rank)
        for part in (model.a, model.b, model.c):
            assert_grad(part, 1.5)
        ddp.zero_grad()


@pytest.mark.parametrize("change", ["unfreeze", "freeze"])
@on_ranks()
def test_what_was_accumulated_survives_a_change_of_the_parameters(rank, world_size, change):
    """What no_sync accumulated is reduced by the next synchronised backward, even if that does not use it."""
    model = Sum(frozen="c" if change == "unfreeze" else "")
    ddp = DDP(model)
    for _ in range(2):
        step(ddp, rank)
        ddp.zero_grad()
    with ddp.no_sync():
        step(ddp, rank)
    model.c.requires_grad_(change == "unfreeze")
    step(ddp, rank, False)
    assert_grad(model.a, 3.0)
    assert_grad(model.b, 1.5)
    if change == "unfreeze":
        assert_grad(model.c, 1.5)
