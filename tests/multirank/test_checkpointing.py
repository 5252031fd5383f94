"""Activation checkpointing: reentrant and not, a layer used several times, with and without unused ones."""

from __future__ import annotations

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ._ddp import batch, compare_with_reference, no_sync, ours_only


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


def _square(model, rank, i):
    model(batch(rank, i)).square().mean().backward()


def _train(rank, world_size, net, options):
    compare_with_reference(rank, world_size, lambda: _Net(**net), _square, steps=4, **options)


REENTRANT = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])


@REENTRANT
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}],
    ids=["plain", "view", "small"],
)
def test_checkpointed_once(ranks, use_reentrant, options):
    ranks(_train, {"use_reentrant": use_reentrant}, options)


@REENTRANT
@pytest.mark.parametrize("spare", [False, True])
def test_layer_used_several_times_with_static_graph(ranks, use_reentrant, spare):
    ranks(_train, {"use_reentrant": use_reentrant, "times": 3, "spare": spare}, {"static_graph": True})


@ours_only
@REENTRANT
@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}],
    ids=["plain", "unused", "view", "small"],
)
def test_layer_used_several_times(ranks, use_reentrant, spare, options):
    ranks(_train, {"use_reentrant": use_reentrant, "times": 3, "spare": spare}, options)


@ours_only
@REENTRANT
def test_checkpointed_once_with_an_unused_layer(ranks, use_reentrant):
    ranks(_train, {"use_reentrant": use_reentrant, "spare": True}, {})


def _accumulate(rank, world_size, use_reentrant):
    def step(model, r, i):
        with no_sync(model):
            _square(model, r, 10 + i)
        _square(model, r, i)

    compare_with_reference(rank, world_size, lambda: _Net(use_reentrant, times=2), step)


@ours_only
@REENTRANT
def test_accumulated(ranks, use_reentrant):
    ranks(_accumulate, use_reentrant)


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


def _nested(rank, world_size, use_reentrant):
    compare_with_reference(rank, world_size, lambda: _Nested(use_reentrant), _square)


@ours_only
@REENTRANT
def test_checkpoint_inside_a_checkpoint(ranks, use_reentrant):
    # What torch says of the inner checkpoint while the outer one runs without grad.
    ranks(_nested, use_reentrant, allow_warnings=(("None of the inputs have requires_grad", UserWarning),))


class _WholeModel(nn.Module):
    """Everything is checkpointed, so with reentrant checkpoints every hook fires in a nested backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint_sequential(self.net, 2, x, use_reentrant=self.use_reentrant)


def _whole(rank, world_size, use_reentrant):
    def step(model, r, i):
        model(batch(r, i).requires_grad_()).square().mean().backward()

    compare_with_reference(rank, world_size, lambda: _WholeModel(use_reentrant), step, bucket_cap_mb=0.0001)


@REENTRANT
def test_whole_model_checkpointed(ranks, use_reentrant):
    ranks(_whole, use_reentrant)


def _branches(rank, world_size, use_reentrant):
    """Ranks checkpoint different layers."""

    class _Net2(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.ways = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x, r):
            y = checkpoint(self.ways[r], self.stem(x), use_reentrant=use_reentrant)
            return checkpoint(self.ways[r], y.tanh(), use_reentrant=use_reentrant)

    def run(model, r, i):
        model(batch(r, i), r).square().mean().backward()

    compare_with_reference(rank, world_size, _Net2, run)


@ours_only
@REENTRANT
def test_ranks_checkpoint_different_layers(ranks, use_reentrant):
    ranks(_branches, use_reentrant)
