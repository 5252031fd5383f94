"""A mesh of three dimensions: data parallel, and parameters in parts along two others; with all that goes with it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paceline
from paceline.errors import StateError
from paceline.testing import RankPool
from tests.reference import batch, full
from tests.transport.requirements import needs_shm

STEPS, LR = 3, 0.1
LOW = {"rtol": 1e-2, "atol": 1e-3}
FULL_RANK = {"matrix_approximation_rank": 6, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}


@pytest.fixture(scope="module")
def eight_ranks(job_directory: None) -> Iterator[Callable[..., list[Any]]]:
    with RankPool(max_world_size=8) as pool:
        yield pool.run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.table = nn.Parameter(torch.randn(6, 4))
        self.head = nn.Linear(4, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = full(self.table)
        return self.head(self.down(torch.relu(self.up(x))) @ table.T @ table)


def _in_parts(whole: Net, mesh: DeviceMesh) -> Net:
    """Two layers in parts along one dimension, a table along two, a layer that all have."""
    parts = copy.deepcopy(whole)
    parallelize_module(parts, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    table = distribute_tensor(parts.table.detach(), mesh["sp", "tp"], [Shard(1), Shard(0)])
    parts.table = nn.Parameter(table)
    return parts


@dataclass(frozen=True)
class Case:
    """How a module is wrapped and trained; weights are to be those of one process."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    hook: Callable[[paceline.DDP], None] | None = None
    in_backward: str = ""
    weights: tuple[float, float] = (1.0, 1.0)
    steps: tuple[int, int] = (STEPS, STEPS)
    shm: bool = False
    tolerance: dict[str, float] = field(default_factory=lambda: {"rtol": 1e-9, "atol": 1e-11})


def _fp16(ddp: paceline.DDP) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _powersgd(ddp: paceline.DDP) -> None:
    state = powerSGD_hook.PowerSGDState(ddp.process_group, **FULL_RANK)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


CASES = [
    Case("shm", shm=True, options={"bucket_cap_mb": 0.0001}),
    Case("optimizer in backward", in_backward="wrapped later"),
    Case("optimizer in backward, shm", in_backward="wrapped later", shm=True, options={"bucket_cap_mb": 0.0001}),
    Case("fused optimizer", in_backward="fused"),
    Case("float16", hook=_fp16, tolerance=LOW),
    Case("PowerSGD", hook=_powersgd, tolerance=LOW),
    Case("uneven inputs", steps=(STEPS, STEPS + 1)),
    Case("low precision", {"mixed_precision": paceline.MixedPrecision(param_dtype=torch.float32)}, tolerance=LOW),
    Case("delayed", {"delay_all_reduce_named_params": ("table", "up.weight")}),
    Case("weighed", weights=(1.0, 3.0)),
]


def _one_process(whole: Net, case: Case) -> None:
    optimizer = torch.optim.SGD(whole.parameters(), lr=LR)
    for step in range(max(case.steps)):
        optimizer.zero_grad()
        for rank in range(2):
            if step < case.steps[rank]:
                loss = whole(batch(rank, step)).pow(2).mean()
                (loss * case.weights[rank] / sum(case.weights)).backward()
        optimizer.step()


def _options(case: Case, parts: Net, mesh: DeviceMesh, shm: dist.ProcessGroup) -> dict[str, Any]:
    options = dict(case.options)
    delayed = options.get("delay_all_reduce_named_params")
    if delayed:
        options["delay_all_reduce_named_params"] = [(name, parts.get_parameter(name)) for name in delayed]
        options["param_to_hook_all_reduce"] = parts.down.weight
    return {**options, **({"process_group": shm} if case.shm else {"device_mesh": mesh["dp"]})}


def _train(case: Case, parts: Net, mesh: DeviceMesh, shm: dist.ProcessGroup) -> paceline.DDP:
    if case.in_backward == "wrapped later":
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, list(parts.parameters()), {"lr": LR})
    ddp = paceline.DDP(parts, **_options(case, parts, mesh, shm))
    if case.in_backward == "fused":
        ddp._register_fused_optim(torch.optim.SGD, LR)
    if case.hook is not None:
        case.hook(ddp)
    optimizer = None if case.in_backward else torch.optim.SGD(parts.parameters(), lr=LR)
    mine = mesh["dp"].get_local_rank()
    weighed = len(set(case.weights)) > 1
    with ddp.join() if len(set(case.steps)) > 1 else contextlib.nullcontext():
        for step in range(case.steps[mine]):
            ddp.zero_grad()
            with ddp.weighted(case.weights[mine]) if weighed else contextlib.nullcontext():
                ddp(batch(mine, step)).pow(2).mean().backward()
            if optimizer is not None:
                optimizer.step()
    return ddp


def _assert_equal(parts: Net, whole: Net, case: str, tolerance: dict[str, float]) -> None:
    for (name, param), other in zip(parts.named_parameters(), whole.named_parameters(), strict=True):
        told = f"{case}, {name}: "
        torch.testing.assert_close(
            full(param.detach()), other[1].detach(), **tolerance, msg=lambda m, told=told: told + m
        )
        assert isinstance(param, DTensor) == name.startswith(("up", "down", "table")), told
        assert param.grad is None or isinstance(param.grad, DTensor) == isinstance(param, DTensor), told


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "sp", "tp"))


def _in_three(rank, world_size):
    mesh = _mesh()
    groups = [dist.new_group([r, r + 4], backend="shm") for r in range(4)]
    for case in CASES:
        torch.manual_seed(0)
        whole = Net()
        parts = _in_parts(whole, mesh)
        _one_process(whole, case)
        _train(case, parts, mesh, groups[rank % 4])
        _assert_equal(parts, whole, case.name, case.tolerance)


@pytest.mark.timeout(600)
@pytest.mark.full
def test_weights_are_those_of_one_process(eight_ranks):
    needs_shm()
    # torch's optimizers for hooks use its deprecated torch.jit.script.
    eight_ranks(_in_three, world_size=8, timeout=480, allow_warnings=(("", DeprecationWarning),))


def _flattened(rank, world_size):
    """Replicas along two dimensions: the wrapper's group is both of them together."""
    mesh = _mesh()
    both = mesh["dp", "sp"]._flatten("both")
    torch.manual_seed(0)
    whole = Net()
    parts = copy.deepcopy(whole)
    parallelize_module(parts, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ddp = paceline.DDP(parts, device_mesh=both)
    # To these hooks None means all ranks of the job, and the wrapper has only half of them.
    theirs = (powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    for state, hook in ((paceline.hooks.PowerSGDState(), paceline.hooks.powersgd), theirs):
        with pytest.raises(StateError, match=r"all 8 ranks.*a group of 4.*process_group=ddp\.process_group"):
            ddp.register_comm_hook(state, hook)
    ddp.register_comm_hook(None, paceline.hooks.allreduce)
    for model, ranks in ((ddp, [both.get_local_rank()]), (whole, range(4))):
        for n in ranks:
            (model(batch(n)).pow(2).mean() / len(ranks)).backward()
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.timeout(600)
def test_replicas_along_two_dimensions(eight_ranks):
    eight_ranks(_flattened, world_size=8, timeout=480)
