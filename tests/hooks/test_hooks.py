"""Our comm hooks, on buckets made by hand."""

from __future__ import annotations

import functools
import importlib
import pickle
import pkgutil
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.futures import Future

import paceline
import paceline.hooks
from paceline.errors import BadTypeError, StateError
from paceline.hooks import (
    PowerSGDState,
    check_hook,
    overlapping,
    overlaps,
    powersgd,
    replacements,
    resolve,
    takes_group,
    torch_hooks,
)
from tests.hooks.buckets import SHAPES, HandMadeBucket, exact_mean, make_buckets, make_parameters, run_all, seed_rank
from tests.on_ranks import on_ranks


def _averages(rank: int, world_size: int, name: str, dtype: torch.dtype, tol: float, scale: float = 1.0) -> None:
    seed_rank(rank)
    hook = getattr(paceline.hooks, name)
    if name in ("fp16", "bf16"):
        hook = hook(paceline.hooks.allreduce)
    for state in (None, dist.group.WORLD):
        buckets = make_buckets([make_parameters(dtype) for _ in range(5)], scale=scale)
        buffers = [bucket.buffer() for bucket in buckets]
        exact = [exact_mean(buffer) for buffer in buffers]
        results = run_all(hook, state, buckets)
        for bucket, buffer, result, want in zip(buckets, buffers, results, exact, strict=True):
            assert bucket.buffer() is buffer
            assert result.dtype == dtype
            assert result.data_ptr() == buffer.data_ptr()
            torch.testing.assert_close(result.to(want.dtype), want, rtol=tol, atol=tol * scale)


EXACT, FP16, BF16 = 1e-6, 2e-3, 2e-2


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "dtype", "tol"),
    [
        ("allreduce", torch.float32, EXACT),
        ("allreduce", torch.bfloat16, BF16),
        ("allreduce", torch.complex64, EXACT),
        ("fp16_compress", torch.float32, FP16),
        ("fp16_compress", torch.float64, FP16),
        ("fp16_compress", torch.complex64, FP16),
        ("fp16_compress", torch.bfloat16, BF16),
        ("bf16_compress", torch.float32, BF16),
        ("bf16_compress", torch.float16, FP16),
        ("fp16", torch.float32, FP16),
        ("bf16", torch.float32, BF16),
        ("bf16", torch.complex64, EXACT),
    ],
)
def test_hooks_average(ranks, name, dtype, tol, world_size):
    ranks(_averages, name, dtype, tol, world_size=world_size)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_bf16_keeps_the_range_of_float32(ranks, scale):
    ranks(_averages, "bf16_compress", torch.float32, BF16, scale)


@on_ranks()
def test_fp16_divides_before_it_casts(rank, world_size):
    gradients = torch.tensor([60000.0, 90000.0, 100352.0 if rank == 0 else 0.0])
    bucket = HandMadeBucket([nn.Parameter(torch.zeros(3))], gradients)
    large, too_large, uneven = paceline.hooks.fp16_compress(None, bucket).wait().tolist()
    assert large == 60000  # the sum alone would not fit
    assert uneven == 50176  # nor would what one rank holds
    assert too_large == float("inf")  # the average does not: never a wrong finite number


def test_wrapper_halves_what_the_hook_sees_and_restores_the_bucket():
    seen = []

    def hook(state: Any, bucket: Any) -> Future[Tensor]:
        seen.append((state, bucket.buffer().dtype, [g.dtype for g in bucket.gradients()]))
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer() * 2)
        return future

    bucket = make_buckets([make_parameters()])[0]
    buffer, before = bucket.buffer(), bucket.buffer().clone()
    result = paceline.hooks.bf16(hook)("state", bucket).wait()
    assert seen == [("state", torch.bfloat16, [torch.bfloat16] * len(SHAPES))]
    assert result is buffer
    assert bucket.buffer() is buffer
    assert torch.equal(result, (before.bfloat16() * 2).float())

    def broken(state: Any, bucket: Any) -> Future[Tensor]:
        raise ValueError("broken hook")

    with pytest.raises(ValueError, match="broken hook"):
        paceline.hooks.fp16(broken)(None, bucket)
    assert bucket.buffer() is buffer


def test_wrappers_have_names_and_can_be_pickled():
    hook = paceline.hooks.fp16(powersgd)
    assert hook.__name__ == hook.__qualname__ == "fp16(powersgd)"
    again = pickle.loads(pickle.dumps(hook))
    assert again == hook
    assert again.__qualname__ == "fp16(powersgd)"


def test_which_hooks_overlap():
    ours = [paceline.hooks.allreduce, paceline.hooks.fp16_compress, paceline.hooks.bf16_compress, powersgd]
    assert all(overlaps(hook) for hook in ours)
    assert all(overlaps(paceline.hooks.fp16(hook)) for hook in ours)
    assert overlaps(functools.partial(functools.partial(powersgd)))
    assert overlaps(default_hooks.allreduce_hook)
    for chained in (powerSGD_hook.powerSGD_hook, quantization_hooks.quantization_pertensor_hook):
        assert not overlaps(chained)
        assert not overlaps(paceline.hooks.bf16(chained))
        assert not overlaps(functools.partial(chained))
    # This is a closure, and what is inside is not known.
    assert not overlaps(default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))

    def mine(state: Any, bucket: Any) -> None: ...

    assert not overlaps(mine)
    assert overlaps(overlapping(mine))


@pytest.mark.parametrize(("module", "name"), [*torch_hooks.OVERLAPPING, *replacements._REPLACEMENTS])
def test_torch_has_the_hooks_that_are_known_here(module, name):
    found = getattr(importlib.import_module(f"{torch_hooks.PACKAGE}.{module}"), name)
    assert torch_hooks.is_torch_hook(found, module, name)
    assert torch_hooks.comes_from(found, torch_hooks.MODULES)


def test_torch_has_no_other_modules_of_hooks():
    """A new one is to be looked at. One is left out, whose hook only torch's own reducer can run."""
    package = importlib.import_module(torch_hooks.PACKAGE)
    found = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert found - {"mixed_precision_hooks"} == set(torch_hooks.MODULES)


def test_what_hooks_take_is_seen_through_what_is_around_them():
    def mine(state: Any, bucket: Any) -> None: ...

    @functools.wraps(lambda bucket: None)
    def adapted(state: Any, bucket: Any) -> None: ...

    counting = Mock(wraps=mine)
    for hook in (mine, adapted, counting, default_hooks.fp16_compress_wrapper(mine), functools.partial(mine)):
        check_hook(hook)
        # What None means is up to them.
        assert not takes_group(hook)
        assert not overlaps(hook)
    with pytest.raises(TypeError, match="cannot be"):
        check_hook(lambda bucket: None)
    for hook in (default_hooks.allreduce_hook, paceline.hooks.fp16(paceline.hooks.allreduce)):
        assert takes_group(hook)
        assert takes_group(functools.partial(hook))
    assert takes_group(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


@on_ranks()
def test_hooks_that_take_a_group_get_the_wrapper_s(rank, world_size):
    """What hooks get for None: those that take a group the wrapper's, a hook of the user's None, whatever is around."""
    seen = []

    def mine(state: Any, bucket: Any) -> Any:
        seen.append(state)
        return default_hooks.allreduce_hook(state, bucket)

    another = dist.new_group(range(world_size))
    for group in (dist.group.WORLD, another):
        ddp = paceline.DDP(nn.Linear(2, 2), process_group=group)
        ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(mine))
        ddp(torch.ones(1, 2)).sum().backward()
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        # To torch's hook None means all ranks. But it is not to use another group than the wrapper does.
        seen.append(ddp._reducer.exchange._state)
    assert seen == [None, None, None, another]


def test_wrong_states_are_refused(ranks):
    bucket = make_buckets([make_parameters()])[0]
    with pytest.raises(StateError, match="there is no process group"):
        paceline.hooks.allreduce(None, bucket)
    with pytest.raises(BadTypeError, match="process group or None, got dict"):
        paceline.hooks.bf16_compress({}, bucket)
    with pytest.raises(BadTypeError, match="PowerSGDState, got NoneType"):
        powersgd(None, bucket)


# In the place of torch's hooks


@pytest.mark.parametrize("block", [None, 64])
@on_ranks()
def test_torchs_quantization_hooks(rank: int, world_size: int, block: int | None) -> None:
    seed_rank(rank)
    if block is None:
        hook = resolve(quantization_hooks.quantization_pertensor_hook)
    else:
        hook = resolve(functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=block))
    assert overlaps(hook)
    buckets = make_buckets([make_parameters() for _ in range(5)])
    # A number that is far larger than the rest costs the others of its block their digits.
    buckets[0].buffer()[0] = 100.0
    # What is zero on every rank stays so, whatever is around it.
    buckets[1].buffer()[5:300] = 0
    exact = [exact_mean(bucket.buffer()) for bucket in buckets]
    results = run_all(hook, None, buckets)
    for result, want in zip(results[1:], exact[1:], strict=True):
        torch.testing.assert_close(result.double(), want, rtol=0, atol=8 / 255)
    assert results[1][5:300].eq(0).all()
    assert results[0][0].item() == pytest.approx(100, rel=1e-2)
    coarse = (results[0] - exact[0])[block or 0 :].abs().max()
    assert (coarse > 0.1) if block is None else (coarse < 0.03)

    if rank == 1:
        buckets[2].buffer()[7] = float("inf")
    assert not run_all(hook, None, buckets)[2].isfinite().all()


@pytest.mark.parametrize("warm_start", [True, False])
@on_ranks()
def test_torchs_batched_powersgd(rank: int, world_size: int, warm_start: bool) -> None:
    seed_rank(rank)
    hook = resolve(powerSGD_hook.batched_powerSGD_hook)
    assert overlaps(hook)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=warm_start)
    parameters = [make_parameters() for _ in range(3)]
    for step in range(5):
        buckets = make_buckets(parameters)
        numel = buckets[0].buffer().numel()
        before = [state.error_dict.get(i, torch.zeros(729))[:numel] for i in range(3)]
        exact = [exact_mean(b.buffer() + e) for b, e in zip(buckets, before, strict=True)]
        results = run_all(hook, state, buckets)
        for i, (result, want) in enumerate(zip(results, exact, strict=True)):
            error = state.error_dict.get(i, torch.zeros(729))[:numel]
            assert (error.norm() > 0) == (step >= 2)
            torch.testing.assert_close(result + exact_mean(error), want, rtol=1e-5, atol=1e-5)
    assert state.iter == 5
    assert (len(state.q_memory_dict) > 0) == warm_start


def test_other_hooks_stand_for_themselves():
    for hook in (default_hooks.allreduce_hook, powerSGD_hook.powerSGD_hook, powersgd, run_all):
        assert resolve(hook) is hook
        partial = functools.partial(hook)
        assert resolve(partial) is partial


@on_ranks()
def test_sparse_gradients_travel_as_they_are(rank: int, world_size: int) -> None:
    gradient = torch.sparse_coo_tensor([[rank, 2]], torch.ones(2, 4), (5, 4), check_invariants=True)
    want = torch.zeros(5, 4)
    want[[0, 1]] = 0.5
    want[2] = 1.0
    states = {"powersgd": PowerSGDState(start_iter=0)}
    for name in ("allreduce", "fp16_compress", "bf16_compress", "powersgd"):
        hook = getattr(paceline.hooks, name)
        for each in (hook, paceline.hooks.bf16(hook)):
            bucket = HandMadeBucket([nn.Parameter(torch.zeros(5, 4))], gradient.clone())
            result = each(states.get(name), bucket).wait()
            assert torch.equal(result.to_dense(), want), name
