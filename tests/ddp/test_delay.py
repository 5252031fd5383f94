"""``delay_all_reduce_named_params``: parameters that are reduced after all others."""

from __future__ import annotations

import pytest
import torch

from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_in_sync, batch, compare_with_reference, mlp, no_sync, ours_only


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "view"])
@pytest.mark.parametrize(
    "which",
    [
        # These are ready before the parameter that is hooked, which is not delayed. torch's class can do only this.
        "2.",
        pytest.param("0.", marks=ours_only),
        pytest.param("all", marks=ours_only),
    ],
)
@on_ranks()
def test_delayed_all_reduce(rank, world_size, which, options):
    """Delayed parameters are averaged like all others."""

    def wrap(model):
        named = [(name, p) for name, p in model.named_parameters() if which == "all" or name.startswith(which)]
        return DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight, **options)

    def step(model, r, i):
        model(batch(r, i)).square().mean().backward()

    compare_with_reference(rank, world_size, mlp, step, wrap=wrap, steps=4)


@ours_only
@on_ranks()
def test_delayed_parameters_are_broadcast_at_the_start(rank, world_size):
    torch.manual_seed(rank)
    model = mlp()
    named = list(model.named_parameters())
    DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight)
    assert_in_sync(model)


@ours_only
@on_ranks()
def test_delayed_all_reduce_with_accumulation(rank, world_size):
    def wrap(model):
        named = [(name, p) for name, p in model.named_parameters() if name.startswith("0.")]
        return DDP(model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=model[0].weight)

    def step(model, r, i):
        with no_sync(model):
            model(batch(r, 10 + i)).square().mean().backward()
        model(batch(r, i)).square().mean().backward()

    compare_with_reference(rank, world_size, mlp, step, wrap=wrap)
