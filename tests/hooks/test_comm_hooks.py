"""Comm hooks: any callable, replaceable, with state; and every hook that torch ships, on a CPU group."""

from __future__ import annotations

import functools
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from paceline.errors import PacelineError, StateError
from tests.ddp.exact import assert_grad, inputs_of, line, step
from tests.reference import (
    DDP,
    assert_grads,
    assert_in_sync,
    batch,
    compare_with_reference,
    grads_of,
    mean_over_ranks,
    no_sync,
    ours_only,
)

# After `_ddp`, which imports what these import without the warnings that would be errors.
from torch.distributed.algorithms.ddp_comm_hooks import (  # isort: skip
    DDPCommHookType,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer  # isort: skip
from tests.on_ranks import on_ranks


def _mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _square(model, rank, i):
    model(batch(rank, i)).square().mean().backward()


def _mean(bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


# -- any callable --------------------------------------------------------------------------------------------


def plain(state, bucket):
    return _mean(bucket)


def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _mean(bucket)


def other_names(s, b):
    return _mean(b)


def extra_default(state, bucket, scale=1.0):
    return _mean(bucket)


def starred(*args):
    return _mean(args[1])


class Callable_:
    def __call__(self, state, bucket):
        return _mean(bucket)

    def method(self, state, bucket):
        return _mean(bucket)


def _with_first(first, state, bucket):
    assert first == "first"
    return _mean(bucket)


def ready_future(state, bucket):
    """Communicates before it returns, and returns a new tensor rather than the bucket's."""
    total = bucket.buffer().clone()
    dist.all_reduce(total)
    future = torch.futures.Future()
    future.set_result(total / dist.get_world_size())
    return future


HOOKS = {
    "plain": plain,
    "annotated": annotated,
    "other_names": other_names,
    "extra_default": extra_default,
    "starred": starred,
    "callable": Callable_(),
    "method": Callable_().method,
    "partial": functools.partial(_with_first, "first"),
    "partial_keyword": functools.partial(extra_default, scale=2.0),
    "ready_future": ready_future,
}
# What torch's class accepts; it refuses annotations that are strings.
STOCK_ACCEPTS = {"plain", "extra_default", "ready_future"}


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0003}],
    ids=["plain", "view", "small"],
)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in STOCK_ACCEPTS else ours_only) for k in HOOKS])
@on_ranks()
def test_any_callable(rank, world_size, kind, options):
    def wrap(model):
        ddp = DDP(model, **options)
        ddp.register_comm_hook(None, HOOKS[kind])
        return ddp

    compare_with_reference(rank, world_size, _mlp, _square, wrap=wrap)


# -- what a hook sees ----------------------------------------------------------------------------------------


def _inspects_bucket(rank, world_size, options):
    torch.manual_seed(0)
    model = _mlp()
    ddp = DDP(model, **options)
    record = []

    def hook(state, bucket):
        assert state == {"mine": 1}
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1
        assert len(gradients) == len(parameters)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            assert gradient.shape == parameter.shape
            assert any(parameter is p for p in model.parameters())
            # A view: what is written to it is what travels.
            assert gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert sum(g.numel() for g in gradients) == buffer.numel()
        record.append((bucket.index(), bucket.is_last(), [id(p) for p in parameters]))
        return _mean(bucket)

    ddp.register_comm_hook({"mine": 1}, hook)
    for i in range(3):
        record.clear()
        ddp(batch(rank, i).float()).square().mean().backward()
        assert [index for index, _, _ in record] == list(range(len(record)))
        assert [last for _, last, _ in record] == [False] * (len(record) - 1) + [True]
        seen = [p for _, _, parameters in record for p in parameters]
        assert sorted(seen) == sorted(id(p) for p in model.parameters())
    return len(record)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0002}], ids=["plain", "small"])
def test_what_a_hook_sees(ranks, options):
    counts = ranks(_inspects_bucket, options)
    assert counts[0] == counts[1]
    assert (counts[0] > 1) == bool(options)


@on_ranks()
def test_a_hook_gets_local_gradients_and_its_result_is_the_gradient(rank, world_size):
    """A hook sees this rank's gradients, not yet divided; what it returns becomes the gradient."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, local = _mlp(), _mlp()
    ddp = DDP(model)
    local.load_state_dict(model.state_dict())
    seen = {}

    def hook(state, bucket):
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            seen[id(p)] = g.clone()
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 42.0))
        return future

    ddp.register_comm_hook(None, hook)
    _square(ddp, rank, 0)
    _square(local, rank, 0)
    for p, q in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(seen[id(p)], q.grad)
        assert torch.equal(p.grad, torch.full_like(p, 42.0))


@on_ranks()
def test_set_buffer(rank, world_size):
    def hook(state, bucket):
        bucket.set_buffer(bucket.buffer() / world_size)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def wrap(model):
        ddp = DDP(model)
        ddp.register_comm_hook(None, hook)
        return ddp

    compare_with_reference(rank, world_size, _mlp, _square, wrap=wrap)


def _boom(future):
    raise ValueError("boom in then")


@on_ranks()
def test_an_exception_in_a_then_surfaces(rank, world_size):
    """``then`` on ``then``, as wrappers of hooks do, and an exception in one surfaces."""
    torch.manual_seed(0)
    ddp = DDP(_mlp())
    ddp.register_comm_hook(None, lambda state, bucket: _mean(bucket).then(lambda f: f.value() * 2).then(_boom))
    with pytest.raises(Exception, match="boom in then"):
        ddp(batch(rank).float()).sum().backward()


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x, way):
        return self.ways[way](x)


@on_ranks()
def test_hook_with_unused_parameters(rank, world_size):
    def wrap(model):
        ddp = DDP(model, find_unused_parameters=True)
        ddp.register_comm_hook(None, plain)
        return ddp

    def step(model, r, i):
        model(batch(r, i), (r + i) % 2).square().mean().backward()

    compare_with_reference(rank, world_size, _Experts, step, wrap=wrap)


@on_ranks()
def test_hook_is_not_called_in_no_sync(rank, world_size):
    calls = []

    def wrap(model):
        ddp = DDP(model)
        ddp.register_comm_hook(None, lambda state, bucket: calls.append(1) or plain(state, bucket))
        return ddp

    def step(model, r, i):
        with no_sync(model):
            _square(model, r, 10 + i)
        _square(model, r, i)

    compare_with_reference(rank, world_size, _mlp, step, wrap=wrap, steps=3)
    assert len(calls) == 3


class _AddedEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(8, 4, sparse=True)
        self.place = nn.Embedding(8, 4, sparse=True)

    def forward(self, tokens, with_places):
        added = self.token(tokens)
        return added + self.place(tokens) if with_places else added


@ours_only
@on_ranks()
def test_hook_with_sparse_gradients(rank, world_size):
    """Both embeddings get the gradient of their sum: two sparse tensors on the same values."""

    def wrap(model):
        ddp = DDP(model)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        return ddp

    def step(model, r, i):
        model(torch.tensor([r, i, 5]), r == 0 or i != 1).square().mean().backward()

    compare_with_reference(rank, world_size, _AddedEmbeddings, step, wrap=wrap)


# -- registering ---------------------------------------------------------------------------------------------


@ours_only
@on_ranks()
def test_hooks_can_be_replaced(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = _mlp()
    ddp = DDP(model)
    calls = []
    for name in ("first", "second", "third"):
        ddp.register_comm_hook(name, lambda state, bucket: calls.append(state) or plain(state, bucket))
        _square(ddp, rank, 0)
        ddp.zero_grad()
    assert calls == ["first", "second", "third"]


@on_ranks()
def test_what_is_not_callable_is_refused(rank, world_size):
    torch.manual_seed(0)
    ddp = DDP(_mlp())
    with pytest.raises(TypeError):
        ddp.register_comm_hook(None, "not a callable")
    # Refused at once, and nothing else changed.
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(ddp.module)


def returns_none(state, bucket):
    return None


def wrong_length(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[:-1].clone())
    return future


def _bad_result(rank, world_size, hook):
    torch.manual_seed(0)
    ddp = DDP(_mlp())
    ddp.register_comm_hook(None, hook)
    with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
        ddp(batch(rank).float()).sum().backward()
    return isinstance(caught.value, PacelineError), str(caught.value)


@ours_only
@pytest.mark.parametrize("hook", [returns_none, wrong_length], ids=lambda hook: hook.__name__)
def test_a_hook_with_a_wrong_result_is_a_clear_error(ranks, hook):
    for ours, text in ranks(_bad_result, hook):
        assert ours, text
        assert "hook" in text


# -- torch's hooks -------------------------------------------------------------------------------------------


def _closely(rank, world_size, register, rtol, *, steps=4, lr=0.05, start_exact=0):
    """Train beside the reference; gradients within ``rtol`` of the largest, and alike on all ranks.

    float32, as hooks expect.
    """
    torch.manual_seed(0)
    model, reference = _mlp(), _mlp()
    reference.load_state_dict(model.state_dict())
    ddp = DDP(model)
    register(ddp)

    def step(m, r, i):
        m(batch(r, i).float()).square().mean().backward()

    for i in range(steps):
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
                p.sub_(p.grad, alpha=lr)
        ddp.zero_grad()


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


@pytest.mark.parametrize("name", [pytest.param(n, marks=ours_only if n in STOCK_REFUSES else ()) for n in TORCH_HOOKS])
@on_ranks()
def test_torch_hook_is_near_the_mean(rank, world_size, name):
    make, rtol = TORCH_HOOKS[name]
    _closely(rank, world_size, lambda ddp: ddp.register_comm_hook(*make()), rtol)


def _batched_power_sgd(rank, world_size, start):
    """Lossy by design: with error feedback the loss still falls and the ranks stay alike."""
    torch.manual_seed(0)
    model = _mlp()
    ddp = DDP(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=start)
    ddp.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
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
    assert state.iter > 0
    if start == 2:
        assert state.error_dict


def test_batched_power_sgd_before_it_compresses(ranks):
    ranks(_batched_power_sgd, 1000)


@ours_only
def test_batched_power_sgd_trains(ranks):
    # With torch's class this is an AssertionError in torch's hook, on any device.
    ranks(_batched_power_sgd, 2)


@ours_only
@pytest.mark.parametrize("name", ["allreduce", "fp16", "fp16_wrapper", "post_local_sgd", "power_sgd_warm_up"])
@on_ranks()
def test_torch_hook_is_bit_equal_to_torch(rank, world_size, name):
    """The same hook under torch's class and under ours leads to the same weights."""
    results = []
    for wrapper in (StockDDP, DDP):
        torch.manual_seed(0)
        model = _mlp()
        ddp = wrapper(model)
        ddp.register_comm_hook(*TORCH_HOOKS[name][0]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for i in range(5):
            optimizer.zero_grad()
            ddp(batch(rank, i).float()).square().mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for ours, stock in zip(*results, strict=True):
        assert torch.equal(ours, stock)


@on_ranks()
def test_noop_hook_leaves_local_gradients(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, local = _mlp(), _mlp()
    local.load_state_dict(model.state_dict())
    ddp = DDP(model)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    _square(ddp, rank, 0)
    _square(local, rank, 0)
    assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


def _post_local_sgd_goes_local(rank, world_size):
    torch.manual_seed(0)
    # A subgroup of one: after the switch, gradients are this rank's own.
    mine = [dist.new_group([r]) for r in range(world_size)][rank]
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=mine, start_localSGD_iter=2)
    model = _mlp()
    ddp = DDP(model)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    alike = []
    for i in range(5):
        ddp.zero_grad()
        ddp(batch(rank, i).float()).square().mean().backward()
        gathered = [torch.empty(2) for _ in range(world_size)]
        dist.all_gather(gathered, model[4].bias.grad.clone())
        alike.append(torch.equal(*gathered))
    return alike


def test_post_local_sgd_switches_to_the_subgroup(ranks):
    for alike in ranks(_post_local_sgd_goes_local):
        assert alike[0]
        assert not alike[-1]


@on_ranks()
def test_register_fused_optim(rank, world_size):
    """The optimizer runs in the hook; weights equal a plain step after backward."""
    results = []
    for overlapped in (False, True):
        torch.manual_seed(0)
        model = _mlp()
        ddp = DDP(model)
        if overlapped:
            # What `_as_overlapped_optim` makes, through the public entry.
            ddp._register_fused_optim(torch.optim.SGD, 0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            ddp(batch(rank, i).float()).square().mean().backward()
            if not overlapped:
                optimizer.step()
                optimizer.zero_grad()
            else:
                ddp.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    for plain_step, in_hook in zip(*results, strict=True):
        torch.testing.assert_close(in_hook, plain_step)


@on_ranks()
def test_register_fused_optim_for_some_parameters(rank, world_size):
    torch.manual_seed(0)
    model = _mlp()
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


def _hook_then_optimizer(rank, world_size, make):
    from torch.distributed.optim import _apply_optimizer_in_backward

    results = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = make()
        if in_backward:
            _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1})
        ddp = DDP(model, bucket_cap_mb=1e-4)
        optimizer = None if in_backward else torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            ddp(batch(rank, i).float()).square().mean().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        assert_in_sync(model, grads=False)
    for plain_step, in_hook in zip(*results, strict=True):
        torch.testing.assert_close(in_hook, plain_step)


@ours_only
def test_optimizers_applied_in_backward(ranks):
    ranks(_hook_then_optimizer, _mlp)
    ranks(_hook_then_optimizer, _Backwards)


def _step_on_mean(reference, optimizer, i, world_size):
    """Step ``i`` of ``reference``, on the mean of all ranks' gradients."""
    expected = mean_over_ranks(reference, lambda m, r: m(batch(r, i).float()).square().mean().backward(), world_size)
    for name, p in reference.named_parameters():
        p.grad = expected[name]
    optimizer.step()


@on_ranks()
def test_hook_then_optimizer(rank, world_size):
    """``_hook_then_optimizer`` of torch around its own all-reduce hook."""
    from torch.distributed.optim.utils import functional_optim_map

    torch.manual_seed(0)
    model, reference = _mlp(), _mlp()
    reference.load_state_dict(model.state_dict())
    ddp = DDP(model)
    functional = functional_optim_map[torch.optim.SGD](list(model.parameters()), 0.1, _allow_empty_param_list=True)
    state = optimizer_overlap_hooks._OptimizerHookState(functional, list(model.parameters()))
    ddp.register_comm_hook(None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for i in range(3):
        _step_on_mean(reference, optimizer, i, world_size)
        ddp(batch(rank, i).float()).square().mean().backward()
        ddp.zero_grad()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("hook_maker", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
@on_ranks(backend="cpu:gloo")
def test_zero_step_in_the_hook(rank, world_size, hook_maker):
    """ZeRO's step inside the hook: weights equal to plain SGD, state sharded."""
    torch.manual_seed(0)
    model, reference = _mlp(), _mlp()
    reference.load_state_dict(model.state_dict())
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
        _step_on_mean(reference, optimizer, i, world_size)
        ddp(batch(rank, i).float()).square().mean().backward()
        zero.step()
        ddp.zero_grad()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert_in_sync(model, grads=False)


def _registered_by_enum(rank, world_size, name):
    def wrap(model):
        ddp = DDP(model)
        register_ddp_comm_hook(DDPCommHookType[name], ddp, None)
        return ddp

    compare_with_reference(rank, world_size, _mlp, _square, wrap=wrap)


def test_registered_through_the_enum(ranks):
    ranks(_registered_by_enum, "ALLREDUCE")


@pytest.mark.parametrize(("name", "rtol"), [("ALLREDUCE", 1e-6), ("FP16_COMPRESS", 2e-3)])
@on_ranks()
def test_builtin_hook(rank, world_size, name, rtol):
    kind = getattr(dist.BuiltinCommHookType, name)
    _closely(rank, world_size, lambda ddp: ddp._register_builtin_comm_hook(kind), rtol)


# -- state that can be saved ---------------------------------------------------------------------------------


def ddp_state(ddp):
    """Where torch's class keeps what was registered."""
    return ddp._comm_hooks[0][1]


@on_ranks(allow_warnings=(("NOTE: Process group", UserWarning), ("PowerSGD", UserWarning)))
def test_hook_state_can_be_saved(rank, world_size):
    """PowerSGD's state goes through torch.save whole, and training goes on from it."""

    def train(ddp, optimizer, first, last):
        for i in range(first, last):
            optimizer.zero_grad()
            ddp(batch(rank, i).float()).square().mean().backward()
            optimizer.step()

    def fresh(state, weights=None):
        torch.manual_seed(0)
        model = _mlp()
        if weights is not None:
            model.load_state_dict(weights)
        ddp = DDP(model)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model, ddp, torch.optim.SGD(model.parameters(), lr=0.05)

    def new_state():
        return powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5)

    model, ddp, optimizer = fresh(new_state())
    train(ddp, optimizer, 0, 4)
    state = ddp_state(ddp)
    file = io.BytesIO()
    torch.save({"hook": state, "weights": model.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert saved["hook"].iter == state.iter == 4
    assert state.error_dict
    for index, error in state.error_dict.items():
        assert torch.equal(saved["hook"].error_dict[index], error)
    # Not bit-equal to a run that never stopped: a new wrapper starts with buckets in registration order.
    model, ddp, optimizer = fresh(saved["hook"], saved["weights"])
    train(ddp, optimizer, 4, 8)
    assert saved["hook"].iter == 8
    assert_in_sync(model)


CREATE_GRAPH_WARNING = (("Using backward.. with create_graph=True", UserWarning),)


@ours_only
@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks(allow_warnings=CREATE_GRAPH_WARNING)
def test_a_comm_hook_cannot_be_differentiated(rank, world_size, steps_before):
    ddp = DDP(line())
    ddp.register_comm_hook(None, plain)
    for _ in range(steps_before):
        step(ddp, rank)
        ddp.zero_grad()
    for _ in range(2):
        with pytest.raises(StateError, match="comm hook"):
            ddp(inputs_of(rank)).sum().backward(create_graph=True)
        ddp.zero_grad()
        step(ddp, rank)
        assert_grad(ddp.module, 1.5)
        ddp.zero_grad()
    with ddp.no_sync():
        ddp(inputs_of(rank)).sum().backward(create_graph=True)
    assert_grad(ddp.module, rank + 1.0)
    ddp.module.weight.grad = None
    ddp.remove_comm_hook()
    ddp(inputs_of(rank)).sum().backward(create_graph=True)
    assert_grad(ddp.module, 1.5)
    ddp.module.weight.grad = None


_futures = []


def _noted_future(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer().clone())
    _futures.append(weakref.ref(future))
    return future


@ours_only
@on_ranks()
def test_no_result_of_a_hook_is_kept_at_rest(rank, world_size):
    _futures.clear()
    ddp = DDP(line())
    ddp.register_comm_hook(None, _noted_future)
    for _ in range(3):
        step(ddp, rank)
        assert _futures
        assert all(future() is None for future in _futures)
