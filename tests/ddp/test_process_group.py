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
    mlp,
    ours_only,
    square,
)


def _seeded():
    torch.manual_seed(0)
    return mlp()


def _steps(ddp, ranks, rank, steps=3):
    """Steps whose gradients are the means over ``ranks``."""
    reference = _seeded()
    for i in range(steps):
        ddp.zero_grad()
        square(ddp, rank, i)
        expected = mean_over_ranks(reference, lambda m, n, i=i: square(m, ranks[n], i), len(ranks))
        assert_grads(ddp, expected, f"step {i} of {ranks}")
    ddp.zero_grad()


# -- _update_process_group -----------------------------------------------------------------------------------


@on_ranks(world_size=3)
def test_update_process_group(rank, world_size):
    """Three ranks, then two, then three again; each time the mean is over those that are in."""
    torch.set_default_dtype(torch.float64)
    ddp = DDP(_seeded())
    whole, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    _steps(ddp, [0, 1, 2], rank)
    if rank < 2:
        ddp._update_process_group(pair)
        assert ddp.process_group is pair
        _steps(ddp, [0, 1], rank)
    ddp._update_process_group(whole)
    _steps(ddp, [0, 1, 2], rank)


@on_ranks()
def test_update_to_a_group_of_one(rank, world_size):
    """A group of one: gradients are local."""
    torch.set_default_dtype(torch.float64)
    ddp = DDP(_seeded())
    _steps(ddp, range(world_size), rank, steps=1)
    ddp._update_process_group([dist.new_group([r]) for r in range(world_size)][rank])
    _steps(ddp, [rank], rank, steps=1)


@ours_only
@on_ranks()
def test_no_new_group_for_a_hook_of_all_ranks(rank, world_size):
    """The hook's state means all ranks of the job, which the new group is not. It is refused, and nothing changes."""
    ddp = DDP(mlp().double())
    ddp.register_comm_hook(hooks.PowerSGDState(), hooks.powersgd)
    before = ddp.process_group
    with pytest.raises(StateError, match="all 2 ranks of the job, but the wrapper averages over a group of 1"):
        ddp._update_process_group([dist.new_group([r]) for r in range(world_size)][rank])
    assert ddp.process_group is before
    square(ddp, rank)
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
    members = [[0, 1], [2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    _steps(DDP(_seeded(), process_group=groups[rank // 2]), members[rank // 2], rank)


@ours_only
@on_ranks(world_size=3)
def test_a_new_group_before_the_first_exchange_without_init_sync(rank, world_size):
    """Two ranks have trained, and compared replicas, in a group of their own. Now the third one joins them."""
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
    square(ddp, rank)
    ddp.zero_grad()
    ddp._remove_autograd_hooks()
    square(ddp.module, rank)
    square(local, rank)
    assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


# -- _check_reducer_finalized --------------------------------------------------------------------------------


@on_ranks()
def test_reducer_is_finalized_after_backward_and_not_during_it(rank, world_size):
    """The reducer is asked after each backward, and from inside one, before the last gradient."""
    ddp = DDP(_seeded())
    ddp(batch(rank).float()).sum().backward()
    ddp._check_reducer_finalized()
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


class _Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


@ours_only
@pytest.mark.parametrize(
    ("make", "option"),
    [(mlp, "gradient_as_bucket_view"), (mlp, "find_unused_parameters"), (_Spare, "find_unused_parameters")],
)
@on_ranks(allow_warnings=(("find_unused_parameters=True was specified", UserWarning),))
def test_logging_data_is_torch_s(rank, world_size, make, option):
    data = []
    for wrapper in (StockDDP, DDP):
        ddp = wrapper(make(), **{option: True})
        ddp._set_ddp_runtime_logging_sample_rate(1)
        for i in range(4):
            ddp(batch(rank, i).float()).sum().backward()
        data.append(dict(ddp._get_ddp_logging_data()))
    stock, ours = data
    assert ours.keys() == stock.keys() | {"static_graph"}
    # We learn an order only if the buckets are to be rebuilt from it.
    measured = {field for field in stock if "time" in field or field == "prev_iteration_grad_ready_order_indices"}
    for field in stock.keys() - measured:
        assert ours[field] == stock[field], field
        assert type(ours[field]) is type(stock[field]), field


@on_ranks()
def test_sample_rate(rank, world_size):
    ddp = DDP(_seeded())
    with pytest.raises(ValueError, match=r"sample rate (must be at least|should be equal or greater than) 1"):
        ddp._set_ddp_runtime_logging_sample_rate(0)
    ddp._set_ddp_runtime_logging_sample_rate(5)


# -- the rest of the underscored names -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "args"), [("_set_static_graph", ()), ("_set_ddp_sink_clone", (True,)), ("_set_ddp_sink_clone", (False,))]
)
@on_ranks()
def test_what_is_set_after_wrapping(rank, world_size, method, args):
    is_static = method == "_set_static_graph"

    def wrap(model):
        ddp = DDP(model, find_unused_parameters=not is_static)
        getattr(ddp, method)(*args)
        assert ddp.static_graph == is_static
        return ddp

    compare_with_reference(rank, world_size, _Spare, square, wrap=wrap)


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
    # With torch's class, whether it is set during forward depends on how the compiler is configured.
    assert model.active == [ddp] or (STOCK and model.active == [None])


ATTRIBUTES = [
    *("device", "device_type", "device_ids", "output_device", "dim", "process_group"),
    *("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers", "bucket_bytes_cap"),
    *("require_backward_grad_sync", "require_forward_param_sync", "parameters_to_ignore", "mixed_precision"),
]


@on_ranks()
def test_attributes(rank, world_size):
    model = mlp()
    ddp, stock = DDP(model), StockDDP(mlp())
    assert ddp.module is model
    assert DDP(nn.BatchNorm1d(4)).will_sync_module_buffers() is True
    assert ddp.will_sync_module_buffers() is False
    for name in ATTRIBUTES:
        assert getattr(ddp, name) == getattr(stock, name), name
    assert ddp._distributed_rank == rank
    assert ddp._get_data_parallel_params(model)


# What torch's class has got since 2.13, and ours has not (docs/versions.md).
NEWER = {
    "_check_manual_backward_finalization_supported",
    "finalize_backward",
    "require_manual_backward_finalization",
    "should_finalize_after_backward",
}


@ours_only
def test_every_name_of_torch_s_class_exists():
    missing = {name for name in dir(StockDDP) if not hasattr(DDP, name)}
    assert missing <= NEWER


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
    """Memory that still holds other numbers, as new memory may."""
    return torch.full((numel,), 7.0, dtype=dtype, device=device)


@ours_only
@pytest.mark.parametrize("steps_before", [0, 1, 2])
@on_ranks(group_timeout_s=60)
def test_a_new_group_after_a_backward_that_failed(rank, world_size, steps_before):
    torch.set_default_dtype(torch.float64)
    broken, healthy = dist.new_group([0, 1]), dist.new_group([0, 1])
    ddp = DDP(_seeded(), process_group=broken)
    for i in range(steps_before):
        square(ddp, rank, i)
        ddp.zero_grad()
    if rank == 1:
        with pytest.raises((TypeError, AttributeError)):
            ddp("no tensor")
    else:
        with pytest.raises(PeerFailedError, match="rank 1 raised in forward"):
            square(ddp, rank)
    with mock.patch.object(layout, "empty_flat", _poisoned):
        ddp._update_process_group(healthy)
        _steps(ddp, [0, 1], rank)
