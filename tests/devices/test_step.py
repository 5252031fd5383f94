"""A step on a device whose work goes on without the host: the gradients, and that the host waits for none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import DDP, MixedPrecision
from tests.devices import sim, simccl
from tests.devices.twins import Twins, backward, inputs_of, make_model, no_sync_of_host
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(600)


def batches(rank: int, n: int = 4) -> list[Tensor]:
    return [inputs_of(rank, step) for step in range(n)]


@on_ranks(timeout=300)
def test_gradients_are_the_average(rank: int, size: int) -> None:
    """The expected ones come from one process without a wrapper."""
    twins = Twins()
    twins.run(backward, batches(rank))
    expected = make_model()
    for other in range(size):
        (expected(inputs_of(other, 3)).pow(2).mean() / size).backward()
    torch.testing.assert_close([grad.cpu() for grad in twins.kept[-1][1]], [p.grad for p in expected.parameters()])
    assert len(twins.on_sim.plan.buckets) > 1
    twins.check()


@on_ranks(timeout=300)
def test_training_goes_as_on_the_cpu(rank: int, size: int) -> None:
    twins = Twins()
    optimizers = {id(ddp): torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9) for ddp, _ in twins.both}

    def step(ddp: Any, batch: Tensor) -> None:
        backward(ddp, batch)
        optimizers[id(ddp)].step()

    twins.run(step, batches(rank))
    twins.check()


@on_ranks(timeout=300)
def test_communication_overlaps_backward_on_the_device(rank: int, size: int) -> None:
    """By the device's own clock. The host sent everything long before."""
    ddp = DDP(make_model().to(sim.DEVICE), process_group=simccl.join(), bucket_cap_mb=0.01)
    inputs = inputs_of(rank, 0).to(sim.DEVICE)
    for _ in range(2):
        backward(ddp, inputs)
    torch.accelerator.synchronize()
    start = len(sim.timeline())
    sim.kernels_take(5e-3)
    backward(ddp, inputs)
    torch.accelerator.synchronize()
    sim.kernels_take(0.0)
    ran = sim.timeline(start)
    reduced = [each for each in ran if each.name == "all-reduce"]
    computed = [each for each in ran if each.queue == 0]
    assert len(reduced) == len(ddp.plan.buckets)
    assert any(one.overlaps(other) for one in reduced for other in computed)
    dist.barrier()


@on_ranks(timeout=300)
def test_micro_batches_without_synchronisation(rank: int, size: int) -> None:
    twins = Twins()

    def step(ddp: Any, batch: Tensor) -> None:
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch).pow(2).mean().backward()
        ddp(batch + 1).pow(2).mean().backward()

    twins.run(step, batches(rank))
    twins.check()


class _Branches(nn.Module):
    """Each rank uses a part of its own, one part is used by none, and one is used again in a second forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 2)

    def forward(self, batch: Tensor) -> Tensor:
        mine = self.parts[dist.get_rank()]
        again: Tensor = checkpoint(self.parts[2], batch, use_reentrant=True, preserve_rng_state=False)
        again = checkpoint(self.parts[2], again, use_reentrant=True, preserve_rng_state=False)
        return self.last(mine(batch) + again)  # type: ignore[no-any-return]


@on_ranks(timeout=300)
def test_late_and_unused_gradients_are_right_in_the_same_step(rank: int, size: int) -> None:
    """The host is told by the other hosts, and sends again what came late."""
    twins = Twins(_Branches, bucket_cap_mb=0.0001)
    twins.run(backward, [batch.requires_grad_() for batch in batches(rank)])
    twins.check()
    assert twins.on_sim.module.parts[3].weight.grad is None


@pytest.mark.parametrize("hook", ["ours", "all-reduce", "float16"])
@on_ranks(timeout=300)
def test_comm_hooks(rank: int, size: int, hook: str) -> None:
    twins = Twins()
    hooks = {
        "ours": paceline.hooks.allreduce,
        "all-reduce": default_hooks.allreduce_hook,
        "float16": default_hooks.fp16_compress_hook,
    }
    for ddp, _ in twins.both:
        ddp.register_comm_hook(None, hooks[hook])
    twins.run(backward, batches(rank))
    twins.check()


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
@on_ranks(timeout=300)
def test_mixed_precision(rank: int, size: int, reduce_dtype: torch.dtype | None) -> None:
    twins = Twins(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    twins.run(backward, batches(rank))
    twins.check()


def _with_buffers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))


@on_ranks(timeout=300)
def test_buffers_are_those_of_rank_0(rank: int, size: int) -> None:
    twins = Twins(_with_buffers)
    twins.run(backward, batches(rank))
    for ddp, _ in twins.both:
        # A forward broadcasts them; what it then does to them is the rank's own.
        ddp.eval()
    twins.run(lambda ddp, batch: ddp(batch), batches(rank, 1))
    twins.check()


@on_ranks(timeout=300)
def test_join(rank: int, size: int) -> None:
    """Rank 1 runs out of inputs first. torch's own ``Join`` reads a count on the host in each of its iterations."""
    twins = Twins(_with_buffers)
    given = [[batch.to(device) for batch in batches(rank, 5 - 2 * rank)] for _, device in twins.both]
    sim.kernels_take(1e-3)
    for (ddp, device), inputs in zip(twins.both, given, strict=True):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            before = sim.host_syncs()
            for batch in inputs:
                backward(ddp, batch)
                optimizer.step()
            assert sim.host_syncs() - before == 0, (device, sim.last_sync())
    twins.check()


@on_ranks(timeout=300)
def test_numbers_for_logs(rank: int, size: int) -> None:
    """The group has no backend for the host, where the numbers are read."""
    group = simccl.join()
    with no_sync_of_host():
        assert paceline.mean(float(rank), group=group) == 0.5
    on_sim = paceline.total({"tokens": torch.full((2,), rank + 1, device=sim.DEVICE)}, group=group)["tokens"]
    assert on_sim.device == torch.device(sim.DEVICE)
    assert on_sim.tolist() == [3, 3]


@on_ranks(timeout=500)
def test_a_compiled_step(rank: int, size: int) -> None:
    torch._dynamo.reset()
    twins = Twins()
    compiled = {id(ddp): torch.compile(ddp, backend="aot_eager") for ddp, _ in twins.both}

    def step(ddp: Any, batch: Tensor) -> None:
        ddp.zero_grad()
        compiled[id(ddp)](batch).pow(2).mean().backward()

    for ddp, device in twins.both:
        step(ddp, inputs_of(rank, 9).to(device))
    twins.run(step, batches(rank))
    twins.check()


@on_ranks(timeout=300)
def test_what_makes_the_host_wait_is_counted(rank: int, size: int) -> None:
    """The counter counts, or the tests above would show nothing."""
    ones = torch.ones(3, device=sim.DEVICE)
    for wait in (ones.sum().item, ones.tolist, ones.cpu, torch.accelerator.synchronize):
        with pytest.raises(AssertionError, match="the host waited"), no_sync_of_host():
            wait()
    with no_sync_of_host():
        ones.mul_(2).sum()
    dist.barrier()
