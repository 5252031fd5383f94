"""A wrapper whose parameters are distributed over other ranks, compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from paceline import DDP
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.full), "aot_eager"])
@on_ranks(world_size=4)
def test_compiled_training_is_eager_training(rank, world_size, backend):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    trained = []
    for compile_ in (lambda ddp: ddp, lambda ddp: torch.compile(ddp, backend=backend)):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4)).double()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        # Several buckets, so that gradients are worth handing over early: those of the norm are.
        ddp = DDP(model, device_mesh=mesh["dp"], bucket_cap_mb=40 / 2**20)
        run = compile_(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            generator = torch.Generator().manual_seed(2 * step + replica)
            optimizer.zero_grad()
            run(torch.randn(3, 4, generator=generator, dtype=torch.float64)).pow(3).sum().backward()
            optimizer.step()
        trained.append([p.detach().to_local() if isinstance(p, DTensor) else p.detach() for p in ddp.parameters()])
    for eager, compiled in zip(*trained, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-11)
    assert "DTensor" in ddp._reducer.why_not_early(model[0].weight)
    assert ddp._reducer.why_not_early(model[3].weight) is None
