"""Two backwards of one wrapper that run at the same time, on two threads."""

import threading

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import PeerError, StateError
from tests.on_ranks import on_ranks
from tests.reference import ours_only
from tests.transport.requirements import needs_shm

pytestmark = ours_only


class _Waits(torch.autograd.Function):
    """Its backward lets another thread go first."""

    @staticmethod
    def forward(ctx, x, may_go, go):
        ctx.may_go, ctx.go = may_go, go
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.go.set()
        assert ctx.may_go.wait(30)
        return grad, None, None


class _InTheMiddle(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, *events):
        hidden = self.first(x)
        return self.second(_Waits.apply(hidden, *events) if events else hidden)


def _at_the_same_time(rank, world_size, sync):
    ddp = DistributedDataParallel(_InTheMiddle())
    ddp.require_backward_grad_sync = sync
    may_go, go = threading.Event(), threading.Event()
    x = torch.full((1, 2), rank + 1.0)
    losses = [ddp(x, may_go, go).sum(), ddp(x).sum()]
    errors = []

    def first():
        try:
            losses[0].backward()
        except (StateError, PeerError) as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    # The first one has brought the gradients of one layer now, and has yet to bring those of the other.
    assert go.wait(30)
    with pytest.raises(StateError, match=r"at the same time.*Thread-.*MainThread"):
        losses[1].backward()
    may_go.set()
    thread.join(30)
    assert not thread.is_alive()
    assert errors
    with pytest.raises((StateError, PeerError)):
        ddp(x).sum().backward()


@pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])
@pytest.mark.parametrize("sync", [True, False])
def test_two_backwards_at_the_same_time_are_refused(ranks, backend, sync):
    if backend == "cpu:shm":
        needs_shm()
    ranks(_at_the_same_time, sync, backend=backend)


@on_ranks()
def test_each_backward_may_have_a_thread_of_its_own(rank, world_size):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(3):
        ddp.zero_grad()
        thread = threading.Thread(target=ddp(torch.full((1, 2), rank + 1.0)).sum().backward)
        thread.start()
        thread.join(30)
        assert torch.equal(ddp.module.weight.grad, torch.full((2, 2), 1.5))
