"""``torch.func`` through the wrapper: what each transform returns, and the gradients of a backward afterwards."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    functionalize,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    vjp,
    vmap,
)

from paceline import SyncBatchNorm
from paceline.errors import StateError
from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_grads, batch, compare_with_reference, mean_over_ranks, mlp, ours_only

# Forward mode loads torch's deprecated torch.jit.script on first use; here, so that it happens once.
with warnings.catch_warnings():
    for kind in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", kind)
    import torch._decomp.decompositions_for_jvp


def _of_params(model, function):
    return function({name: param.detach() for name, param in model.named_parameters()})


def _dual(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.cos(x)))).tangent


TRANSFORMS = {
    "vjp": lambda model, x: vjp(model, x)[1](model(x).detach())[0],
    "jvp": lambda model, x: jvp(model, (x,), (torch.cos(x),))[1],
    "jacrev": lambda model, x: jacrev(model)(x),
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "hessian": lambda model, x: hessian(lambda y: model(y).square().sum())(x),
    "vmap": lambda model, x: vmap(model)(x),
    "grad": lambda model, x: grad(lambda y: model(y).square().sum())(x),
    "functional_call": lambda model, x: _of_params(model, lambda params: functional_call(model, params, (x,))),
    "grad of parameters": lambda model, x: _of_params(
        model, grad(lambda params: functional_call(model, params, (x,)).square().sum())
    ),
    "grad of samples": lambda model, x: _of_params(
        model,
        lambda params: vmap(grad(lambda p, row: functional_call(model, p, (row,)).square().sum()), (None, 0))(
            params, x
        ),
    ),
    "functionalize": lambda model, x: functionalize(model)(x),
    "forward mode": _dual,
}


class UsesNoParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


def _values(result):
    return {name.removeprefix("module."): t for name, t in result.items()} if isinstance(result, dict) else [result]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("make", [mlp, UsesNoParameter])
def test_a_transform_of_the_wrapper_is_that_of_its_module(ranks, backend, make):
    ranks(_transforms, make, False, backend=backend)


@pytest.mark.full
@pytest.mark.parametrize("make", [mlp, UsesNoParameter])
def test_a_transform_of_the_compiled_wrapper_is_that_of_its_module(ranks, make):
    ranks(_transforms, make, True)


def _transforms(rank, world_size, make, compiled):
    torch.set_default_dtype(torch.float64)
    for name, transform in TRANSFORMS.items():
        ddp = DDP(make())
        model = torch.compile(ddp, backend="aot_eager") if compiled else ddp
        got, want = _values(transform(model, batch(rank))), _values(transform(ddp.module, batch(rank)))
        if compiled and isinstance(got, dict):
            got = {key.removeprefix("_orig_mod.module."): value for key, value in got.items()}
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


BACKWARDS = {
    "vjp": lambda model, x: vjp(model, x)[0],
    "jvp": lambda model, x: sum(jvp(model, (x,), (torch.cos(x),))),
    "jacrev": lambda model, x: jacrev(model)(x),
    "vmap": lambda model, x: vmap(model)(x),
    "grad": lambda model, x: grad(lambda y: model(y).square().sum())(x),
    "vmap of jacfwd": lambda model, x: vmap(jacfwd(model))(x),
}


@ours_only
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_backward_behind_a_transform_averages(ranks, backend):
    """torch's class fails in a later step of some of these: it looks for buckets in tensors of the transform."""
    ranks(_backwards, backend=backend)


def _backwards(rank, world_size):
    for transform in BACKWARDS.values():

        def step(model, rank, i, transform=transform):
            transform(model, batch(rank, i)).square().sum().backward()

        compare_with_reference(rank, world_size, mlp, step)


@pytest.mark.full
@ours_only
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_transform_inside_a_compiled_function(ranks, backend):
    """torch's class cannot reduce the gradients of most of these."""
    ranks(_compiled_backwards, backend=backend)


def _compiled_backwards(rank, world_size):
    for name in ("vjp", "vmap", "grad"):
        torch._dynamo.reset()
        torch.manual_seed(7)
        ddp = DDP(mlp().double())
        reference = mlp().double()
        reference.load_state_dict(ddp.module.state_dict())

        @torch.compile(backend="aot_eager")
        def run(x, transform=BACKWARDS[name], ddp=ddp):
            return transform(ddp, x)

        def plain(model, rank, transform=BACKWARDS[name]):
            transform(model, batch(rank)).square().sum().backward()

        expected = mean_over_ranks(reference, plain, world_size)
        for _ in range(2):
            ddp.zero_grad()
            run(batch(rank)).square().sum().backward()
            assert_grads(ddp, expected, name)


class Choosy(nn.Module):
    """Uses its parameters only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.layer(x) if use else 2 * x


@ours_only
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_rank_that_uses_no_parameter_in_a_transform_takes_part(ranks, backend):
    ranks(_one_rank_uses_none, backend=backend)


def _one_rank_uses_none(rank, world_size):
    def step(model, rank, i):
        x = batch(rank, i).requires_grad_()
        vmap(lambda row: model(row, rank == 0))(x).square().sum().backward()

    compare_with_reference(rank, world_size, Choosy, step)


class Scaled(nn.Module):
    """Has a buffer, which the wrapper broadcasts before each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@ours_only
@on_ranks()
def test_buffers_are_broadcast_inside_a_transform(rank, world_size):
    """torch's class raises, because a transform does not let it write to buffers."""
    for transform in (vmap, jacrev, jacfwd):
        ddp = DDP(Scaled())
        ddp.module.scale.fill_(5 + rank)
        got = transform(ddp)(batch(rank).float())
        assert ddp.module.scale.tolist() == [5, 5]
        torch.testing.assert_close(got, transform(ddp.module)(batch(rank).float()))


@ours_only
@on_ranks()
def test_a_buffer_that_is_a_value_of_a_transform_is_refused(rank, world_size):
    ddp = DDP(Scaled())
    x, scales = batch(rank).float(), torch.ones(3, 2)

    def with_scale(model, name):
        return vmap(lambda scale: functional_call(model, {name: scale}, (x,)))(scales)

    with pytest.raises(StateError, match=r"the buffer 'scale'.*ddp\.module"):
        with_scale(ddp, "module.scale")
    want = with_scale(ddp.module, "scale")
    ddp.forward_sync_buffers = False
    torch.testing.assert_close(with_scale(ddp, "module.scale"), want)


@ours_only
@on_ranks()
def test_sync_batchnorm_refuses_transforms(rank, world_size):
    layer = SyncBatchNorm(4)
    with pytest.raises(StateError, match=r"SyncBatchNorm.*eval\(\)"):
        jacrev(layer)(batch(rank).float())
    jacrev(layer.eval())(batch(rank).float())
