"""The underscored names around the group and the reducer that code written for torch's class calls."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from paceline import hooks
from paceline.errors import PeerFailedError, StateError
from paceline.gradients import layout
from tests.on_ranks import on_ranks
from tests.reference import (
    DDP,
    STOCK,
    assert_grads,
    assert_in_sync,
    batch,
    compare_with_reference,
    mean_over_ranks,
    ours_only,
)


def _mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _square(model, rank, i=0):
    model(batch(rank, i)).square().mean().backward()


def _seeded():
    torch.manual_seed(0)
    return _mlp()


# -- _update_process_group -----------------------------------------------------------------------------------


@on_ranks(world_size=3)
def test_update_process_group(rank, world_size):
    """Three ranks, then two, then three again; each time the mean is over those that are in."""
    torch.set_default_dtype(torch.float64)
    ddp, reference = DDP(_seeded()), _seeded()
    whole, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    for i in range(2):
        _square(ddp, rank, i)
        assert_grads(ddp, mean_over_ranks(reference, lambda m, r, i=i: _square(m, r, i), 3), "three")
        ddp.zero_grad()
    if rank < 2:
        ddp._update_process_group(pair)
        assert ddp.process_group is pair
        for i in range(3):
            _square(ddp, rank, i)
            assert_grads(ddp, mean_over_ranks(reference, lambda m, r, i=i: _square(m, r, i), 2), "two")
            ddp.zero_grad()
    ddp._update_process_group(whole)
    for i in range(3):
        _square(ddp, rank, i)
        assert_grads(ddp, mean_over_ranks(reference, lambda m, r, i=i: _square(m, r, i), 3), "three again")
        ddp.zero_grad()


@on_ranks()
def test_update_to_a_group_of_one(rank, world_size):
    """A group of one: gradients are local."""
    torch.set_default_dtype(torch.float64)
    ddp, local = DDP(_seeded()), _seeded()
    _square(ddp, rank)
    ddp.zero_grad()
    ddp._update_process_group([dist.new_group([r]) for r in range(world_size)][rank])
    _square(ddp, rank)
    _square(local, rank)
    assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


@ours_only
@on_ranks()
def test_no_new_group_for_a_hook_of_all_ranks(rank, world_size):
    """Its state says all ranks of the job, which the new group is not: refused, and nothing has changed."""
    ddp = DDP(_mlp().double())
    ddp.register_comm_hook(hooks.PowerSGDState(), hooks.powersgd)
    before = ddp.process_group
    with pytest.raises(StateError, match="all 2 ranks of the job, but the wrapper averages over a group of 1"):
        ddp._update_process_group([dist.new_group([r]) for r in range(world_size)][rank])
    assert ddp.process_group is before
    _square(ddp, rank)
    assert_in_sync(ddp)


@on_ranks(world_size=3)
def test_buffers_come_from_the_new_group(rank, world_size):
    torch.manual_seed(0)
    model = nn.BatchNorm1d(4)
    ddp = DDP(model)
    pair = dist.new_group([1, 2])
    ddp(batch(rank).float()).sum().backward()
    if rank == 0:
        return
    ddp._update_process_group(pair)
    model.running_mean.fill_(float(rank))
    ddp(batch(rank).float()).sum().backward()
    with torch.no_grad():
        expected = torch.full((4,), 1.0) * 0.9 + 0.1 * batch(rank).float().mean(0)
    torch.testing.assert_close(model.running_mean, expected)


@on_ranks(world_size=4)
def test_disjoint_subgroups(rank, world_size):
    """Wrapped in a subgroup from the start; two disjoint ones work at once."""
    torch.set_default_dtype(torch.float64)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    ddp, reference = DDP(_seeded(), process_group=groups[mine]), _seeded()
    for i in range(3):
        _square(ddp, rank, i)
        expected = mean_over_ranks(reference, lambda m, r, i=i: _square(m, 2 * mine + r, i), 2)
        assert_grads(ddp, expected)
        ddp.zero_grad()


@ours_only
@on_ranks(world_size=3)
def test_a_new_group_before_the_first_exchange_without_init_sync(rank, world_size):
    """Two ranks have trained in a group of their own and compared there, the third has not: now they meet."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    whole = dist.new_group([0, 1, 2])
    ddp = DDP(nn.Linear(4, 2), process_group=groups[rank // 2], init_sync=False)
    if rank < 2:
        ddp(torch.ones(1, 4)).sum().backward()
        ddp.zero_grad()
    ddp._update_process_group(whole)
    ddp(torch.full((1, 4), float(rank))).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[1.0] * 4] * 2


# -- _remove_autograd_hooks ----------------------------------------------------------------------------------


@on_ranks()
def test_remove_autograd_hooks(rank, world_size):
    torch.set_default_dtype(torch.float64)
    ddp, local = DDP(_seeded()), _seeded()
    _square(ddp, rank)
    ddp.zero_grad()
    ddp._remove_autograd_hooks()
    _square(ddp.module, rank)
    _square(local, rank)
    assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


# -- _check_reducer_finalized --------------------------------------------------------------------------------


@on_ranks()
def test_reducer_is_finalized_after_backward(rank, world_size):
    ddp = DDP(_seeded())
    for i in range(3):
        ddp(batch(rank, i).float()).sum().backward()
        ddp._check_reducer_finalized()


@on_ranks()
def test_reducer_is_not_finalized_during_backward(rank, world_size):
    """Asked from inside backward, before the last gradient."""
    ddp = DDP(_seeded())
    ddp(batch(rank).float()).sum().backward()
    seen = []

    def ask(grad):
        try:
            ddp._check_reducer_finalized()
        except RuntimeError as error:
            seen.append(str(error))

    ddp.module[0].weight.register_hook(ask)
    ddp(batch(rank).float()).sum().backward()
    ddp._check_reducer_finalized()
    assert len(seen) == 1


# -- logging data --------------------------------------------------------------------------------------------


def _logging_data(rank, world_size):
    data = {}
    for name, wrapper in (("stock", StockDDP), ("ours", DDP)):
        torch.manual_seed(0)
        ddp = wrapper(_mlp(), gradient_as_bucket_view=True)
        ddp._set_ddp_runtime_logging_sample_rate(1)
        for i in range(4):
            ddp(batch(rank, i).float()).sum().backward()
        data[name] = dict(ddp._get_ddp_logging_data())
    return data["stock"], data["ours"]


SAME_VALUES = [
    "world_size",
    "rank",
    "module_name",
    "device_ids",
    "output_device",
    "broadcast_buffers",
    "bucket_cap_bytes",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "num_parameter_tensors",
    "total_parameter_size_bytes",
    "dtypes",
    "backend_name",
    "iteration",
    "unused_parameter_size",
    "has_rebuilt_buckets",
    "rebuilt_bucket_sizes",
    "comm_hook",
]


def test_logging_data_has_torch_s_fields(ranks):
    for stock, ours in ranks(_logging_data):
        assert set(ours) >= set(stock), sorted(set(stock) - set(ours))
        for field in SAME_VALUES:
            if field in stock:
                assert ours[field] == stock[field], field
                assert type(ours[field]) is type(stock[field]), field


def _logging_unused(rank, world_size):
    data = {}
    for name, wrapper in (("stock", StockDDP), ("ours", DDP)):
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})
        model.forward = model["used"].forward
        ddp = wrapper(model, find_unused_parameters=True)
        ddp._set_ddp_runtime_logging_sample_rate(1)
        for i in range(3):
            ddp(batch(rank, i).float()).sum().backward()
        fields = dict(ddp._get_ddp_logging_data())
        data[name] = {k: fields.get(k) for k in ("unused_parameter_size", "iteration", "num_parameter_tensors")}
    return data


def test_logging_data_with_unused_parameters(ranks):
    for data in ranks(_logging_unused):
        assert data["ours"] == data["stock"]


def _can_set_static_graph(rank, world_size):
    values = []
    for wrapper in (StockDDP, DDP):
        ddp = wrapper(_seeded(), find_unused_parameters=True)
        for i in range(3):
            ddp(batch(rank, i).float()).sum().backward()
        values.append(ddp._get_ddp_logging_data().get("can_set_static_graph"))
    return values


def test_can_set_static_graph(ranks):
    allowed = (("find_unused_parameters=True was specified", UserWarning),)
    for stock, ours in ranks(_can_set_static_graph, allow_warnings=allowed):
        assert ours == stock


@on_ranks()
def test_sample_rate(rank, world_size):
    ddp = DDP(_seeded())
    with pytest.raises(ValueError, match="1"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    ddp._set_ddp_runtime_logging_sample_rate(5)


# -- the rest of the underscored names -----------------------------------------------------------------------


class _Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


@on_ranks()
def test_set_static_graph_after_wrapping(rank, world_size):
    def wrap(model):
        ddp = DDP(model)
        ddp._set_static_graph()
        assert ddp.static_graph
        return ddp

    compare_with_reference(rank, world_size, _Spare, _square, wrap=wrap)


@pytest.mark.parametrize("value", [True, False])
@on_ranks()
def test_set_ddp_sink_clone(rank, world_size, value):
    def wrap(model):
        ddp = DDP(model, find_unused_parameters=True)
        ddp._set_ddp_sink_clone(value)
        return ddp

    compare_with_reference(rank, world_size, _Spare, _square, wrap=wrap)


class _Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.active = []

    def forward(self, x):
        self.active.append(DDP._get_active_ddp_module())
        return self.linear(x)


@on_ranks()
def test_inside_ddp_forward(rank, world_size):
    model = _Asks()
    ddp = DDP(model)
    assert DDP._get_active_ddp_module() is None
    ddp(batch(rank).float()).sum().backward()
    assert DDP._get_active_ddp_module() is None
    with ddp._inside_ddp_forward():
        assert DDP._get_active_ddp_module() is ddp
    assert DDP._get_active_ddp_module() is None
    # Whether it is set during forward depends on the compiler being configured for it; never another's.
    assert all(active in (None, ddp) for active in model.active)


@on_ranks()
def test_attributes(rank, world_size):
    model = _mlp()
    ddp = DDP(model)
    assert ddp.module is model
    assert ddp.device_type == "cpu"
    assert ddp.device_ids is None
    assert ddp.output_device is None
    assert ddp.dim == 0
    assert ddp.process_group is dist.group.WORLD
    assert ddp.find_unused_parameters is False
    assert ddp.require_backward_grad_sync is True
    assert ddp.require_forward_param_sync is True
    assert ddp.gradient_as_bucket_view is False
    assert ddp.static_graph is False
    assert ddp.broadcast_buffers is True
    assert ddp.bucket_bytes_cap == 25 * 1024 * 1024
    assert ddp.parameters_to_ignore == set()
    assert ddp.will_sync_module_buffers() is False
    assert DDP(nn.BatchNorm1d(4)).will_sync_module_buffers() is True
    assert ddp._distributed_rank == rank
    assert ddp._get_data_parallel_params(model)


@ours_only
def test_every_name_of_torch_s_class_exists():
    missing = [name for name in dir(StockDDP) if not hasattr(DDP, name)]
    assert not missing


@pytest.mark.skipif(STOCK, reason="about our class")
def test_names_are_not_torch_s_own():
    """An independent implementation: nothing is inherited from the class it replaces."""
    # isinstance() says otherwise on purpose (compat.register_as_torch_s_class); nothing is inherited.
    assert StockDDP not in DDP.__mro__


@on_ranks()
def test_a_new_group_at_every_step(rank, world_size):
    model = _seeded()
    ddp = DDP(model)
    for i in range(4):
        ddp._update_process_group(dist.new_group([0, 1]))
        ddp(batch(rank, i).float()).sum().backward()
        assert_in_sync(model)
        ddp.zero_grad()


def _poisoned(numel, dtype, device):
    """Memory with something in it, as memory has."""
    return torch.full((numel,), 7.0, dtype=dtype, device=device)


@ours_only
@pytest.mark.parametrize("steps_before", [0, 1, 2])
@on_ranks(group_timeout_s=60)
def test_a_new_group_after_a_backward_that_failed(rank, world_size, steps_before):
    torch.set_default_dtype(torch.float64)
    broken, healthy = dist.new_group([0, 1]), dist.new_group([0, 1])
    ddp, reference = DDP(_seeded(), process_group=broken), _seeded()
    for i in range(steps_before):
        _square(ddp, rank, i)
        ddp.zero_grad()
    if rank == 1:
        with pytest.raises((TypeError, AttributeError)):
            ddp("no tensor")
    else:
        with pytest.raises(PeerFailedError, match="rank 1 raised in forward"):
            _square(ddp, rank)
    with mock.patch.object(layout, "empty_flat", _poisoned):
        ddp._update_process_group(healthy)
        ddp.zero_grad()
        for i in range(3):
            _square(ddp, rank, i)
            assert_grads(ddp, mean_over_ranks(reference, lambda m, r, i=i: _square(m, r, i), 2), f"step {i}")
            ddp.zero_grad()
