"""Comm hooks under the wrapper: any callable, replaceable, with state; our hooks, and every hook that torch ships."""

from __future__ import annotations

import copy
import functools
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from paceline import hooks
from paceline.errors import PacelineError, StateError
from tests.ddp.exact import assert_grad, inputs_of, line, step
from tests.reference import (
    DDP,
    STOCK,
    Branches,
    assert_grads,
    assert_in_sync,
    batch,
    compare_with_reference,
    grads_of,
    mean_over_ranks,
    no_sync,
    ours_only,
)

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
from tests.on_ranks import on_ranks


def _mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _square(model, rank, i):
    model(batch(rank, i)).square().mean().backward()


def _hooked(hook, state=None, **options):
    """Make a function that wraps a module and registers ``hook``."""

    def wrap(model):
        ddp = DDP(model, **options)
        ddp.register_comm_hook(state, hook)
        return ddp

    return wrap


def _weights(rank, ddp, optimizer=None, steps=4):
    """The weights after some steps. Without an ``optimizer``, the backward has to step."""
    for i in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, i).float()).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


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


def sets_buffer(state, bucket):
    bucket.set_buffer(bucket.buffer().clone())
    return _mean(bucket)


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
    "sets_buffer": sets_buffer,
}
# What torch's class accepts; it refuses annotations that are strings.
STOCK_ACCEPTS = {"plain", "extra_default", "ready_future", "sets_buffer"}


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0003}],
    ids=["plain", "view", "small"],
)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in STOCK_ACCEPTS else ours_only) for k in HOOKS])
@on_ranks()
def test_any_callable(rank, world_size, kind, options):
    compare_with_reference(rank, world_size, _mlp, _square, wrap=_hooked(HOOKS[kind], **options))


# -- what a hook sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0002}], ids=["plain", "small"])
@on_ranks()
def test_what_a_hook_sees(rank, world_size, options):
    model, record = _mlp(), []

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

    ddp = _hooked(hook, {"mine": 1}, **options)(model)
    for i in range(3):
        record.clear()
        ddp(batch(rank, i).float()).square().mean().backward()
        assert [index for index, _, _ in record] == list(range(len(record)))
        assert [last for _, last, _ in record] == [False] * (len(record) - 1) + [True]
        seen = [p for _, _, parameters in record for p in parameters]
        assert sorted(seen) == sorted(id(p) for p in model.parameters())
    assert (len(record) > 1) == bool(options)


@on_ranks()
def test_a_hook_gets_local_gradients_and_its_result_is_the_gradient(rank, world_size):
    """A hook sees this rank's gradients, not yet divided; what it returns becomes the gradient."""
    torch.set_default_dtype(torch.float64)
    model, seen = _mlp(), {}
    local = copy.deepcopy(model)

    def hook(state, bucket):
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            seen[id(p)] = g.clone()
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 42.0))
        return future

    _square(_hooked(hook)(model), rank, 0)
    _square(local, rank, 0)
    for p, q in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(seen[id(p)], q.grad)
        assert torch.equal(p.grad, torch.full_like(p, 42.0))


def _boom(future):
    raise ValueError("boom in then")


@on_ranks()
def test_an_exception_in_a_then_surfaces(rank, world_size):
    """Wrappers of hooks call ``then`` on the result of ``then``, and an exception in one of them surfaces."""
    ddp = _hooked(lambda state, bucket: _mean(bucket).then(lambda f: f.value() * 2).then(_boom))(_mlp())
    with pytest.raises(Exception, match="boom in then"):
        ddp(batch(rank).float()).sum().backward()


@on_ranks()
def test_hook_with_unused_parameters(rank, world_size):
    def step(model, r, i):
        model(batch(r, i), (r + i) % 2).square().mean().backward()

    compare_with_reference(rank, world_size, Branches, step, wrap=_hooked(plain, find_unused_parameters=True))


@on_ranks()
def test_hook_is_not_called_in_no_sync(rank, world_size):
    calls = []

    def step(model, r, i):
        with no_sync(model):
            _square(model, r, 10 + i)
        _square(model, r, i)

    wrap = _hooked(lambda state, bucket: calls.append(1) or plain(state, bucket))
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

    def step(model, r, i):
        model(torch.tensor([r, i, 5]), r == 0 or i != 1).square().mean().backward()

    compare_with_reference(rank, world_size, _AddedEmbeddings, step, wrap=_hooked(default_hooks.allreduce_hook))


# -- registering ---------------------------------------------------------------------------------------------


@ours_only
@on_ranks()
def test_hooks_can_be_replaced(rank, world_size):
    torch.set_default_dtype(torch.float64)
    ddp, calls = DDP(_mlp()), []
    for name in ("first", "second", "third"):
        ddp.register_comm_hook(name, lambda state, bucket: calls.append(state) or plain(state, bucket))
        _square(ddp, rank, 0)
        ddp.zero_grad()
    assert calls == ["first", "second", "third"]


def returns_none(state, bucket):
    return None


def wrong_length(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[:-1].clone())
    return future


@ours_only
@pytest.mark.parametrize("hook", [returns_none, wrong_length], ids=lambda hook: hook.__name__)
@on_ranks()
def test_a_hook_with_a_wrong_result_is_a_clear_error(rank, world_size, hook):
    ddp = _hooked(hook)(_mlp())
    with pytest.raises(PacelineError, match="hook"):
        ddp(batch(rank).float()).sum().backward()


# -- our hooks and torch's -----------------------------------------------------------------------------------


def _closely(rank, world_size, register, rtol):
    """Train beside the reference; gradients within ``rtol`` of the largest, and alike on all ranks.

    The buckets are several, so that their collectives overlap if the hook lets them. Hooks expect float32.
    """
    model = _mlp()
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
    # Of full rank, PowerSGD delivers everything.
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


# What starts to compress after two steps, or never.
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
    model = _mlp()
    state, hook = LOSSY_HOOKS[name]()
    ddp = _hooked(hook, state)(model)
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
    results, start = [], _mlp()
    for wrapper in (StockDDP, DDP):
        ddp = wrapper(copy.deepcopy(start))
        ddp.register_comm_hook(*TORCH_HOOKS[name][0]())
        results.append(_weights(rank, ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)))
    for ours, stock in zip(*results, strict=True):
        assert torch.equal(ours, stock)


@on_ranks()
def test_noop_hook_leaves_local_gradients(rank, world_size):
    torch.set_default_dtype(torch.float64)
    local = _mlp()
    ddp = _hooked(debugging_hooks.noop_hook)(copy.deepcopy(local))
    _square(ddp, rank, 0)
    _square(local, rank, 0)
    assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


@on_ranks()
def test_post_local_sgd_switches_to_the_subgroup(rank, world_size):
    # A subgroup of one: after the switch, gradients are this rank's own.
    mine = [dist.new_group([r]) for r in range(world_size)][rank]
    state = post_localSGD_hook.PostLocalSGDState(process_group=None, subgroup=mine, start_localSGD_iter=2)
    model = _mlp()
    ddp = _hooked(post_localSGD_hook.post_localSGD_hook, state)(model)
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
    model = _mlp()
    overlapped = DDP(copy.deepcopy(model))
    overlapped._register_fused_optim(torch.optim.SGD, 0.1)
    expected = _weights(rank, DDP(model), torch.optim.SGD(model.parameters(), lr=0.1))
    for in_hook, plain_step in zip(_weights(rank, overlapped), expected, strict=True):
        torch.testing.assert_close(in_hook, plain_step)


@on_ranks()
def test_register_fused_optim_for_some_parameters(rank, world_size):
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


@ours_only
@pytest.mark.parametrize("make", [_mlp, _Backwards])
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
    model, reference = _mlp(), _mlp()
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


# -- state that can be saved ---------------------------------------------------------------------------------


@on_ranks(allow_warnings=(("NOTE: Process group", UserWarning), ("PowerSGD", UserWarning)))
def test_hook_state_can_be_saved(rank, world_size):
    """PowerSGD's state goes through torch.save whole, and training goes on from it."""

    def train(model, state):
        ddp = _hooked(powerSGD_hook.powerSGD_hook, state)(model)
        _weights(rank, ddp, torch.optim.SGD(model.parameters(), lr=0.05))
        # Where torch's class keeps what was registered.
        return ddp._comm_hooks[0][1]

    model = _mlp()
    state = train(model, powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=0.5))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert saved.iter == state.iter == 4
    assert state.error_dict
    for index, error in state.error_dict.items():
        assert torch.equal(saved.error_dict[index], error)
    # Not bit-equal to a run that never stopped: a new wrapper starts with buckets in registration order.
    assert train(model, saved).iter == 8
    assert_in_sync(model)


CREATE_GRAPH_WARNING = (("Using backward.. with create_graph=True", UserWarning),)


@ours_only
@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks(allow_warnings=CREATE_GRAPH_WARNING)
def test_a_comm_hook_cannot_be_differentiated(rank, world_size, steps_before):
    ddp = _hooked(plain)(line())
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


@ours_only
@on_ranks()
def test_no_result_of_a_hook_is_kept_at_rest(rank, world_size):
    futures = []

    def noting(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer().clone())
        futures.append(weakref.ref(future))
        return future

    ddp = _hooked(noting)(line())
    for _ in range(3):
        step(ddp, rank)
        assert futures
        assert all(future() is None for future in futures)
