"""Several wrappers of one module: the one in use reduces, and a dropped one leaves nothing behind."""

import weakref

import torch
from torch import nn

from paceline import DistributedDataParallel
from tests.on_ranks import on_ranks
from tests.reference import ours_only

MEAN = torch.full((2, 2), 1.5)


def _input(rank):
    return torch.ones(1, 2) * (rank + 1)


@ours_only
@on_ranks()
def test_only_the_wrapper_in_use_communicates(rank, world_size):
    module = nn.Linear(2, 2)
    first = DistributedDataParallel(module)
    second = DistributedDataParallel(module)
    for used, other in ((first, second), (second, first)):
        module.zero_grad()
        steps = other.stats()["steps"]
        used(_input(rank)).sum().backward()
        assert torch.equal(module.weight.grad, MEAN)
        assert other.stats()["steps"] == steps


@ours_only
@on_ranks()
def test_a_dropped_wrapper_gives_its_parameters_back(rank, world_size):
    module = nn.Linear(2, 2)
    first = DistributedDataParallel(module)
    second = DistributedDataParallel(module)
    del second
    # Through the bare module: no forward of the first one tells that it is in use again.
    first.module(_input(rank)).sum().backward()
    assert torch.equal(module.weight.grad, MEAN)

    gone = weakref.ref(first)
    del first
    assert gone() is None, "freed without the garbage collector"
    module.zero_grad()
    module(_input(rank)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((2, 2), rank + 1.0)), "no hook is left on the module"


@ours_only
@on_ranks()
def test_two_wrappers_that_share_some_layers(rank, world_size):
    trunk, left, right = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    a = DistributedDataParallel(nn.Sequential(trunk, left))
    b = DistributedDataParallel(nn.Sequential(trunk, right))
    (a(_input(rank)).sum() + b(_input(rank)).sum()).backward()
    grads = [p.grad.clone() for layer in (trunk, left, right) for p in layer.parameters()]
    for grad in grads:
        everybody = [torch.empty_like(grad) for _ in range(world_size)]
        torch.distributed.all_gather(everybody, grad)
        assert torch.equal(everybody[0], everybody[1])
