"""SyncBatchNorm against plain batch norm on the whole batch."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.ddp.sync_batchnorm import SyncBatchNorm
from paceline.errors import BadArgumentError, BadTypeError
from tests.on_ranks import on_ranks

CHANNELS = 3
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Per channel counts of one and none exist for 2-D input only.
SPLITS = [(4, 4), (6, 2), (7, 1), (1, 1), (8, 0), (0, 2)]


def _batch(size: int, dims: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(size, CHANNELS, *[4, 3, 2][: dims - 2], dtype=torch.float64)
    offsets = torch.tensor([0.0, 5.0, -30.0]).view(1, -1, *[1] * (dims - 2))
    return (x * 2 + offsets).to(dtype)


def _reference(x: Tensor, **options: Any) -> nn.Module:
    layer = LAYERS[x.dim()](CHANNELS, **options)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    return layer


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def _close(got: Tensor, want: Tensor, what: str, *, tol: float = 1e-4) -> None:
    torch.testing.assert_close(got, want, rtol=tol, atol=tol, msg=lambda text: f"{what}: {text}")


def _compare(
    rank: int,
    world_size: int,
    sizes: tuple[int, ...],
    dims: int,
    options: dict[str, Any],
    channels_last: bool,
    dtype: torch.dtype = torch.float32,
    input_dtype: torch.dtype = torch.float32,
    tol: float = 1e-4,
) -> None:
    """Two steps on slices of a batch, against plain batch norm on the whole batch in double."""
    layer = _reference(torch.empty(0, CHANNELS, *[1] * (dims - 2)), **options).to(dtype)
    sync = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer))
    whole = copy.deepcopy(layer).double()
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for step in range(2):
        x = _batch(sum(sizes), dims, input_dtype)
        grad = torch.randn(x.shape).to(input_dtype)
        part, part_grad = x[mine], grad[mine]
        if channels_last:
            part, part_grad = (t.contiguous(memory_format=FORMATS[dims]) for t in (part, part_grad))
        part = part.clone().requires_grad_()
        x = x.double().requires_grad_()
        for module in (sync, whole):
            module.zero_grad()
        want, got = whole(x), sync(part)
        assert got.dtype == input_dtype
        if channels_last and len(part):
            assert got.is_contiguous(memory_format=FORMATS[dims])
        _close(got.double(), want[mine], f"output of step {step}", tol=tol)
        want.backward(grad.double())
        got.backward(part_grad)
        assert part.grad is not None
        assert x.grad is not None
        assert part.grad.dtype == input_dtype
        _close(part.grad.double(), x.grad[mine], f"input gradient of step {step}", tol=tol)
        for (name, p), q in zip(sync.named_parameters(), whole.parameters(), strict=True):
            assert p.grad is not None
            assert p.grad.dtype == dtype
            _close(_sum_over_ranks(p.grad).double(), q.grad, f"gradient of {name}, step {step}", tol=tol)
    for (name, b), want_b in zip(sync.named_buffers(), whole.buffers(), strict=True):
        _close(b.double(), want_b.double(), name, tol=tol)
        everyone = [torch.empty_like(b) for _ in range(world_size)]
        dist.all_gather(everyone, b)
        assert all(torch.equal(b, other) for other in everyone), f"{name} differs between ranks"


@pytest.mark.parametrize("sizes", SPLITS)
def test_equals_batch_norm_on_the_whole_batch(ranks, sizes):
    ranks(_compare, sizes, 2, {}, False)


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_more_dimensions(ranks, dims):
    ranks(_compare, (3, 2), dims, {}, False)
    ranks(_compare, (0, 2), dims, {}, False)


@pytest.mark.parametrize("dims", [4, 5])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 0)])
def test_channels_last(ranks, dims, sizes):
    ranks(_compare, sizes, dims, {}, True)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.0},
        {"eps": 0.5, "momentum": 0.9},
    ],
    ids=str,
)
def test_options(ranks, options):
    ranks(_compare, (5, 2), 4, options, False)


@pytest.mark.parametrize(
    ("dtype", "input_dtype", "tol"),
    [
        (torch.float64, torch.float64, 1e-10),
        (torch.float16, torch.float16, 2e-2),
        (torch.bfloat16, torch.bfloat16, 1e-1),
        (torch.float32, torch.float16, 1e-2),
        (torch.float32, torch.bfloat16, 5e-2),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_dtypes(ranks, dtype, input_dtype, tol, channels_last):
    ranks(_compare, (5, 3), 4, {}, channels_last, dtype, input_dtype, tol)
    ranks(_compare, (3, 0), 4, {"affine": False}, channels_last, dtype, input_dtype, tol)


def test_three_ranks(ranks):
    ranks(_compare, (2, 0, 5), 4, {}, False, world_size=3)


@on_ranks()
def test_variance_of_values_far_from_zero(rank: int, world_size: int) -> None:
    # Sums of squares in single precision would see no variance at all here.
    whole = torch.randn(512, 1) + 4096
    layer = SyncBatchNorm(1, momentum=1.0)
    layer(whole[rank::world_size])
    assert layer.running_var.item() == pytest.approx(whole.double().var().item(), rel=1e-4)


@on_ranks()
def test_one_value_over_all_ranks_is_an_error_on_every_rank(rank: int, world_size: int) -> None:
    with pytest.raises(BadArgumentError, match="more than 1 value per channel"):
        SyncBatchNorm(CHANNELS)(torch.ones(1 - rank, CHANNELS))


@on_ranks()
def test_nothing_on_any_rank_leaves_the_statistics_alone(rank: int, world_size: int) -> None:
    layer = SyncBatchNorm(CHANNELS)
    x = torch.ones(0, CHANNELS, 2, 2, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert layer.weight.grad.eq(0).all()
    assert layer.running_mean.eq(0).all()
    assert layer.running_var.eq(1).all()


@pytest.mark.parametrize("sizes", [(4, 4), (5, 1), (0, 6)])
@on_ranks()
def test_can_be_differentiated_twice(rank: int, world_size: int, sizes: tuple[int, ...]) -> None:
    whole = nn.BatchNorm1d(CHANNELS).double()
    nn.init.uniform_(whole.weight, 0.5, 2)
    sync = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    x = torch.randn(sum(sizes), CHANNELS, dtype=torch.float64)
    part = x[mine].clone().requires_grad_()
    x.requires_grad_()

    def penalty(layer: nn.Module, inputs: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(layer(inputs).pow(3).sum(), inputs, create_graph=True)
        return first.pow(2).sum()

    penalty(whole, x).backward()
    penalty(sync, part).backward()
    assert part.grad is not None
    assert x.grad is not None
    _close(part.grad, x.grad[mine], "input", tol=1e-9)
    for name in ("weight", "bias"):
        got, want = getattr(sync, name).grad, getattr(whole, name).grad
        _close(_sum_over_ranks(got), want, name, tol=1e-9)


def _started(layer: nn.Module, *, needs_grad: bool = True, backward: bool = True) -> list[str]:
    """The names of the collectives that a step of ``layer`` starts, of the two that it knows."""
    watched = Mock(wraps=dist)
    with (
        patch.object(dist, "all_gather", watched.all_gather),
        patch.object(dist, "all_reduce", watched.all_reduce),
        torch.set_grad_enabled(backward),
    ):
        output = layer(torch.randn(4, CHANNELS).requires_grad_(needs_grad))
        if backward:
            output.sum().backward()
    return [name for name, _, _ in watched.mock_calls]


def _collectives(rank: int, world_size: int) -> dict[str, list[str]]:
    layer = SyncBatchNorm(CHANNELS)
    return {
        "train": _started(layer),
        "first": _started(layer, needs_grad=False),
        "no grad": _started(layer, backward=False),
        "eval": _started(layer.eval()),
        "untracked eval": _started(SyncBatchNorm(CHANNELS, track_running_stats=False).eval()),
    }


def test_one_collective_each_way_and_none_without_need(ranks):
    together = {
        "train": ["all_gather", "all_reduce"],
        "first": ["all_gather"],  # an input without gradient needs no exchange in backward
        "eval": [],
        "untracked eval": [],
        "no grad": ["all_gather"],
    }
    assert ranks(_collectives) == [together, together]
    assert ranks(_collectives, world_size=1) == [{case: [] for case in together}]


@on_ranks()
def test_process_group(rank: int, world_size: int) -> None:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    x = torch.randn(6, CHANNELS) + rank
    local, sync = nn.BatchNorm1d(CHANNELS), SyncBatchNorm(CHANNELS, process_group=alone)
    assert torch.equal(local(x), sync(x))
    assert torch.equal(local.running_mean, sync.running_mean)

    only_zero = dist.new_group([0])
    outside = SyncBatchNorm(CHANNELS, process_group=only_zero)
    if rank == 0:
        outside(x)
    else:
        with pytest.raises(BadArgumentError, match="rank 1 is not in the process_group"):
            outside(x)


def test_without_process_group_it_is_plain_batch_norm():
    x = torch.randn(5, CHANNELS)
    layer, sync = nn.BatchNorm1d(CHANNELS), SyncBatchNorm(CHANNELS)
    for _ in range(2):
        assert torch.equal(layer(x), sync(x))
        layer.eval(), sync.eval()
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, sync.get_buffer(name))


def test_signatures_are_torchs():
    assert inspect.signature(SyncBatchNorm) == inspect.signature(nn.SyncBatchNorm)
    ours = inspect.signature(SyncBatchNorm.convert_sync_batchnorm)
    assert ours == inspect.signature(nn.SyncBatchNorm.convert_sync_batchnorm)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.once = nn.BatchNorm1d(4)
        self.again = self.once
        self.deep = nn.ModuleDict({"x": nn.ModuleList([nn.BatchNorm3d(2, eps=0.1, momentum=None), nn.ReLU()])})
        self.torchs = nn.SyncBatchNorm(2)
        self.group_norm = nn.GroupNorm(1, 2)


def test_convert_reaches_every_layer_and_keeps_what_is_attached():
    net = _Net()
    net.once.eval()
    net.once.qconfig = "some qconfig"
    net.torchs.weight.requires_grad_(False)
    seen = []
    handle = net.once.register_forward_hook(lambda *_: seen.append(1))
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    state = copy.deepcopy(net.state_dict())

    converted = SyncBatchNorm.convert_sync_batchnorm(net)

    assert converted is net
    names = {name for name, m in net.named_modules(remove_duplicate=False) if type(m) is SyncBatchNorm}
    assert names == {"block.1", "once", "again", "deep.x.0", "torchs"}
    assert net.once is net.again
    assert all(parameters[name] is p for name, p in net.named_parameters())
    assert all(buffers[name] is b for name, b in net.named_buffers())
    assert net.state_dict().keys() == state.keys()
    assert not net.once.training
    assert net.block[1].training
    assert net.once.qconfig == "some qconfig"
    assert net.deep["x"][0].eps == 0.1
    assert net.deep["x"][0].momentum is None
    assert not net.torchs.weight.requires_grad
    net.once(torch.randn(2, 4))
    assert seen == [1]
    handle.remove()
    net.once(torch.randn(2, 4))
    assert seen == [1]
    _Net().load_state_dict(net.state_dict())


def test_convert_takes_the_group_and_a_bare_layer():
    group = object()
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2), group)
    assert type(layer) is SyncBatchNorm
    assert layer.process_group is group
    assert isinstance(layer, nn.SyncBatchNorm)
    assert SyncBatchNorm.convert_sync_batchnorm(layer).process_group is None
    linear = nn.Linear(2, 2)
    assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear


def test_converted_layer_can_be_copied_and_saved():
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2))
    layer(torch.randn(4, 2))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(other) is SyncBatchNorm
        assert torch.equal(other.running_var, layer.running_var)


def test_wrong_input_is_refused():
    layer = SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="at least 2D input \\(got 1D input\\)"):
        layer(torch.ones(CHANNELS))
    with pytest.raises(BadArgumentError, match="3 features but its input of shape \\(2, 4\\) has 4"):
        layer(torch.ones(2, 4))
    with pytest.raises(BadTypeError, match="Module, got int"):
        SyncBatchNorm.convert_sync_batchnorm(3)
    with pytest.raises(BadArgumentError, match="0 is a lazy batch norm"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


@on_ranks()
def test_training_under_ddp(rank: int, world_size: int) -> None:
    """Three steps of a wrapped network on halves of a batch, against one process on the whole batch."""
    torch.manual_seed(0)
    single = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3)
    ).double()
    wrapped = paceline.DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (single, wrapped)]
    for _ in range(3):
        x = torch.randn(4 * world_size, 2, 6, 6, dtype=torch.float64)
        y = torch.randn(4 * world_size, 3, dtype=torch.float64)
        for model, optimizer, part in zip(
            (single, wrapped), optimizers, (slice(None), slice(4 * rank, 4 * rank + 4)), strict=True
        ):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[part]), y[part]).backward()
            optimizer.step()
    for (name, got), want in zip(wrapped.module.state_dict().items(), single.state_dict().values(), strict=True):
        _close(got, want, name, tol=1e-10)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("way", ["eager", "compiled around", "compiled inside"])
def test_torch_s_layer_on_the_cpu_is_told_of_ours(ranks, backend, way):
    ranks(_torch_s_layer, way, backend=backend)


def _torch_s_layer(rank, world_size, way):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.SyncBatchNorm(4)))
    # Wrapping is fine, and so is evaluation, which needs nobody else's statistics.
    ddp = paceline.DDP(torch.compile(model, backend="eager") if way == "compiled inside" else model)
    step = torch.compile(ddp, backend="eager") if way == "compiled around" else ddp
    ddp.eval()
    step(torch.ones(3, 4))
    ddp.train()
    with pytest.raises(ValueError, match=r"1\.0.*paceline\.SyncBatchNorm\.convert_sync_batchnorm") as caught:
        step(torch.ones(3, 4))
    assert isinstance(caught.value, BadArgumentError)
    assert "SyncBatchNorm" in str(caught.value.__cause__)


@on_ranks()
def test_another_error_of_a_module_stays_as_it_is(rank, world_size):
    ddp = paceline.DDP(nn.Sequential(nn.SyncBatchNorm(4)))
    with pytest.raises(ValueError, match="at least 2D input") as caught:
        ddp(torch.ones(4))
    assert type(caught.value) is ValueError
