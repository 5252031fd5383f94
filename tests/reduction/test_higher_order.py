"""``backward(create_graph=True)``: gradients that can be differentiated again."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_grads, batch, mlp, ours_only

pytestmark = ours_only


def _penalty(model):
    """Backward of a penalty on the gradients, which then are replaced by the penalty's own."""
    params = list(model.parameters())
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    sum(g.square().sum() for g in grads).backward()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@on_ranks(allow_warnings=(("Using backward", UserWarning),))
def test_create_graph_gives_right_higher_order_gradients(rank, world_size, options):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    reference = mlp()
    torch.manual_seed(7 + rank)
    ddp = DDP(mlp(), **options)
    for i in range(2):
        # The penalty is not linear in the gradient: the reference must see the whole batch at once.
        whole = torch.cat([batch(r, i) for r in range(world_size)])
        reference(whole).square().mean().backward(create_graph=True)
        first = {name: p.grad.detach().clone() for name, p in reference.named_parameters()}
        _penalty(reference)
        second = {name: p.grad.detach().clone() for name, p in reference.named_parameters()}

        ddp(batch(rank, i)).square().mean().backward(create_graph=True)
        assert_grads(ddp, first, f"first order, step {i}")
        _penalty(ddp)
        assert_grads(ddp, second, f"second order, step {i}")
        for model in (reference, ddp):
            for p in model.parameters():
                p.grad = None


class _OddStrides(nn.Module):
    """A 1x1 convolution in channels_last, whose strides get lost in sums, and a transposed parameter with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)
        self.holes = nn.Parameter(torch.randn(5, 6)[:, ::2].t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, :, None, None])[:, :, 0, 0] @ self.holes


@on_ranks(allow_warnings=(("Using backward", UserWarning),))
def test_create_graph_keeps_strides(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    reference = _OddStrides()
    torch.manual_seed(7)
    # The module is made anew, because a copy would have no holes.
    ddp = DDP(_OddStrides())
    ordinary = []
    weights = [1.0, 3.0]
    # A rank that needs no graph lays its gradients out in the same way as a rank that needs one.
    for i, (graphs, weighed) in enumerate([((), False), ((0, 1), False), ((1,), False), ((0, 1), True)]):
        ddp.zero_grad()
        with ddp.weighted(weights[rank]) if weighed else contextlib.nullcontext():
            ddp(batch(rank, i)).square().mean().backward(create_graph=rank in graphs)
        strides = [p.grad.stride() for p in ddp.parameters()]
        ordinary = ordinary or strides
        assert strides == ordinary, (graphs, weighed)
        share = weights if weighed else [2.0, 2.0]
        reference.zero_grad()
        for r in range(world_size):
            (reference(batch(r, i)).square().mean() * share[r] / 4).backward()
        assert_grads(ddp, {name: p.grad for name, p in reference.named_parameters()}, (graphs, weighed))
    assert ddp.module.conv.weight.grad.stride() == ddp.module.conv.weight.stride() == (4, 1, 4, 4)
