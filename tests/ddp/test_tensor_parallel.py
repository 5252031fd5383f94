"""Parameters that are distributed over other ranks (DTensors), averaged over the data-parallel dimension of a mesh."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import ParameterMismatchError, ReplicaMismatchError, StateError
from paceline.gradients.layout import TINY_NUMEL
from tests.on_ranks import on_ranks
from tests.reference import batch, full

RTOL, ATOL = 1e-9, 1e-11


class Net(nn.Module):
    """A norm whose gradients autograd leaves to be summed, two layers in parts, an uneven table, a plain layer."""

    def __init__(self, *, spare: bool = False, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.table = nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 5)
        self.spare = nn.Linear(4, 6) if spare else None
        self.checkpointed = checkpointed
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed is None:
            hidden = self._inner(x)
        else:
            hidden = checkpoint(self._inner, x, use_reentrant=self.checkpointed)
        table = self.table.full_tensor() if isinstance(self.table, DTensor) else self.table
        return self.head(hidden) + hidden @ table.T

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def _meshes() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def _parallel(model: Net, tp: DeviceMesh) -> Net:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    if model.spare is not None:
        plan["spare"] = ColwiseParallel()
    prepare = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    prepare._apply(model.norm, tp)
    parallelize_module(model, tp, plan)
    model.table = nn.Parameter(distribute_tensor(model.table.detach(), tp, [Shard(0)]))
    return model


def _models(tp: DeviceMesh, **options: object) -> tuple[Net, Net]:
    """The same model twice: in parts, and whole."""
    torch.manual_seed(3)
    whole = Net(**options)
    return _parallel(copy.deepcopy(whole), tp), whole


def _input(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step, 3, 2, 4).requires_grad_()


def _assert_equal(ours: nn.Module, whole: nn.Module, what: object) -> None:
    expected = dict(whole.named_parameters())
    assert list(expected) == [name for name, _ in ours.named_parameters()]
    for name, param in ours.named_parameters():
        torch.testing.assert_close(
            full(param.detach()),
            expected[name].detach(),
            rtol=RTOL,
            atol=ATOL,
            msg=lambda m, n=name: f"{what} {n}: {m}",
        )


def _train(ddp, whole, dp, what, *, steps=3, accumulate=1, set_to_none=True, clip=False):
    """Steps of both on the same data, the whole batch for the whole model; weights are to stay equal."""
    ours, reference = (torch.optim.AdamW(model.parameters(), lr=0.05) for model in (ddp, whole))
    for step in range(steps):
        ours.zero_grad(set_to_none=set_to_none)
        reference.zero_grad()
        for micro in range(accumulate):
            with ddp.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                ddp(_input(dp.get_local_rank(), 10 * step + micro)).pow(2).mean().backward()
            for rank in range(dp.size()):
                (whole(_input(rank, 10 * step + micro)).pow(2).mean() / dp.size()).backward()
        for param in ddp.parameters():
            if isinstance(param, DTensor) and param.grad is not None:
                assert param.grad.placements == param.placements, what
        if clip:
            # torch clips DTensors and plain tensors together neither here nor without a wrapper.
            norms = [nn.utils.clip_grad_norm_([model.up.weight, model.norm.bias], 0.1) for model in (ddp.module, whole)]
            torch.testing.assert_close(full(norms[0]), norms[1], rtol=RTOL, atol=ATOL)
        ours.step()
        reference.step()
    _assert_equal(ddp.module, whole, what)


def _training(rank, world_size):
    dp, tp = _meshes()
    _train_cases = [
        ({}, {}, {"clip": True}),
        ({}, {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True}, {"set_to_none": False}),
        ({}, {"process_group": dp.get_group()}, {"accumulate": 3}),
        ({"spare": True}, {"find_unused_parameters": True}, {}),
        ({"spare": True}, {"static_graph": True, "batched_grad_copy": True}, {}),
        ({"checkpointed": True}, {}, {}),
        ({"checkpointed": False}, {"verify_every": 1}, {}),
    ]
    for model_options, options, training in _train_cases:
        parts, whole = _models(tp, **model_options)
        options = options if "process_group" in options else {"device_mesh": dp, **options}
        ddp = paceline.DDP(parts, **options)
        _train(ddp, whole, dp, (model_options, options, training), **training)
        kinds = {name: type(value) for name, value in ddp.state_dict().items()}
        assert (kinds["module.up.weight"], kinds["module.head.weight"]) == (DTensor, torch.Tensor)
        assert all(
            isinstance(param.grad, DTensor) == isinstance(param, DTensor)
            for param in ddp.parameters()
            if param.grad is not None
        )
    return ddp.plan.specs[ddp.plan.names(range(len(ddp.plan.specs))).index("up.weight")].shape


def test_weights_are_those_of_one_process(ranks):
    assert set(ranks(_training, world_size=4)) == {(3, 4)}


def _uneven(rank, world_size):
    """Some parts are small enough to wait for each other, others are not, and norms between them have to be summed."""
    dp, tp = _meshes()
    torch.manual_seed(3)
    width = 2 * TINY_NUMEL // 4 + 1
    layers = [(nn.LayerNorm(4), nn.Linear(4, width, bias=False), nn.Linear(width, 4, bias=False)) for _ in range(4)]
    whole = nn.Sequential(*(module for layer in layers for module in layer)).double()
    parts = copy.deepcopy(whole)
    shared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    shared._apply(parts[0], tp)
    # Between the two layers it stays a DTensor: from local tensors alone the whole would be guessed to be even.
    up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    kinds = (SequenceParallel(), up, RowwiseParallel(output_layouts=Shard(1)))
    plan = {str(n): kinds[n % 3] for n in range(len(parts) - 1)}
    parallelize_module(parts, tp, {**plan, str(len(parts) - 1): RowwiseParallel(output_layouts=Replicate())})
    ddp = paceline.DDP(parts, device_mesh=dp)
    _train(ddp, whole, dp, "uneven")
    return parts[1].weight.to_local().numel()


def test_parts_of_different_sizes_talk_in_one_order(ranks):
    small, large = sorted(set(ranks(_uneven, world_size=4)))
    assert small <= TINY_NUMEL < large


class Branches(nn.Module):
    """Two ways through layers that are split unevenly, each after a norm; a call takes one of them, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.ModuleList(self._layer() for _ in range(3)) for _ in range(2))
        self.double()

    @staticmethod
    def _layer() -> nn.ModuleDict:
        up, down = nn.Linear(4, 5, bias=False), nn.Linear(5, 4, bias=False)
        return nn.ModuleDict({"norm": nn.LayerNorm(4), "up": up, "down": down})

    def forward(self, x: torch.Tensor, *ways: int) -> torch.Tensor:
        for layer in (layer for way in ways for layer in self.ways[way]):
            x = x + layer["down"](torch.tanh(layer["up"](layer["norm"](x))))
        return x


def _graph_in_no_sync(rank, world_size):
    """Gradients to be summed over the mesh wait in buckets that leave at another moment on each of its ranks."""
    dp, tp = _meshes()
    torch.manual_seed(3)
    whole = Branches()
    parts = copy.deepcopy(whole)
    shared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    up = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    plan = {"norm": SequenceParallel(), "up": up, "down": RowwiseParallel(output_layouts=Replicate())}
    for layer in (layer for way in parts.ways for layer in way):
        shared._apply(layer["norm"], tp)
        parallelize_module(layer, tp, plan)
    ddp = paceline.DDP(parts, device_mesh=dp, bucket_cap_mb=3e-4, find_unused_parameters=True)
    mine = dp.get_local_rank()
    with ddp.no_sync():
        ddp(_input(mine, 0), 0, 1).pow(2).mean().backward(create_graph=True)
    for name, param in parts.named_parameters():
        assert param.grad.placements == param.placements, name
    ddp(_input(mine, 1), 0).pow(2).mean().backward()
    for n in range(2):
        (whole(_input(n, 0), 0, 1).pow(2).mean() / 2).backward()
        (whole(_input(n, 1), 0).pow(2).mean() / 2).backward()
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=RTOL, atol=ATOL)
    # Gradients are differentiated again, on one replica by itself.
    for model in (parts, whole):
        model.zero_grad()
        with ddp.no_sync():
            (ddp if model is parts else whole)(_input(mine, 2), 1).pow(2).mean().backward(create_graph=True)
            grads = [layer["norm"].weight.grad for layer in model.ways[1]]
            model.zero_grad()
            sum(full(grad).pow(2).sum() for grad in grads).backward()
    for ours, theirs in zip(parts.ways[1].parameters(), whole.ways[1].parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-6, atol=ATOL)
    return len(ddp.plan.buckets)


@pytest.mark.full
def test_parts_talk_in_one_order_after_create_graph_in_no_sync(ranks):
    few, many = sorted(set(ranks(_graph_in_no_sync, world_size=4, allow_warnings=(("Using backward", UserWarning),))))
    assert few < many


@on_ranks(world_size=4)
def test_weights_are_those_of_torch_s_class(rank, world_size):
    """torch's class shows plain local parameters, and after a forward none; they are to have our values."""
    dp, tp = _meshes()
    held = []
    for kind in (nn.parallel.DistributedDataParallel, paceline.DDP):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()
        parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ddp = kind(model, device_mesh=dp)
        params = list(ddp.parameters())
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(dp.get_local_rank(), step)).pow(2).mean().backward()
            optimizer.step()
        held.append([p.detach().to_local() if isinstance(p, DTensor) else p.detach() for p in params])
    for theirs, ours in zip(*held, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.full
@on_ranks(world_size=4)
def test_hooks_start_and_weights(rank, world_size):
    dp, tp = _meshes()
    seen = []

    def counting(state, bucket):
        seen.append([tuple(g.shape) for g in bucket.gradients()])
        assert [tuple(p.shape) for p in bucket.parameters()] == seen[-1]
        assert not any(isinstance(tensor, DTensor) for tensor in (*bucket.parameters(), bucket.buffer()))
        return dist.all_reduce(bucket.buffer().div_(dp.size()), group=dp.get_group(), async_op=True).get_future()

    parts, whole = _models(tp)
    ddp = paceline.DDP(parts, device_mesh=dp)
    ddp.register_comm_hook(None, counting)
    _train(ddp, whole, dp, "comm hook")
    assert seen[0].count((3, 4)) == (1 if rank % 2 else 2)  # up.weight, and the larger part of the table

    # What ranks started with does not matter: those of the same part get the first one's.
    parts, whole = _models(tp)
    with torch.no_grad():
        for param in parts.parameters():
            param.mul_(1 + dp.get_local_rank())
    ddp = paceline.DDP(parts, device_mesh=dp, verify_every=1)
    _train(ddp, whole, dp, "start")
    paceline.assert_replicas_equal(ddp)
    with pytest.raises(StateError, match="Give the wrapper"):
        paceline.assert_replicas_equal(parts)
    with torch.no_grad():
        if rank == 3:
            parts.up.weight.to_local()[0, 0] += 1
    # Only ranks 1 and 3 have that part: the others see nothing wrong.
    with pytest.raises(ReplicaMismatchError, match=r"up\.weight") if rank % 2 else contextlib.nullcontext():
        paceline.assert_replicas_equal(ddp)

    # Backwards are weighed: gradients are the mean over all samples.
    parts, whole = _models(tp)
    ddp = paceline.DDP(parts, device_mesh=dp)
    weights = [1.0, 3.0]
    with ddp.weighted(weights[dp.get_local_rank()]):
        ddp(_input(dp.get_local_rank(), 0)).pow(2).mean().backward()
    for n, weight in enumerate(weights):
        (whole(_input(n, 0)).pow(2).mean() * weight / 4).backward()
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=RTOL, atol=ATOL)


@pytest.mark.full
@on_ranks(world_size=4)
def test_a_layer_is_frozen_for_a_step_and_a_gradient_is_kept(rank, world_size):
    dp, tp = _meshes()
    parts, whole = _models(tp)
    ddp = paceline.DDP(parts, device_mesh=dp)
    for step in range(3):
        for model in (parts, whole):
            model.zero_grad()
            model.up.weight.requires_grad_(step != 1)
        ddp(_input(dp.get_local_rank(), step)).pow(2).mean().backward()
        for n in range(2):
            (whole(_input(n, step)).pow(2).mean() / 2).backward()
        for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=RTOL, atol=ATOL)
        if step == 0:
            kept = parts.down.weight.grad
            value = full(kept).clone()
    torch.testing.assert_close(full(kept), value, rtol=0, atol=0)


@pytest.mark.full
@on_ranks(world_size=4, allow_warnings=(("Using backward", UserWarning),))
def test_gradients_are_differentiated_again(rank, world_size):
    """A penalty is of averaged gradients."""
    dp, tp = _meshes()
    parts, whole = _models(tp)
    ddp = paceline.DDP(parts, device_mesh=dp)
    ddp(_input(dp.get_local_rank(), 0)).pow(2).mean().backward(create_graph=True)
    sum((whole(_input(n, 0)).pow(2).mean() / 2) for n in range(2)).backward(create_graph=True)
    once = []
    for model in (parts, whole):
        # The norm's gradient still has to be summed over the mesh: autograd leaves that to us.
        grads = [model.up.weight.grad, model.table.grad, model.norm.weight.grad]
        model.zero_grad()
        once.append(sum(full(grad).pow(2).sum() for grad in grads))
    torch.testing.assert_close(*once, rtol=RTOL, atol=ATOL)
    with ddp.no_sync():
        once[0].backward()
    once[1].backward()
    for name in ("up", "norm"):
        mine = full(parts.get_submodule(name).weight.grad)
        dist.all_reduce(mine, group=dp.get_group())
        torch.testing.assert_close(mine / dp.size(), whole.get_submodule(name).weight.grad, rtol=1e-6, atol=ATOL)


@on_ranks(world_size=4)
def test_low_precision(rank, world_size):
    """Casts of DTensors are DTensors, and their gradients are whole again."""
    dp, tp = _meshes()
    parts, whole = _models(tp)
    config = paceline.MixedPrecision(param_dtype=torch.float32)
    ddp = paceline.DDP(parts, device_mesh=dp, mixed_precision=config)
    ddp(_input(dp.get_local_rank(), 0)).pow(2).mean().backward()
    for n in range(2):
        (whole(_input(n, 0)).pow(2).mean() / 2).backward()
    for ours, theirs in zip(parts.parameters(), whole.parameters(), strict=True):
        assert ours.grad.dtype is torch.float64
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-5)


@on_ranks(world_size=4)
def test_uneven_inputs(rank, world_size):
    """The parts of one replica run out together."""
    dp, tp = _meshes()
    parts, whole = _models(tp)
    ddp = paceline.DDP(parts, device_mesh=dp)
    mine = dp.get_local_rank()
    with ddp.join():
        for step in range(2 + mine):
            ddp.zero_grad()
            ddp(_input(mine, step)).pow(2).mean().backward()
    if mine == 1:
        whole(_input(1, 2)).pow(2).mean().backward()
        torch.testing.assert_close(full(parts.up.weight.grad) * 2, whole.up.weight.grad, rtol=RTOL, atol=ATOL)
    else:
        full(parts.up.weight.detach())


@on_ranks(world_size=4)
def test_a_buffer_in_parts(rank, world_size):
    """A buffer is overwritten, or replaced where an earlier forward may still need it."""
    dp, tp = _meshes()
    parts, _ = _models(tp)
    parts.scale = nn.Buffer(distribute_tensor(torch.ones(4), tp, [Shard(0)]))
    ddp = paceline.DDP(parts, device_mesh=dp)
    losses = []
    for step in range(2):
        with torch.no_grad():
            parts.scale.fill_(10 * step + dp.get_local_rank())
        losses.append(ddp(_input(dp.get_local_rank(), step)).sum())
        assert isinstance(parts.scale, DTensor)
        assert full(parts.scale).tolist() == [10.0 * step] * 4
    sum(losses).backward()


@on_ranks(world_size=4)
def test_what_cannot_be_averaged_is_refused(rank, world_size):
    dp, tp = _meshes()
    parts, _ = _models(tp)
    # The default group has both parts of each parameter in it.
    with pytest.raises(StateError, match=rf"table.*together with rank {rank ^ 1} .*device_mesh=mesh\['dp'\]"):
        paceline.DDP(parts)
    partial = nn.Linear(4, 4)
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), tp, [Partial()]))
    with pytest.raises(StateError, match=r"weight.*partial placement.*Redistribute"):
        paceline.DDP(partial, device_mesh=dp)
    # These local tensors have one shape, but are parts of different wholes.
    linear = nn.Linear(4, 4)
    whole = (torch.ones(4, 4), [Shard(0)]) if dp.get_local_rank() else (torch.ones(2, 4), [Replicate()])
    linear.weight = nn.Parameter(distribute_tensor(whole[0], tp, whole[1]))
    with pytest.raises(ParameterMismatchError, match=r"placement of parameter 'weight' is .* of \(2, 4\)' on rank 0"):
        paceline.DDP(linear, device_mesh=dp)
    # These ranks hold different replicas, and also different parts.
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    sharded = nn.Linear(4, 4)
    sharded.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), tp, [Shard(0)]))
    with pytest.raises(ParameterMismatchError, match=r"'weight' is .*part [01]' on rank \d and .*part [01]'"):
        paceline.DDP(sharded, process_group=groups[rank in (1, 2)])
    # The same holds for buffers, because rank 0's part would overwrite the others. It does not where nobody sends them.
    buffered = nn.Linear(4, 2)
    buffered.scale = nn.Buffer(distribute_tensor(torch.ones(4), tp, [Shard(0)]))
    with pytest.raises(StateError, match=rf"Buffer 'scale'.*together with rank {rank ^ 1} of"):
        paceline.DDP(buffered)
    with pytest.raises(ParameterMismatchError, match=r"parts of buffers.*scale.*part [01]"):
        paceline.DDP(buffered, process_group=groups[rank in (1, 2)])
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        paceline.DDP(buffered, broadcast_buffers=False)
    buffered.scale = nn.Buffer(DTensor.from_local(torch.ones(4), tp, [Partial()]))
    with pytest.raises(StateError, match=r"Buffer 'scale'.*partial placement"):
        paceline.DDP(buffered, device_mesh=dp)
    # The module can be wrapped afterwards.
    ddp = paceline.DDP(parts, device_mesh=dp)
    ddp(_input(dp.get_local_rank(), 0)).sum().backward()
    paceline.assert_replicas_equal(ddp)
