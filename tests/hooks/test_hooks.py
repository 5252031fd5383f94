"""Our comm hooks, on buckets made by hand and under DistributedDataParallel."""

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
    def __init__(self, index: int, parameters: list[Tensor], buffer: Tensor, *, last: bool) -> None:
        self._index, self._parameters, self._buffer, self._last = index, parameters, buffer, last

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
        return self._last


def _parameters(dtype: torch.dtype = torch.float32, shapes: tuple[Any, ...] = SHAPES) -> list[Tensor]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def _buckets(parameters: list[list[Tensor]], *, scale: float = 1.0) -> list[HandMadeBucket]:
    """One bucket a list of parameters, with random gradients."""
    return [
        HandMadeBucket(
            i,
            ps,
            torch.randn(sum(p.numel() for p in ps), dtype=ps[0].dtype) * scale,
            last=i == len(parameters) - 1,
        )
        for i, ps in enumerate(parameters)
    ]


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


def _averages(
    rank: int, world_size: int, name: str, dtype: torch.dtype, tol: float, scale: float, wrapped: bool
) -> None:
    _seed(rank)
    hook = getattr(paceline.hooks, name)
    if wrapped:
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


@pytest.mark.parametrize(
    ("name", "dtype", "tol", "wrapped"),
    [
        ("allreduce", torch.float32, EXACT, False),
        ("allreduce", torch.bfloat16, BF16, False),
        ("allreduce", torch.complex64, EXACT, False),
        ("fp16_compress", torch.float32, FP16, False),
        ("fp16_compress", torch.float64, FP16, False),
        ("fp16_compress", torch.complex64, FP16, False),
        ("fp16_compress", torch.bfloat16, BF16, False),
        ("bf16_compress", torch.float32, BF16, False),
        ("bf16_compress", torch.float16, FP16, False),
        ("fp16", torch.float32, FP16, True),
        ("bf16", torch.float32, BF16, True),
        ("bf16", torch.complex64, EXACT, True),
    ],
)
def test_hooks_average(ranks, name, dtype, tol, wrapped):
    ranks(_averages, name, dtype, tol, 1.0, wrapped)


def test_three_ranks(ranks):
    for name, tol in (("allreduce", EXACT), ("fp16_compress", FP16), ("bf16_compress", BF16)):
        ranks(_averages, name, torch.float32, tol, 1.0, False, world_size=3)


def test_bf16_keeps_the_range_of_float32(ranks):
    ranks(_averages, "bf16_compress", torch.float32, BF16, 1e30, False)
    ranks(_averages, "bf16_compress", torch.float32, BF16, 1e-30, False)


def _near_the_end_of_fp16(rank: int, world_size: int) -> list[float]:
    gradients = torch.tensor([60000.0, 90000.0, 100352.0 if rank == 0 else 0.0])
    bucket = HandMadeBucket(0, [nn.Parameter(torch.zeros(3))], gradients, last=True)
    return paceline.hooks.fp16_compress(None, bucket).wait().tolist()


def test_fp16_divides_before_it_casts(ranks):
    large, too_large, uneven = ranks(_near_the_end_of_fp16)[0]
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
    dist.destroy_process_group(another)


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


def _low_rank_gradients(rank: int, world_size: int) -> list[float]:
    """Relative distance from the average of gradients that all have one column space of rank 2."""
    left = torch.randn(24, 2, dtype=torch.float64)  # the same on every rank
    _seed(rank)
    parameter, state, distances = nn.Parameter(torch.zeros(24, 16)), PowerSGDState(rank=2, start_iter=0), []
    for _ in range(3):
        bucket = HandMadeBucket(0, [parameter], (left @ torch.randn(2, 16).double()).flatten(), last=True)
        exact = _mean(bucket.buffer())
        distances.append(((powersgd(state, bucket).wait() - exact).norm() / exact.norm()).item())
    return distances


def test_powersgd_is_exact_for_gradients_of_its_rank(ranks):
    assert max(max(distances) for distances in ranks(_low_rank_gradients)) < 1e-10


def _warm_start(rank: int, world_size: int, warm_start: bool) -> float:
    """Distance from the best rank-1 approximation of a gradient that stays the same, after a few steps."""
    gradient = torch.randn(24, 16)
    u, s, v = torch.linalg.svd(gradient)
    best = (gradient - s[0] * u[:, :1] @ v[:1]).norm()
    state = PowerSGDState(start_iter=0, warm_start=warm_start, error_feedback=False)
    parameter = nn.Parameter(torch.zeros(24, 16))
    for _ in range(40):
        bucket = HandMadeBucket(0, [parameter], gradient.flatten().clone(), last=True)
        result = powersgd(state, bucket).wait()
    return ((gradient - result.view(24, 16)).norm() / best).item()


def test_warm_start_converges_to_the_best_approximation(ranks):
    assert max(ranks(_warm_start, True)) < 1.001
    assert min(ranks(_warm_start, False)) > 1.01


def _start_iter(rank: int, world_size: int) -> list[tuple[bool, float]]:
    _seed(rank)
    parameters = [_parameters(), _parameters()]
    state, seen = PowerSGDState(rank=1, start_iter=2), []
    for _ in range(4):
        buckets = _buckets(parameters)
        exact = [_mean(bucket.buffer()) for bucket in buckets]
        results = _run(powersgd, state, buckets)
        plain = all(torch.allclose(r.double(), e, atol=1e-6) for r, e in zip(results, exact, strict=True))
        seen.append((plain, state.compression_rate))
    assert state.iter == 4
    return seen


def test_start_iter_averages_plainly_first(ranks):
    steps = ranks(_start_iter)[0]
    assert [plain for plain, _ in steps] == [True, True, False, False]
    assert [rate for _, rate in steps[:2]] == [1, 1]
    # (24, 16) -> 40, (8, 36) -> 44, and 7 + 4 + 1 as they are.
    assert steps[2][1] == pytest.approx((384 + 7 + 288 + 4 + 1) / (40 + 44 + 12))


def _min_rate(rank: int, world_size: int, rate: float) -> float:
    state = PowerSGDState(start_iter=0, min_compression_rate=rate)
    _run(powersgd, state, _buckets([_parameters()]))
    return state.compression_rate


def test_min_compression_rate(ranks):
    assert ranks(_min_rate, 100.0) == [1.0, 1.0]
    # Only (24, 16), which shrinks by 9.6, and not (8, 36), by 6.5.
    assert ranks(_min_rate, 9.0) == [pytest.approx(684 / (40 + 300))] * 2


def _rebuilt(rank: int, world_size: int) -> bool:
    """The same gradients, in buckets that change between steps, give the same results."""
    outcomes = []
    for rebuild in (False, True):
        _seed(rank)
        parameters, state = _parameters(shapes=((24, 16), (16, 24), (24, 16))), PowerSGDState(start_iter=0)
        for step in range(3):
            gradients = [torch.randn(p.shape) for p in parameters]
            order = [2, 0, 1] if rebuild and step > 0 else [0, 1, 2]
            split = [order[:1], order[1:]] if rebuild and step > 0 else [order]
            buckets = [
                HandMadeBucket(
                    i,
                    [parameters[k] for k in ks],
                    torch.cat([gradients[k].flatten() for k in ks]),
                    last=i == len(split) - 1,
                )
                for i, ks in enumerate(split)
            ]
            _run(powersgd, state, buckets)
        outcomes.append(
            {id_: g for b, ks in zip(buckets, split, strict=True) for id_, g in zip(ks, b.gradients(), strict=True)}
        )
    return all(torch.allclose(outcomes[0][k], outcomes[1][k], atol=1e-5) for k in range(3))


def test_memory_follows_parameters_when_buckets_are_rebuilt(ranks):
    assert ranks(_rebuilt) == [True, True]


@on_ranks()
def test_powersgd_on_channels_last(rank: int, world_size: int) -> None:
    """Gradients of channels_last parameters are views with strides of their own."""
    _seed(rank)

    class Strided(HandMadeBucket):
        def gradients(self) -> list[Tensor]:
            return [self._buffer.view(8, 3, 3, 4).permute(0, 3, 1, 2)]

    parameter = nn.Parameter(torch.zeros(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    state = PowerSGDState(start_iter=0)
    bucket = Strided(0, [parameter], torch.randn(288), last=True)
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


def test_exported_names():
    assert sorted(paceline.hooks.__all__) == list(paceline.hooks.__all__)
    assert all(hasattr(paceline.hooks, name) for name in paceline.hooks.__all__)


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
    for hook in (default_hooks.allreduce_hook, powerSGD_hook.powerSGD_hook, powersgd, _sparse):
        assert resolve(hook) is hook
        partial = functools.partial(hook)
        assert resolve(partial) is partial


def _sparse(rank: int, world_size: int) -> None:
    gradient = torch.sparse_coo_tensor([[rank, 2]], torch.ones(2, 4), (5, 4), check_invariants=True)
    want = torch.zeros(5, 4)
    want[[0, 1]] = 0.5
    want[2] = 1.0
    states = {"powersgd": PowerSGDState(start_iter=0)}
    for name in ("allreduce", "fp16_compress", "bf16_compress", "powersgd"):
        hook = getattr(paceline.hooks, name)
        for each in (hook, paceline.hooks.bf16(hook)):
            parameter = nn.Parameter(torch.zeros(5, 4))
            bucket = HandMadeBucket(0, [parameter], gradient.clone(), last=True)
            result = each(states.get(name), bucket).wait()
            assert torch.equal(result.to_dense(), want), name


def test_sparse_gradients_travel_as_they_are(ranks):
    ranks(_sparse)


# Under DistributedDataParallel


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 4))


def _gradients(rank: int, hook: Any, state: Any, steps: int) -> tuple[list[Tensor], int]:
    model = _model()
    ddp = paceline.DistributedDataParallel(model, bucket_cap_mb=0.01)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        ddp.zero_grad()
        ddp(torch.randn(4, 2, 8, 8)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()], ddp.stats()["buckets"]


@pytest.mark.parametrize(
    ("name", "tol"),
    [
        ("allreduce", 1e-6),
        ("fp16_compress", 1e-3),
        ("bf16_compress", 5e-3),
        ("partial", 5e-3),
        ("fp16(allreduce)", 1e-3),
        ("powersgd", 1e-5),
        ("torch allreduce", 1e-6),
        ("torch bf16", 1e-2),
        ("torch fp16(allreduce)", 1e-3),
        ("torch powerSGD", 1e-5),
        ("torch quantization", 0.3),
    ],
)
@on_ranks()
def test_gradients_under_ddp(rank: int, world_size: int, name: str, tol: float) -> None:
    hooks = {
        "allreduce": (paceline.hooks.allreduce, None),
        "fp16_compress": (paceline.hooks.fp16_compress, None),
        "bf16_compress": (paceline.hooks.bf16_compress, dist.group.WORLD),
        "partial": (functools.partial(paceline.hooks.bf16_compress), None),
        "fp16(allreduce)": (paceline.hooks.fp16(paceline.hooks.allreduce), None),
        # Of full rank, PowerSGD delivers everything.
        "powersgd": (powersgd, PowerSGDState(rank=999, start_iter=0, min_compression_rate=0.1)),
        "torch allreduce": (default_hooks.allreduce_hook, None),
        "torch bf16": (default_hooks.bf16_compress_hook, None),
        "torch fp16(allreduce)": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None),
        "torch powerSGD": (
            powerSGD_hook.powerSGD_hook,
            powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1e9),
        ),
        "torch quantization": (quantization_hooks.quantization_pertensor_hook, None),
    }
    plain, _ = _gradients(rank, None, None, 4)
    hooked, buckets = _gradients(rank, *hooks[name], 4)
    assert buckets > 1
    for got, want in zip(hooked, plain, strict=True):
        assert got.dtype == want.dtype
        assert ((got - want).norm() / want.norm()).item() <= tol


@on_ranks()
def test_torchs_powersgd_keeps_its_order(rank: int, world_size: int) -> None:
    """torch's PowerSGD really compressing several buckets: it starts collectives in callbacks."""
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    hooked, buckets = _gradients(rank, powerSGD_hook.powerSGD_hook, state, 6)
    assert buckets > 1
    assert state.total_numel_after_compression < state.total_numel_before_compression
    assert all(torch.equal(_mean(g).float(), g) for g in hooked), "ranks got different gradients"


def _learns(rank: int, world_size: int, hooked: bool) -> float:
    model = _model()
    ddp = paceline.DistributedDataParallel(model, bucket_cap_mb=0.01)
    if hooked:
        ddp.register_comm_hook(PowerSGDState(rank=2, start_iter=2), paceline.hooks.bf16(powersgd))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    torch.manual_seed(5)
    x, y = torch.randn(8, 2, 8, 8), torch.randn(8, 4)
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x[rank::world_size]), y[rank::world_size])
        loss.backward()
        optimizer.step()
    return loss.item()


def test_training_with_powersgd_learns_as_without(ranks):
    plain, compressed = sum(ranks(_learns, False)), sum(ranks(_learns, True))
    assert compressed < 1.1 * plain
