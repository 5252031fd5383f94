"""One backward that passes through several wrappers: their buckets leave in one order on all ranks."""

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import StateError
from tests.on_ranks import on_ranks
from tests.reference import ours_only

RANKS = range(2)


class Layers(nn.Module):
    """Layers of one size, so that buckets that are mixed up would be averaged without a word."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(4)])

    def forward(self, x, use):
        for number in use:
            x = torch.tanh(self.layers[number](x))
        return x


def _wrapped(count=2, **options):
    torch.manual_seed(0)
    # One bucket for each layer.
    return [DistributedDataParallel(Layers(), bucket_cap_mb=1e-5, **options) for _ in range(count)]


def _input(rank):
    return torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4) * (rank + 1)


def _chain(first, second, rank, uses):
    return second(first(_input(rank), uses[0][rank]), uses[1][rank]).square().sum()


def _cycle(first, second, rank, uses):
    return first(_chain_output(first, second, rank, uses), uses[0][rank]).square().sum()


def _chain_output(first, second, rank, uses):
    return second(first(_input(rank), uses[0][rank]), uses[1][rank])


def _towers(first, second, rank, uses):
    return (first(_input(rank), uses[0][rank]) * second(_input(rank), uses[1][rank])).sum()


ALL, SOME = (0, 1, 2, 3), (0, 1, 3)
USES = {
    "the first of the backward": ((ALL, ALL), (ALL, SOME)),
    "the second of the backward": ((ALL, SOME), (ALL, ALL)),
    "both": ((SOME, ALL), ((0,), ALL)),
}


@ours_only
@pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])
@pytest.mark.parametrize("loss", [_chain, _cycle, _towers])
@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_ranks_use_different_layers_of_two_wrappers(ranks, backend, loss, uses):
    ranks(_averages_two_wrappers, loss, uses, backend=backend)


def _averages_two_wrappers(rank, world_size, loss, uses):
    wrappers = _wrapped()
    params = [param for wrapper in wrappers for param in wrapper.parameters()]
    # The plan changes after the first step, and what is late there is expected in the second.
    for _ in range(3):
        means = _means(loss, [wrapper.module for wrapper in wrappers], params, uses)
        for param in params:
            param.grad = None
        loss(*wrappers, rank, uses).backward()
        for param, mean in zip(params, means, strict=True):
            torch.testing.assert_close(param.grad, mean, rtol=1e-12, atol=1e-12)


def _means(loss, modules, params, uses):
    """The average over ranks of what each rank's gradients are, with zeros for what it does not use."""
    grads = [torch.autograd.grad(loss(*modules, rank, uses), params, materialize_grads=True) for rank in RANKS]
    return [sum(each) / len(RANKS) for each in zip(*grads, strict=True)]


@ours_only
@on_ranks()
def test_the_second_wrapper_overlaps_too(rank, world_size):
    """If all ranks use all layers, nothing is late, and buckets of both leave before the backward is over."""
    first, second = _wrapped()
    for _ in range(2):
        _chain(first, second, rank, ((ALL, ALL), (ALL, ALL))).backward()
    times = [wrapper._reducer.telemetry.last for wrapper in (first, second)]
    over = min(each.backward_end_ns for each in times)
    for each in times:
        # The last bucket waits for the end, and a bucket that is late would leave twice.
        assert [left_ns < over for left_ns in each.launches_ns] == [True, True, True, False]


@ours_only
@pytest.mark.parametrize("joins", [0, 1])
@on_ranks()
def test_inside_join_it_is_refused(rank, world_size, joins):
    wrappers = _wrapped()
    with wrappers[joins].join(enable=True), pytest.raises(StateError, match="went through two wrappers"):
        _chain(*wrappers, rank, ((ALL, ALL), (ALL, ALL))).backward()
    # The backward had begun in the second one, and some of its buckets had left.
    with pytest.raises(StateError, match="buckets were being reduced"):
        wrappers[1](_input(rank), ALL)
