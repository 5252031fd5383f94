"""Whole training steps of torch's own wrappers: the same weights as over gloo, to the bit on two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..conformance import case

# What torch itself says in its wrappers is not the transport's doing.
ALLOW = ((".*", DeprecationWarning), (".*", FutureWarning), (".*", UserWarning))
STEPS = 4


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 5))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 24, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def _train(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs, targets = _batch(rank, step)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# The hook has no annotations: torch compares them with its classes, and here they would be strings.
def _mean_of_bucket(group, bucket):
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@case(compare=True, allow_warnings=ALLOW)
def torch_ddp(rank, world_size):
    results: dict[str, Any] = {}
    for views, has_hook in ((False, False), (True, False), (True, True)):
        model = nn.parallel.DistributedDataParallel(_model(), gradient_as_bucket_view=views, bucket_cap_mb=0.02)
        if has_hook:
            model.register_comm_hook(dist.group.WORLD, _mean_of_bucket)
        results[f"losses, views {views}, hook {has_hook}"] = _train(model, rank)
        results[f"weights, views {views}, hook {has_hook}"] = [p.detach().clone() for p in model.parameters()]
    return results


@case(compare=True, allow_warnings=ALLOW)
def torch_ddp_with_buffers_and_unused(rank, world_size):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.unused = nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.body(x)))

    torch.manual_seed(7)
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    losses = _train(model, rank)
    return losses, [value.detach().clone() for value in model.state_dict().values()]


@case(compare=True, allow_warnings=ALLOW)
def our_ddp(rank, world_size):
    import paceline

    model = paceline.DistributedDataParallel(_model())
    losses = _train(model, rank)
    return losses, [p.detach().clone() for p in model.parameters()]


def _fully_sharded(rank: int, *, mesh: dist.DeviceMesh) -> tuple[list[float], list[torch.Tensor]]:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = _train(model, rank)
    return losses, [p.full_tensor().detach().clone() for p in model.parameters()]


@case(compare=True, allow_warnings=ALLOW, timeout_s=120)
def fsdp2(rank, world_size):
    return _fully_sharded(rank, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))


@case(compare=True, allow_warnings=ALLOW, timeout_s=120)
def dtensor(rank, world_size):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(3)
    whole = torch.randn(12, 10)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = rows.redistribute(mesh, [Replicate()]).t() @ columns
    assert isinstance(product, DTensor)
    model = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = _train(model, 0)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return product.full_tensor(), rows.sum().full_tensor(), losses, [w.detach().clone() for w in weights]


@case(compare=True, allow_warnings=ALLOW)
def zero_redundancy_optimizer(rank, world_size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    for step in range(2):
        inputs, targets = _batch(rank, step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@case(4, compare=True, allow_warnings=ALLOW, timeout_s=120)
def hybrid_sharding(rank, world_size):
    """FSDP2 on a two-dimensional mesh: reduce-scatter within, all-reduce across. Two ranks a sum, so bits are equal."""
    names = ("replicate", "shard")
    return _fully_sharded(rank, mesh=dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


@case(compare=True, allow_warnings=ALLOW)
def sparse_embeddings(rank, world_size):
    """Rows differ between ranks, in number too."""
    import paceline

    results: dict[str, Any] = {}
    for wrapper in (nn.parallel.DistributedDataParallel, paceline.DDP):
        torch.manual_seed(7)
        model = wrapper(nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.Linear(4, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            tokens = torch.randint(0, 10, (2, 2 + rank), generator=torch.Generator().manual_seed(10 * step + rank))
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[wrapper.__module__] = [p.detach().clone() for p in model.parameters()]
    return results
