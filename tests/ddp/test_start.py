"""Wrapping: what is compared across ranks, what is broadcast, what is ignored, what is refused."""

from __future__ import annotations

import copy
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.control.peer_wait import PeerWait
from paceline.errors import BadArgumentError, ParameterMismatchError, PeerFailedError, StateError
from paceline.testing import RankPool
from tests.on_ranks import on_ranks
from tests.reference import DDP, STOCK, assert_in_sync, batch, compare_with_reference, mlp, ours_only, square


class _Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.transposed = nn.Parameter(torch.randn(2, 4).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.brain = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("flags", torch.rand(4) > 0.5)
        self.register_buffer("counts", torch.randint(0, 100, (3,)))
        self.register_buffer("temporary", torch.randn(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.bn(self.linear(x))


@on_ranks(world_size=3)
def test_parameters_and_buffers_are_broadcast_from_rank_0(rank, world_size):
    models = []
    for seed in (0, rank):
        torch.manual_seed(seed)
        models.append(_Everything())
        models[-1].bn.running_mean.normal_()
    wanted, model = models
    DDP(model)
    for (name, mine), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert mine.stride() == theirs.stride(), name
    for (name, mine), theirs in zip(model.named_buffers(), wanted.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


@on_ranks()
def test_large_models_are_broadcast_whole(rank, world_size):
    """More than a chunk, in parameters that straddle chunks."""
    torch.manual_seed(rank)
    model = nn.ParameterList([nn.Parameter(torch.randn(700_000)) for _ in range(8)])
    DDP(model)
    assert_in_sync(model)


@on_ranks()
def test_init_sync_off(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(float(rank))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ddp = DDP(model, init_sync=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    # Gradients are still averaged.
    ddp(batch(rank).float()).square().sum().backward()
    gathered = [torch.empty(4, 4) for _ in range(world_size)]
    dist.all_gather(gathered, model[0].weight.grad.clone())
    assert torch.equal(*gathered)


@ours_only
@on_ranks()
def test_differences_are_found_without_init_sync(rank, world_size):
    """Found before the first exchange of gradients, or of buffers, whichever comes first."""
    shapes = DDP(nn.Linear(4, 2 + rank), init_sync=False)
    with pytest.raises(
        ParameterMismatchError, match=r"the shape of parameter 'weight' is \[2, 4\] on rank 0 and \[3, 4\] on rank 1"
    ):
        shapes(torch.ones(1, 4)).sum().backward()
    buffers = nn.Linear(4, 2)
    buffers.register_buffer("table", torch.zeros(2 + rank))
    buffers = DDP(buffers, init_sync=False)
    with pytest.raises(ParameterMismatchError, match="table"):
        buffers(torch.ones(1, 4))
    # The group is as it was.
    ddp = DDP(nn.Linear(4, 2), init_sync=False)
    with ddp.join():
        # Rank 0 has no inputs at all: it looks when the other one does.
        for _ in range(rank):
            ddp(torch.ones(1, 4)).sum().backward()
    ddp.zero_grad()
    ddp(torch.ones(1, 4)).sum().backward()
    assert ddp.module.bias.grad.tolist() == [1.0, 1.0]


@on_ranks(world_size=3)
def test_the_source_is_the_first_rank_of_the_group(rank, world_size):
    """In a subgroup, the source is the first rank of the group, not global rank 0."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    mine = model.weight.detach().clone()
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    DDP(model, process_group=group)
    gathered = [torch.empty(4, 4) for _ in range(2)]
    dist.all_gather(gathered, model.weight.detach().clone(), group=group)
    assert torch.equal(*gathered)
    if rank == 1:
        assert torch.equal(model.weight, mine)
    return None


# -- what must agree -----------------------------------------------------------------------------------------


def _net():
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Conv2d(4, 4, 3), "c": nn.Linear(4, 4)})


def _flat(net):
    net["c"].weight = nn.Parameter(torch.randn(2, 8))


# What one rank does to its module, and the parameter that the error names.
MISMATCHES = {
    "name": (lambda net: net.update({"z": net.pop("c")}), "c.weight"),
    "order": (lambda net: net.update({"a": net.pop("a")}), "a.weight"),
    "shape": (lambda net: net.update({"c": nn.Linear(5, 4)}), "c.weight"),
    "shape_same_numel": (_flat, "c.weight"),
    "dtype": (lambda net: net["c"].double(), "c.weight"),
    "strides": (lambda net: net["b"].to(memory_format=torch.channels_last), "b.weight"),
    "requires_grad": (lambda net: net["c"].weight.requires_grad_(False), "c.weight"),
    "added": (lambda net: net.update({"d": nn.Linear(1, 1)}), "d.weight"),
    "removed": (lambda net: net.pop("c"), "c.weight"),
    "removed_bias": (lambda net: setattr(net["a"], "bias", None), "a.bias"),
}


def _mismatch(rank, world_size, kind, odd_rank):
    torch.manual_seed(rank)
    net = _net()
    if rank == odd_rank:
        MISMATCHES[kind][0](net)
    before = copy.deepcopy(net)
    with pytest.raises(
        ParameterMismatchError, match=rf"(?is){re.escape(MISMATCHES[kind][1])}.*rank {odd_rank}"
    ) as caught:
        DDP(net)
    assert kind != "shape" or "[4, 5]" in str(caught.value), "the differing shape is shown"
    # It came before any tensor collective: nothing was written, the group is in step, and another wrap works.
    for (name, p), q in zip(net.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q), name
    _wrap_one(rank, world_size)


@ours_only
@pytest.mark.parametrize(
    ("kind", "odd_rank", "world_size"),
    [*((kind, 1, 2) for kind in MISMATCHES), ("shape", 2, 3), ("shape", 0, 3)],
)
def test_mismatch_names_the_parameter_and_the_rank_on_every_rank(ranks, kind, odd_rank, world_size):
    ranks(_mismatch, kind, odd_rank, world_size=world_size)


@ours_only
@pytest.mark.parametrize(
    ("option", "values", "said"),
    [
        ("bucket_cap_mb", [0.5, 25], r"is \[0\.5\] on rank 0 and \[25\.0\] on rank 1"),
        ("static_graph", [True, False], "is True on rank 0 and False on rank 1"),
        ("find_unused_parameters", [False, True], "is False on rank 0 and True on rank 1"),
    ],
)
@on_ranks()
def test_options_that_may_not_differ_between_ranks_are_named(rank, world_size, option, values, said):
    with pytest.raises(ParameterMismatchError, match=f"option {option} {said}"):
        DDP(mlp(), **{option: values[rank]})
    _wrap_one(rank, world_size)


@ours_only
@on_ranks()
def test_where_gradients_live_may_differ_between_ranks(rank, world_size):
    compare_with_reference(rank, world_size, mlp, square, gradient_as_bucket_view=rank == 1)


@ours_only
@on_ranks(group_timeout_s=600)
def test_when_wrapping_fails_on_one_rank_the_other_does_not_wait_for_the_time_out(rank, world_size):
    with pytest.raises(BadArgumentError if rank == 1 else PeerFailedError):
        DDP(nn.Linear(4, 4), bucket_cap_mb=-1 if rank == 1 else None)


# -- ignored parameters --------------------------------------------------------------------------------------


class _TwoParts(nn.Module):
    def __init__(self, local_size=4):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.local = nn.Linear(4, local_size)
        self.register_buffer("local_buffer", torch.zeros(2))
        self.register_buffer("shared_buffer", torch.zeros(2))

    def forward(self, x):
        return self.local(self.shared(x).tanh())


IGNORED = ["local.weight", "local.bias", "local_buffer"]


@pytest.mark.parametrize("sizes", [[4, 4], [4, 3]], ids=["alike", "shapes that differ"])
@on_ranks()
def test_ignored_parameters_and_buffers_stay_local(rank, world_size, sizes):
    torch.manual_seed(rank)
    model = _TwoParts(sizes[rank])
    model.local_buffer.fill_(rank + 1.0)
    model.shared_buffer.fill_(rank + 1.0)
    before = model.local.weight.detach().clone()
    DDP._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
    ddp = DDP(model)
    assert torch.equal(model.local.weight, before)
    assert model.local_buffer[0] == rank + 1.0
    assert model.shared_buffer[0] == 1.0
    ddp(batch(rank).float()).square().sum().backward()
    assert model.local_buffer[0] == rank + 1.0
    assert_in_sync(model.shared)
    # The ignored gradient is this rank's own.
    hidden = model.shared(batch(rank).float()).tanh().detach()
    local = nn.Linear(4, sizes[rank])
    local.load_state_dict(model.local.state_dict())
    local(hidden).square().sum().backward()
    torch.testing.assert_close(model.local.weight.grad, local.weight.grad)


@on_ranks()
def test_one_ignored_parameter(rank, world_size):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    gathered = [torch.empty(2, 4) for _ in range(world_size)]
    dist.all_gather(gathered, model[1].weight.detach().clone())
    assert not torch.equal(*gathered)


# -- lazy parameters -----------------------------------------------------------------------------------------


def _lazy(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))
    with pytest.raises(RuntimeError, match=r"(?i)uninitialized|uninitialised|lazy") as caught:
        DDP(model)
    assert "dry run" in str(caught.value).lower() or "forward" in str(caught.value).lower(), "says what to do"
    model(torch.zeros(1, 4))
    ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_lazy_parameters_are_refused_with_the_remedy(ranks, world_size):
    ranks(_lazy, world_size=world_size, allow_warnings=(("Lazy modules", UserWarning),))


class _InParts(nn.Parameter):
    """Has the protocol of tensors made of other tensors."""

    def __tensor_flatten__(self):
        return [], None


@ours_only
@on_ranks()
def test_parameters_made_of_other_tensors_are_refused(rank, world_size):
    """Refused on every rank before anything is sent; ignored, the rest of the module is wrapped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (world_size,))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), mesh))
    with pytest.raises(StateError, match=r"1\.weight.*DTensor"):
        DDP(model)
    other = nn.Linear(4, 2)
    other.weight = _InParts(torch.ones(2, 4))
    with pytest.raises(StateError, match=r"'weight' is a _InParts, which holds its values in other tensors"):
        DDP(other)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    ddp = DDP(model)
    ddp.module[0](batch(rank).float()).sum().backward()
    assert_in_sync(model[0])


# -- several wrappers ----------------------------------------------------------------------------------------


@on_ranks()
def test_two_wrappers_in_one_process(rank, world_size):
    """Two wrappers in one process, trained in turn and together, do not disturb each other."""
    torch.manual_seed(rank)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    a, b = DDP(first), DDP(second)
    for i in range(3):
        x = batch(rank, i).float()
        b(a(x)).square().sum().backward()
        assert_in_sync(first)
        assert_in_sync(second)
        a.zero_grad()
        a(x).sum().backward()
        b(x).sum().backward()
        assert_in_sync(first)
        assert_in_sync(second)
        a.zero_grad()
        b.zero_grad()


def _different_pasts(rank, world_size):
    """Ranks that have wrapped different numbers of modules before, in groups of the same name, since gone."""
    for _ in range(2 if rank < 2 else 0):
        DDP(nn.Linear(2, 2))
    return dist.get_rank()


def _wrap_one(rank, world_size):
    ddp = DDP(nn.Linear(4, 2))
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(ddp.module)


def test_ranks_with_different_pasts():
    # A rank that is replaced (elastic training) meets others that have been training for long.
    with RankPool() as pool:
        pool.run(_different_pasts, world_size=2)
        pool.run(_wrap_one, world_size=3, timeout=30)


@on_ranks()
def test_a_wrapper_inside_a_wrapper(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0] = DDP(model[0])
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.module.weight", "0.module.bias"])
    ddp = DDP(model)
    for i in range(2):
        ddp(batch(rank, i).float()).square().sum().backward()
        assert_in_sync(model)
        ddp.zero_grad()


@on_ranks()
def test_the_same_module_wrapped_again(rank, world_size):
    """A module wrapped again after its first wrapper is gone works as if new."""
    model = nn.Linear(4, 2)
    for i in range(3):
        ddp = DDP(model)
        ddp(batch(rank, i).float()).sum().backward()
        want = torch.cat([batch(r, i).float() for r in range(world_size)]).sum(0) / world_size
        torch.testing.assert_close(model.weight.grad, want.expand(2, 4))
        model.zero_grad()
        del ddp


def _late_over_a_file(rank, world_size, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    model = nn.Linear(4, 2)
    store, look = dist.distributed_c10d._get_default_store(), PeerWait._look

    def look_and_tell(wait):
        look(wait)
        store.set("rank 0 waits", "1")

    if rank == 0 and STOCK:
        # Torch's class waits in C++, where nothing can be told.
        store.set("rank 0 waits", "1")
    if rank == 1:
        # A rank that loads its data is so late that the other has begun to look for it.
        store.wait(["rank 0 waits"])
    with mock.patch.object(PeerWait, "_look", look_and_tell):
        ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(model)


def test_a_group_over_a_file_with_a_late_rank(ranks, tmp_path):
    ranks(_late_over_a_file, str(tmp_path / "store"), backend=None)
