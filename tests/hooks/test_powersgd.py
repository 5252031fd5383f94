"""PowerSGD, on buckets made by hand."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline.hooks
from paceline.errors import BadArgumentError, StateError
from paceline.hooks import PowerSGDState, powersgd
from tests.hooks.buckets import HandMadeBucket, exact_mean, make_buckets, make_parameters, run_all, seed_rank
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("wrapper", [None, "fp16", "bf16"])
@on_ranks()
def test_powersgd_loses_nothing(rank: int, world_size: int, wrapper: str | None) -> None:
    """What a step does not deliver is in the errors: nothing is lost, on average over the ranks."""
    seed_rank(rank)
    hook = getattr(paceline.hooks, wrapper)(powersgd) if wrapper else powersgd
    tol = {"fp16": 5e-3, "bf16": 5e-2, None: 1e-5}[wrapper]
    parameters = [make_parameters(), make_parameters()]
    state = PowerSGDState(rank=2, start_iter=0)
    errors = {p: torch.zeros(p.shape) for ps in parameters for p in ps}
    for _ in range(4):
        buckets = make_buckets(parameters)
        wanted = {
            p: exact_mean(g + errors[p]) for b in buckets for p, g in zip(b.parameters(), b.gradients(), strict=True)
        }
        results = run_all(hook, state, buckets)
        for bucket, result in zip(buckets, results, strict=True):
            everyone = [torch.empty_like(result) for _ in range(world_size)]
            dist.all_gather(everyone, result)
            assert all(torch.equal(result, other) for other in everyone), "ranks got different gradients"
            for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
                error = state.memory(p).error
                compressed = p.shape in ((24, 16), (8, 4, 3, 3))
                assert (error is not None) == compressed
                errors[p] = torch.zeros(p.shape) if error is None else error.view(p.shape)
                torch.testing.assert_close(g.double() + exact_mean(errors[p]), wanted[p], rtol=tol, atol=tol)
                if compressed:
                    assert errors[p].norm() > 0.1
                if compressed and wrapper is None:
                    assert torch.linalg.matrix_rank(g.reshape(g.size(0), -1), rtol=1e-4) == 2


@on_ranks()
def test_powersgd_is_exact_for_gradients_of_its_rank(rank: int, world_size: int) -> None:
    left = torch.randn(24, 2, dtype=torch.float64)  # the same on every rank
    seed_rank(rank)
    parameter, state = nn.Parameter(torch.zeros(24, 16)), PowerSGDState(rank=2, start_iter=0)
    for _ in range(3):
        bucket = HandMadeBucket([parameter], (left @ torch.randn(2, 16).double()).flatten())
        exact = exact_mean(bucket.buffer())
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
    seed_rank(rank)
    parameters = [make_parameters(), make_parameters()]
    state = PowerSGDState(rank=1, start_iter=2)
    for step in range(4):
        buckets = make_buckets(parameters)
        exact = [exact_mean(bucket.buffer()) for bucket in buckets]
        results = run_all(powersgd, state, buckets)
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
    run_all(powersgd, state, make_buckets([make_parameters()]))
    assert state.compression_rate == pytest.approx(reached)


@on_ranks()
def test_memory_follows_parameters_when_buckets_are_rebuilt(rank: int, world_size: int) -> None:
    """The same gradients, in buckets that change between steps, give the same results."""
    outcomes = []
    for rebuilt in ([[0, 1, 2]], [[2], [0, 1]]):
        seed_rank(rank)
        parameters, state = make_parameters(shapes=((24, 16), (16, 24), (24, 16))), PowerSGDState(start_iter=0)
        for split in ([[0, 1, 2]], rebuilt, rebuilt):
            gradients = [torch.randn(p.shape) for p in parameters]
            buffers = [torch.cat([gradients[k].flatten() for k in ks]) for ks in split]
            buckets = [
                HandMadeBucket([parameters[k] for k in ks], buffers[i], index=i, of=len(split))
                for i, ks in enumerate(split)
            ]
            run_all(powersgd, state, buckets)
        results = [gradient for bucket in buckets for gradient in bucket.gradients()]
        outcomes.append(dict(zip([k for ks in rebuilt for k in ks], results, strict=True)))
    assert all(torch.allclose(outcomes[0][k], outcomes[1][k], atol=1e-5) for k in range(3))


@on_ranks()
def test_powersgd_on_channels_last(rank: int, world_size: int) -> None:
    """Gradients of channels_last parameters are views with strides of their own."""
    seed_rank(rank)

    class Strided(HandMadeBucket):
        def gradients(self) -> list[Tensor]:
            return [self._buffer.view(8, 3, 3, 4).permute(0, 3, 1, 2)]

    parameter = nn.Parameter(torch.zeros(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    state = PowerSGDState(start_iter=0)
    bucket = Strided([parameter], torch.randn(288))
    exact = exact_mean(bucket.gradients()[0])
    powersgd(state, bucket).wait()
    got = bucket.gradients()[0] + exact_mean(state.memory(parameter).error.view(8, 4, 3, 3))
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)


@on_ranks()
def test_powersgd_recovers_from_an_overflow_and_from_zeros(rank: int, world_size: int) -> None:
    seed_rank(rank)
    parameters = [make_parameters()]
    state = PowerSGDState(start_iter=0)
    for step in range(5):
        buckets = make_buckets(parameters)
        if step == 1 and rank == 0:
            buckets[0].buffer()[3] = float("inf")
        if step == 2:
            buckets[0].buffer().zero_()
        result = run_all(powersgd, state, buckets)[0]
        assert result.isfinite().all() == (step != 1), f"step {step}"
    exact = exact_mean(buckets[0].gradients()[0])
    assert exact.norm() > 0.1


def _train(state: PowerSGDState, parameters: list[list[Tensor]], steps: range, rank: int) -> list[Tensor]:
    results = []
    for step in steps:
        torch.manual_seed(10 * step + rank)
        results += [r.clone() for r in run_all(powersgd, state, make_buckets(parameters))]
    return results


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
@on_ranks()
def test_powersgd_state_can_be_saved(rank: int, world_size: int, how: str) -> None:
    parameters = [make_parameters(), make_parameters()]
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
    got = _train(resumed, [make_parameters(), make_parameters()], range(3, 6), rank)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert resumed.compression_rate == state.compression_rate
    assert resumed.iter == 6
    with pytest.raises(StateError, match="has seen gradients"):
        resumed.load_state_dict(state.state_dict())


@on_ranks()
def test_a_pickled_state_asks_for_its_group(rank: int, world_size: int) -> None:
    group = dist.new_group(list(range(world_size)))
    state = pickle.loads(pickle.dumps(PowerSGDState(group, start_iter=0)))
    bucket = make_buckets([make_parameters()])[0]
    with pytest.raises(StateError, match="set its process_group"):
        powersgd(state, bucket)
    state.process_group = group
    powersgd(state, bucket).wait()


@on_ranks()
def test_a_state_of_another_module_is_refused(rank: int, world_size: int) -> None:
    state, other = PowerSGDState(start_iter=0), PowerSGDState()
    parameters = make_parameters(shapes=((4, 4), (3,)))
    run_all(powersgd, state, make_buckets([parameters]))
    other.load_state_dict(state.state_dict())
    with pytest.raises(BadArgumentError, match=r"parameter 1 .* has shape \(5,\).*\(4, 4\), \(3,\)"):
        run_all(powersgd, other, make_buckets([make_parameters(shapes=((4, 4), (5,)))]))


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
    buckets = make_buckets([make_parameters()])
    before = torch.get_rng_state()
    run_all(powersgd, PowerSGDState(start_iter=0), buckets)
    assert torch.equal(torch.get_rng_state(), before)
