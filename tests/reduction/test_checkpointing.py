"""Activation checkpointing: reentrant and not, a layer used several times, with and without unused ones."""

from __future__ import annotations

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.reference import batch, compare_with_reference, no_sync, ours_only, square


class _Net(nn.Module):
    """``times``: how often the checkpointed layer is used. ``spare``: with a layer that is never used."""

    def __init__(self, use_reentrant, times=1, spare=False):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2) if spare else None
        self.use_reentrant = use_reentrant
        self.times = times

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        x = checkpoint(self.second, x.tanh(), use_reentrant=self.use_reentrant)
        return self.last(x)


def _train(rank, world_size, make, net, step, options):
    compare_with_reference(rank, world_size, lambda: make(**net), step, **options)


REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])


OPTIONS = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "small": {"bucket_cap_mb": 0.0001},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


@REENTRANT
@pytest.mark.parametrize("options", ["plain", "view", "small"])
def test_checkpointed_once(ranks, use_reentrant, options):
    ranks(_train, _Net, {"use_reentrant": use_reentrant}, square, {"steps": 4, **OPTIONS[options]})


@REENTRANT
@pytest.mark.parametrize(("times", "spare"), [pytest.param(1, True, marks=ours_only), (3, False), (3, True)])
@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=[ours_only] * (name != "static")) for name in OPTIONS], ids=OPTIONS
)
def test_layer_used_several_times_and_one_that_is_not(ranks, use_reentrant, times, spare, options):
    net = {"use_reentrant": use_reentrant, "times": times, "spare": spare}
    ranks(_train, _Net, net, square, {"steps": 4, **OPTIONS[options]})


def _accumulated(model, r, i):
    with no_sync(model):
        square(model, r, 10 + i)
    square(model, r, i)


class _Nested(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def inside(self, x):
        return checkpoint(self.b, self.a(x).tanh(), use_reentrant=self.use_reentrant)

    def forward(self, x):
        return checkpoint(self.inside, self.a(x), use_reentrant=self.use_reentrant)


class _WholeModel(nn.Module):
    """Everything is checkpointed, so with reentrant checkpoints every hook fires in a nested backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint_sequential(self.net, 2, x, use_reentrant=self.use_reentrant)


def _with_gradient_of_input(model, r, i):
    model(batch(r, i).requires_grad_()).square().mean().backward()


class _Ways(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x, r):
        y = checkpoint(self.ways[r], self.stem(x), use_reentrant=self.use_reentrant)
        return checkpoint(self.ways[r], y.tanh(), use_reentrant=self.use_reentrant)


def _way_of_rank(model, r, i):
    model(batch(r, i), r).square().mean().backward()


@REENTRANT
@pytest.mark.parametrize(
    ("make", "net", "step", "options"),
    [
        pytest.param(_Net, {"times": 2}, _accumulated, {}, id="accumulated", marks=ours_only),
        pytest.param(_Nested, {}, square, {}, id="a checkpoint inside a checkpoint", marks=ours_only),
        pytest.param(_WholeModel, {}, _with_gradient_of_input, OPTIONS["small"], id="the whole model"),
        pytest.param(_Ways, {}, _way_of_rank, {}, id="different layers on each rank", marks=ours_only),
    ],
)
def test_other_ways_to_checkpoint(ranks, use_reentrant, make, net, step, options):
    # What torch says of the inner checkpoint while the outer one runs without grad.
    allowed = (("None of the inputs have requires_grad", UserWarning),)
    ranks(_train, make, {"use_reentrant": use_reentrant, **net}, step, options, allow_warnings=allowed)
