"""Our comm hooks, on buckets made by hand."""

from __future__ import annotations

import copy
import functools
import importlib
import io
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
from paceline.errors import BadArgumentError, BadTypeError, StateError
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
from tests.on_ranks import on_ranks

SHAPES = ((24, 16), (7,), (8, 4, 3, 3), (2, 2), ())


class HandMadeBucket:
    def __init__(self, parameters: list[Tensor], buffer: Tensor, *, index: int = 0, of: int = 1) -> None:
        self._parameters, self._buffer, self._index, self._of = parameters, buffer, index, of

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        return self._index == self._of - 1


def _parameters(dtype: torch.dtype = torch.float32, shapes: tuple[Any, ...] = SHAPES) -> list[Tensor]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def _buckets(parameters: list[list[Tensor]], *, scale: float = 1.0) -> list[HandMadeBucket]:
    """One bucket for each list of parameters, with random gradients."""
    buffers = [torch.randn(sum(p.numel() for p in ps), dtype=ps[0].dtype) * scale for ps in parameters]
    return [HandMadeBucket(ps, buffers[i], index=i, of=len(buffers)) for i, ps in enumerate(parameters)]


def _mean(tensor: Tensor) -> Tensor:
    """The exact average over the ranks."""
    total = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _seed(rank: int) -> None:
    torch.manual_seed(1000 + rank)


def _run(hook: Any, state: Any, buckets: list[HandMadeBucket]) -> list[Tensor]:
    """All buckets under way at once, as in a backward."""
    futures = [hook(state, bucket) for bucket in buckets]
    return [future.wait() for future in futures]


def _averages(rank: int, world_size: int, name: str, dtype: torch.dtype, tol: float, scale: float = 1.0) -> None:
    _seed(rank)
    hook = getattr(paceline.hooks, name)
    if name in ("fp16", "bf16"):
        hook = hook(paceline.hooks.allreduce)
    for state in (None, dist.group.WORLD):
        buckets = _buckets([_parameters(dtype) for _ in range(5)], scale=scale)
        buffers = [bucket.buffer() for bucket in buckets]
        exact = [_mean(buffer) for buffer in buffers]
        results = _run(hook, state, buckets)
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

    bucket = _buckets([_parameters()])[0]
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
    # A closure: what is inside is not known.
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
        # None is theirs to understand.
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
        # None is all ranks to it, which are not to talk over another group than the wrapper.
        seen.append(ddp._reducer.exchange._state)
    assert seen == [None, None, None, another]


def test_wrong_states_are_refused(ranks):
    bucket = _buckets([_parameters()])[0]
    with pytest.raises(StateError, match="there is no process group"):
        paceline.hooks.allreduce(None, bucket)
    with pytest.raises(BadTypeError, match="process group or None, got dict"):
        paceline.hooks.bf16_compress({}, bucket)
    with pytest.raises(BadTypeError, match="PowerSGDState, got NoneType"):
        powersgd(None, bucket)


# PowerSGD


@pytest.mark.parametrize("wrapper", [None, "fp16", "bf16"])
@on_ranks()
def test_powersgd_loses_nothing(rank: int, world_size: int, wrapper: str | None) -> None:
    """What a step does not deliver is in the errors: nothing is lost, on average over the ranks."""
    _seed(rank)
    hook = getattr(paceline.hooks, wrapper)(powersgd) if wrapper else powersgd
    tol = {"fp16": 5e-3, "bf16": 5e-2, None: 1e-5}[wrapper]
    parameters = [_parameters(), _parameters()]
    state = PowerSGDState(rank=2, start_iter=0)
    errors = {p: torch.zeros(p.shape) for ps in parameters for p in ps}
    for _ in range(4):
        buckets = _buckets(parameters)
        wanted = {p: _mean(g + errors[p]) for b in buckets for p, g in zip(b.parameters(), b.gradients(), strict=True)}
        results = _run(hook, state, buckets)
        for bucket, result in zip(buckets, results, strict=True):
            everyone = [torch.empty_like(result) for _ in range(world_size)]
            dist.all_gather(everyone, result)
            assert all(torch.equal(result, other) for other in everyone), "ranks got different gradients"
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
                error = state.memory(p).error
                compressed = p.shape in ((24, 16), (8, 4, 3, 3))
                assert (error is not None) == compressed
                errors[p] = torch.zeros(p.shape) if error is None else error.view(p.shape)
                torch.testing.assert_close(g.double() + _mean(errors[p]), wanted[p], rtol=tol, atol=tol)
                if compressed:
                    assert errors[p].norm() > 0.1
                if compressed and wrapper is None:
                    assert torch.linalg.matrix_rank(g.reshape(g.size(0), -1), rtol=1e-4) == 2


@on_ranks()
def test_powersgd_is_exact_for_gradients_of_its_rank(rank: int, world_size: int) -> None:
    left = torch.randn(24, 2, dtype=torch.float64)  # the same on every rank
    _seed(rank)
    parameter, state = nn.Parameter(torch.zeros(24, 16)), PowerSGDState(rank=2, start_iter=0)
    for _ in range(3):
        bucket = HandMadeBucket([parameter], (left @ torch.randn(2, 16).double()).flatten())
        exact = _mean(bucket.buffer())
        assert (powersgd(state, bucket).wait() - exact).norm() / exact.norm() < 1e-10


@pytest.mark.parametrize("warm_start", [True, False])
@on_ranks()
def test_warm_start_converges_to_the_best_approximation(rank: int, world_size: int, warm_start: bool) -> None:
    """The gradient stays the same, and 1 is the distance of its best approximation of rank 1."""
    gradient = torch.randn(24, 16)
    u, s, v = torch.linalg.svd(gradient)
    best = (gradient - s[0] * u[:, :1] @ v[:1]).norm()
    state = PowerSGDState(start_iter=0, warm_start=warm_start, error_feedback=False)
    parameter = nn.Parameter(torch.zeros(24, 16))
    for _ in range(40):
        result = powersgd(state, HandMadeBucket([parameter], gradient.flatten().clone())).wait()
    distance = (gradient - result.view(24, 16)).norm() / best
    assert (distance < 1.001) if warm_start else (distance > 1.01)


@on_ranks()
def test_start_iter_averages_plainly_first(rank: int, world_size: int) -> None:
    _seed(rank)
    parameters = [_parameters(), _parameters()]
    state = PowerSGDState(rank=1, start_iter=2)
    for step in range(4):
        buckets = _buckets(parameters)
        exact = [_mean(bucket.buffer()) for bucket in buckets]
        results = _run(powersgd, state, buckets)
        plain = all(torch.allclose(r.double(), e, atol=1e-6) for r, e in zip(results, exact, strict=True))
        assert plain == (step < 2)
        # (24, 16) -> 40, (8, 36) -> 44, and 7 + 4 + 1 as they are.
        rate = 1 if plain else (384 + 7 + 288 + 4 + 1) / (40 + 44 + 12)
        assert state.compression_rate == pytest.approx(rate)
    assert state.iter == 4


# At 9, only (24, 16), which shrinks by 9.6, is compressed, and not (8, 36), which shrinks by 6.5.
@pytest.mark.parametrize(("rate", "reached"), [(100.0, 1.0), (9.0, 684 / (40 + 300))])
@on_ranks()
def test_min_compression_rate(rank: int, world_size: int, rate: float, reached: float) -> None:
    state = PowerSGDState(start_iter=0, min_compression_rate=rate)
    _run(powersgd, state, _buckets([_parameters()]))
    assert state.compression_rate == pytest.approx(reached)


@on_ranks()
def test_memory_follows_parameters_when_buckets_are_rebuilt(rank: int, world_size: int) -> None:
    """The same gradients, in buckets that change between steps, give the same results."""
    outcomes = []
    for rebuilt in ([[0, 1, 2]], [[2], [0, 1]]):
        _seed(rank)
        parameters, state = _parameters(shapes=((24, 16), (16, 24), (24, 16))), PowerSGDState(start_iter=0)
        for split in ([[0, 1, 2]], rebuilt, rebuilt):
            gradients = [torch.randn(p.shape) for p in parameters]
            buffers = [torch.cat([gradients[k].flatten() for k in ks]) for ks in split]
            buckets = [
                HandMadeBucket([parameters[k] for k in ks], buffers[i], index=i, of=len(split))
                for i, ks in enumerate(split)
            ]
            _run(powersgd, state, buckets)
        results = [gradient for bucket in buckets for gradient in bucket.gradients()]
        outcomes.append(dict(zip([k for ks in rebuilt for k in ks], results, strict=True)))
    assert all(torch.allclose(outcomes[0][k], outcomes[1][k], atol=1e-5) for k in range(3))


@on_ranks()
def test_powersgd_on_channels_last(rank: int, world_size: int) -> None:
    """Gradients of channels_last parameters are views with strides of their own."""
    _seed(rank)

    class Strided(HandMadeBucket):
        def gradients(self) -> list[Tensor]:
            return [self._buffer.view(8, 3, 3, 4).permute(0, 3, 1, 2)]

    parameter = nn.Parameter(torch.zeros(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    state = PowerSGDState(start_iter=0)
    bucket = Strided([parameter], torch.randn(288))
    exact = _mean(bucket.gradients()[0])
    powersgd(state, bucket).wait()
    got = bucket.gradients()[0] + _mean(state.memory(parameter).error.view(8, 4, 3, 3))
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


@on_ranks()
def test_powersgd_recovers_from_an_overflow_and_from_zeros(rank: int, world_size: int) -> None:
    _seed(rank)
    parameters = [_parameters()]
    state = PowerSGDState(start_iter=0)
    for step in range(5):
        buckets = _buckets(parameters)
        if step == 1 and rank == 0:
            buckets[0].buffer()[3] = float("inf")
        if step == 2:
            buckets[0].buffer().zero_()
        result = _run(powersgd, state, buckets)[0]
        assert result.isfinite().all() == (step != 1), f"step {step}"
    exact = _mean(buckets[0].gradients()[0])
    assert exact.norm() > 0.1


def _train(state: PowerSGDState, parameters: list[list[Tensor]], steps: range, rank: int) -> list[Tensor]:
    results = []
    for step in steps:
        torch.manual_seed(10 * step + rank)
        results += [r.clone() for r in _run(powersgd, state, _buckets(parameters))]
    return results


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
@on_ranks()
def test_powersgd_state_can_be_saved(rank: int, world_size: int, how: str) -> None:
    parameters = [_parameters(), _parameters()]
    state = PowerSGDState(rank=2, start_iter=1, seed=5)
    _train(state, parameters, range(3), rank)
    if how == "pickle":
        resumed = pickle.loads(pickle.dumps(state))
    elif how == "deepcopy":
        resumed = copy.deepcopy(state)
    else:
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        resumed = PowerSGDState()
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.state_dict().keys() == state.state_dict().keys()
    want = _train(state, parameters, range(3, 6), rank)
    got = _train(resumed, [_parameters(), _parameters()], range(3, 6), rank)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert resumed.compression_rate == state.compression_rate
    assert resumed.iter == 6
    with pytest.raises(StateError, match="has seen gradients"):
        resumed.load_state_dict(state.state_dict())


@on_ranks()
def test_a_pickled_state_asks_for_its_group(rank: int, world_size: int) -> None:
    group = dist.new_group(list(range(world_size)))
    state = pickle.loads(pickle.dumps(PowerSGDState(group, start_iter=0)))
    bucket = _buckets([_parameters()])[0]
    with pytest.raises(StateError, match="set its process_group"):
        powersgd(state, bucket)
    state.process_group = group
    powersgd(state, bucket).wait()


@on_ranks()
def test_a_state_of_another_module_is_refused(rank: int, world_size: int) -> None:
    state, other = PowerSGDState(start_iter=0), PowerSGDState()
    parameters = _parameters(shapes=((4, 4), (3,)))
    _run(powersgd, state, _buckets([parameters]))
    other.load_state_dict(state.state_dict())
    with pytest.raises(BadArgumentError, match=r"parameter 1 .* has shape \(5,\).*\(4, 4\), \(3,\)"):
        _run(powersgd, other, _buckets([_parameters(shapes=((4, 4), (5,)))]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"start_iter": -1}, "start_iter must not be negative"),
        ({"min_compression_rate": 0}, "min_compression_rate must be positive"),
        ({"epsilon": -1e-8}, "epsilon must not be negative"),
    ],
)
def test_wrong_settings_are_refused(arguments, message):
    with pytest.raises(BadArgumentError, match=message):
        PowerSGDState(**arguments)
    with pytest.raises(BadArgumentError, match="'memories'"):
        PowerSGDState().load_state_dict({})


@on_ranks()
def test_powersgd_leaves_the_random_generator_alone(rank: int, world_size: int) -> None:
    buckets = _buckets([_parameters()])
    before = torch.get_rng_state()
    _run(powersgd, PowerSGDState(start_iter=0), buckets)
    assert torch.equal(torch.get_rng_state(), before)


# In the place of torch's hooks


@pytest.mark.parametrize("block", [None, 64])
@on_ranks()
def test_torchs_quantization_hooks(rank: int, world_size: int, block: int | None) -> None:
    _seed(rank)
    if block is None:
        hook = resolve(quantization_hooks.quantization_pertensor_hook)
    else:
        hook = resolve(functools.partial(quantization_hooks.quantization_perchannel_hook, bucket_size=block))
    assert overlaps(hook)
    buckets = _buckets([_parameters() for _ in range(5)])
    # A number that is far larger than the rest costs the others of its block their digits.
    buckets[0].buffer()[0] = 100.0
    # What is zero on every rank stays so, whatever is around it.
    buckets[1].buffer()[5:300] = 0
    exact = [_mean(bucket.buffer()) for bucket in buckets]
    results = _run(hook, None, buckets)
    for result, want in zip(results[1:], exact[1:], strict=True):
        torch.testing.assert_close(result.double(), want, rtol=0, atol=8 / 255)
    assert results[1][5:300].eq(0).all()
    assert results[0][0].item() == pytest.approx(100, rel=1e-2)
    coarse = (results[0] - exact[0])[block or 0 :].abs().max()
    assert (coarse > 0.1) if block is None else (coarse < 0.03)

    if rank == 1:
        buckets[2].buffer()[7] = float("inf")
    assert not _run(hook, None, buckets)[2].isfinite().all()


@pytest.mark.parametrize("warm_start", [True, False])
@on_ranks()
def test_torchs_batched_powersgd(rank: int, world_size: int, warm_start: bool) -> None:
    _seed(rank)
    hook = resolve(powerSGD_hook.batched_powerSGD_hook)
    assert overlaps(hook)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, warm_start=warm_start)
    parameters = [_parameters() for _ in range(3)]
    for step in range(5):
        buckets = _buckets(parameters)
        numel = buckets[0].buffer().numel()
        before = [state.error_dict.get(i, torch.zeros(729))[:numel] for i in range(3)]
        exact = [_mean(b.buffer() + e) for b, e in zip(buckets, before, strict=True)]
        results = _run(hook, state, buckets)
        for i, (result, want) in enumerate(zip(results, exact, strict=True)):
            error = state.error_dict.get(i, torch.zeros(729))[:numel]
            assert (error.norm() > 0) == (step >= 2)
            torch.testing.assert_close(result + _mean(error), want, rtol=1e-5, atol=1e-5)
    assert state.iter == 5
    assert (len(state.q_memory_dict) > 0) == warm_start


def test_other_hooks_stand_for_themselves():
    for hook in (default_hooks.allreduce_hook, powerSGD_hook.powerSGD_hook, powersgd, _run):
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
