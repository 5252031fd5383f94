"""Our comm hooks and all of torch's under the wrapper, on a CPU group."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from paceline import hooks
from tests.hooks.hooked import hooked, mlp, square
from tests.on_ranks import on_ranks
from tests.reference import DDP, STOCK, assert_grads, assert_in_sync, batch, grads_of, mean_over_ranks, ours_only

# These come after `tests.reference`, which imports what they import without the warnings that would be errors.
from torch.distributed.algorithms.ddp_comm_hooks import (  # isort: skip
    DDPCommHookType,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer  # isort: skip


def _weights(rank, ddp, optimizer=None, steps=4):
    """The weights after some steps. Without an ``optimizer``, the backward has to step."""
    for i in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, i).float()).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def _closely(rank, world_size, register, rtol):
    """Train beside the reference: gradients are within ``rtol`` of the largest, and alike on all ranks.

    There are several buckets, so that their collectives overlap if the hook lets them. Hooks expect float32.
    """
    model = mlp()
    reference = copy.deepcopy(model)
    ddp = DDP(model, bucket_cap_mb=0.0002)
    register(ddp)

    def step(m, r, i):
        m(batch(r, i).float()).square().mean().backward()

    for i in range(5):
        reference.load_state_dict(model.state_dict())
        expected = mean_over_ranks(reference, lambda m, r, i=i: step(m, r, i), world_size)
        step(ddp, rank, i)
        assert_in_sync(model)
        # Hooks compress buckets, so that the largest gradient of all sets the error of each.
        scale = max(grad.abs().max().item() for grad in expected.values())
        for name, got in grads_of(ddp).items():
            torch.testing.assert_close(
                got, expected[name], rtol=0, atol=rtol * scale, msg=lambda t, n=name: f"{n}: {t}"
            )
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.05)
        ddp.zero_grad()
    assert STOCK or len(ddp.plan.buckets) > 1


OUR_HOOKS = {
    "ours allreduce": (lambda: (None, hooks.allreduce), 1e-6),
    "ours fp16": (lambda: (None, hooks.fp16_compress), 2e-3),
    "ours bf16": (lambda: (dist.group.WORLD, hooks.bf16_compress), 2e-2),
    "ours partial": (lambda: (None, functools.partial(hooks.bf16_compress)), 2e-2),
    "ours fp16(allreduce)": (lambda: (None, hooks.fp16(hooks.allreduce)), 2e-3),
    # At full rank, PowerSGD delivers everything.
    "ours powersgd": (
        lambda: (hooks.PowerSGDState(rank=999, start_iter=0, min_compression_rate=0.1), hooks.powersgd),
        1e-5,
    ),
}
TORCH_HOOKS = {
    "allreduce": (lambda: (None, default_hooks.allreduce_hook), 1e-6),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), 2e-3),
    "bf16": (lambda: (None, default_hooks.bf16_compress_hook), 2e-2),
    "fp16_wrapper": (lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)), 2e-3),
    "bf16_wrapper": (lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)), 2e-2),
    "quantization_pertensor": (lambda: (dist.group.WORLD, quantization_hooks.quantization_pertensor_hook), 3e-2),
    "quantization_perchannel": (lambda: (dist.group.WORLD, quantization_hooks.quantization_perchannel_hook), 3e-2),
    # A rank as large as the smaller side of each matrix: the approximation is exact.
    "power_sgd": (
        lambda: (
            powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=8, start_powerSGD_iter=2, min_compression_rate=0.1
            ),
            powerSGD_hook.powerSGD_hook,
        ),
        1e-4,
    ),
    "power_sgd_warm_up": (
        lambda: (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=100),
            powerSGD_hook.powerSGD_hook,
        ),
        1e-6,
    ),
    "post_local_sgd": (
        lambda: (
            post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=dist.group.WORLD, start_localSGD_iter=2),
            post_localSGD_hook.post_localSGD_hook,
        ),
        1e-6,
    ),
}
# torch's class refuses or breaks these on the CPU; the reference alone says whether they are right.
STOCK_REFUSES = {"bf16", "bf16_wrapper", "quantization_pertensor", "quantization_perchannel"}


ALL_HOOKS = OUR_HOOKS | TORCH_HOOKS


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=ours_only if n in OUR_HOOKS.keys() | STOCK_REFUSES else ()) for n in ALL_HOOKS]
)
@on_ranks()
def test_a_hook_is_near_the_mean(rank, world_size, name):
    make, rtol = ALL_HOOKS[name]
    _closely(rank, world_size, lambda ddp: ddp.register_comm_hook(*make()), rtol)


# These hooks start to compress after two steps, or never.
LOSSY_HOOKS = {
    "ours powersgd": lambda: (hooks.PowerSGDState(rank=2, start_iter=2), hooks.bf16(hooks.powersgd)),
    # With torch's class this is an AssertionError in torch's hook, on any device.
    "batched": lambda: (
        powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2),
        powerSGD_hook.batched_powerSGD_hook,
    ),
    "batched, before it compresses": lambda: (
        powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=1000),
        powerSGD_hook.batched_powerSGD_hook,
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "before" in n else ours_only) for n in LOSSY_HOOKS])
@on_ranks()
def test_training_with_a_lossy_hook(rank, world_size, name):
    """Gradients are lossy by design. With error feedback the loss still falls, and the ranks stay alike."""
    model = mlp()
    state, hook = LOSSY_HOOKS[name]()
    ddp = hooked(hook, state)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for i in range(12):
        optimizer.zero_grad()
        loss = ddp(batch(rank, i % 2).float()).square().mean()
        loss.backward()
        assert_in_sync(model)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert state.iter == 12
    assert name != "batched" or state.error_dict
    assert name != "ours powersgd" or state.compression_rate > 1


@ours_only
@pytest.mark.parametrize("name", ["allreduce", "fp16", "fp16_wrapper", "post_local_sgd", "power_sgd_warm_up"])
@on_ranks()
def test_torch_hook_is_bit_equal_to_torch(rank, world_size, name):
    """The same hook under torch's class and under ours leads to the same weights."""
    results, start = [], mlp()
    for wrapper in (StockDDP, DDP):
        ddp = wrapper(copy.deepcopy(start))
        ddp.register_comm_hook(*TORCH_HOOKS[name][0]())
        results.append(_weights(rank, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)))
    for ours, stock in zip(*results, strict=True):
        assert torch.equal(ours, stock)


@on_ranks()
def test_noop_hook_leaves_local_gradients(rank, world_size):
    torch.set_default_dtype(torch.float64)
    local = mlp()
    ddp = hooked(debugging_hooks.noop_hook)(copy.deepcopy(local))
    square(ddp, rank, 0)
    square(local, rank, 0)
    assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


@on_ranks()
def test_post_local_sgd_switches_to_the_subgroup(rank, world_size):
    # A subgroup of one: after the switch, gradients are this rank's own.
    mine = [dist.new_group([r]) for r in range(world_size)][rank]
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=mine, start_localSGD_iter=2)
    model = mlp()
    ddp = hooked(post_localSGD_hook.post_localSGD_hook, state)(model)
    alike = []
    for i in range(5):
        ddp.zero_grad()
        ddp(batch(rank, i).float()).square().mean().backward()
        gathered = [torch.empty(2) for _ in range(world_size)]
        dist.all_gather(gathered, model[4].bias.grad.clone())
        alike.append(torch.equal(*gathered))
    assert alike[0]
    assert not alike[-1]


@on_ranks()
def test_register_fused_optim(rank, world_size):
    """The optimizer runs in the hook; weights equal a plain step after backward."""
    model = mlp()
    overlapped = DDP(copy.deepcopy(model))
    overlapped._register_fused_optim(torch.optim.SGD, 0.1)
    expected = _weights(rank, DDP(model), torch.optim.SGD(model.parameters(), lr=0.1))
    for in_hook, plain_step in zip(_weights(rank, overlapped), expected, strict=True):
        torch.testing.assert_close(in_hook, plain_step)


@on_ranks()
def test_register_fused_optim_for_some_parameters(rank, world_size):
    model = mlp()
    ddp = DDP(model)
    before = [p.detach().clone() for p in model.parameters()]
    ddp._register_fused_optim(torch.optim.SGD, 0.1, optim_params=list(model[0].parameters()))
    ddp(batch(rank).float()).square().mean().backward()
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [True, True, False, False, False, False]
    assert_in_sync(model)


class _Backwards(nn.Module):
    """Used in another order than registered: the buckets are made anew after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@ours_only
@pytest.mark.parametrize("make", [mlp, _Backwards])
@on_ranks()
def test_optimizers_applied_in_backward(rank, world_size, make):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = make()
    stepping = copy.deepcopy(model)
    _apply_optimizer_in_backward(torch.optim.SGD, list(stepping.parameters()), {"lr": 0.1})
    in_backward = _weights(rank, DDP(stepping, bucket_cap_mb=1e-4))
    assert_in_sync(stepping, grads=False)
    expected = _weights(rank, DDP(model, bucket_cap_mb=1e-4), torch.optim.SGD(model.parameters(), lr=0.1))
    for in_hook, plain_step in zip(in_backward, expected, strict=True):
        torch.testing.assert_close(in_hook, plain_step)


@pytest.mark.parametrize("hook_maker", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
@on_ranks(backend="cpu:gloo")
def test_zero_step_in_the_hook(rank, world_size, hook_maker):
    """ZeRO's step inside the hook: weights equal to plain SGD, state sharded."""
    model, reference = mlp(), mlp()
    ddp = DDP(model)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(),
        optimizer_class=torch.optim.SGD,
        lr=0.1,
        overlap_with_ddp=True,
        parameters_as_bucket_view=False,
    )
    make = getattr(ddp_zero_hook, hook_maker)
    ddp.register_comm_hook(None, make(default_hooks.allreduce_hook, ddp, zero, shard_buckets=False))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    # The first two backwards only build buckets and the schedule.
    for _ in range(3):
        ddp(batch(rank, 0).float()).square().mean().backward()
        zero.step()
        ddp.zero_grad()
    reference.load_state_dict(model.state_dict())
    for i in range(3):
        expected = mean_over_ranks(
            reference, lambda m, r, i=i: m(batch(r, i).float()).square().mean().backward(), world_size
        )
        for name, p in reference.named_parameters():
            p.grad = expected[name]
        optimizer.step()
        ddp(batch(rank, i).float()).square().mean().backward()
        zero.step()
        ddp.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert_in_sync(model, grads=False)


@pytest.mark.parametrize(
    ("kinds", "name", "rtol"),
    [("enum", "ALLREDUCE", 1e-6), ("builtin", "ALLREDUCE", 1e-6), ("builtin", "FP16_COMPRESS", 2e-3)],
)
@on_ranks()
def test_hooks_that_are_registered_by_their_kind(rank, world_size, kinds, name, rtol):
    def register(ddp):
        if kinds == "enum":
            register_ddp_comm_hook(DDPCommHookType[name], ddp, None)
        else:
            ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))

    _closely(rank, world_size, register, rtol)


@on_ranks(allow_warnings=(("NOTE: Process group", UserWarning), ("PowerSGD", UserWarning)))
def test_hook_state_can_be_saved(rank, world_size):
    """PowerSGD's state goes through torch.save whole, and training goes on from it."""

    def train(model, state):
        ddp = hooked(powerSGD_hook.powerSGD_hook, state)(model)
        _weights(rank, ddp, torch.optim.SGD(model.parameters(), lr=0.05))
        # This is where torch's class keeps what was registered.
        return ddp._comm_hooks[0][1]

    model = mlp()
    state = train(model, powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert saved.iter == state.iter == 4
    assert state.error_dict
    for index, error in state.error_dict.items():
        assert torch.equal(saved.error_dict[index], error)
    # Weights are not those of a run that never stopped: a new wrapper starts with buckets in registration order.
    assert train(model, saved).iter == 8
    assert_in_sync(model)
