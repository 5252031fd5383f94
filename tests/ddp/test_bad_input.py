"""Bad input: a clear message before any collective starts, and the process stays usable."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paceline import MixedPrecision
from paceline.errors import BadArgumentError, BadTypeError, MisuseError, PacelineError
from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_in_sync, batch, ours_only

pytestmark = ours_only


def _good_step(rank):
    """The group is in step and a wrapper works: nothing was started by what was refused."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 2)
    ddp = DDP(model)
    ddp(batch(rank).float()).square().sum().backward()
    assert_in_sync(model)


def _named(model: nn.Module) -> list:
    return list(model.named_parameters())


def _wrap(module=None, **options):
    return DDP(nn.Linear(2, 2) if module is None else module, **options)


def _delayed(params, **options):
    model = nn.Linear(2, 2)
    return DDP(model, delay_all_reduce_named_params=params(model), **options)


def _old_flag_is_text():
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        _wrap(broadcast_buffers="no")


# What is done, and what the error says.
WRONG_TYPES = {
    "text for a module": (lambda: DDP("a module"), "str"),
    "a class for a module": (lambda: DDP(nn.Linear), "Linear"),
    "a list for a module": (lambda: DDP([nn.Linear(2, 2)]), "Linear"),
    "text for a flag": (
        lambda: _wrap(find_unused_parameters="no"),
        "find_unused_parameters must be True or False, not 'no'",
    ),
    "several flags for one": (
        lambda: _wrap(static_graph=torch.tensor([True, False])),
        "static_graph must be True or False, not tensor",
    ),
    "text for the old flag": (_old_flag_is_text, "broadcast_buffers must"),
    "a hook without a state": (lambda: _wrap().register_comm_hook(None, lambda bucket: None), "(state, bucket)"),
    "text for a hook": (lambda: _wrap().register_comm_hook(None, "hook"), "must be callable"),
    "text for names": (
        lambda: DDP._set_params_and_buffers_to_ignore_for_model(nn.Linear(2, 2), "weight"),
        "['weight']",
    ),
    "the name of a group": (lambda: _wrap(process_group="gloo"), "must be a ProcessGroup, not str"),
    "text for a capacity": (lambda: _wrap(bucket_cap_mb="25"), "bucket_cap_mb"),
    "a number for capacities": (lambda: _wrap(bucket_cap_mb_list=25), "bucket_cap_mb_list"),
    "a tuple for a mesh": (lambda: _wrap(device_mesh=(2,)), "device_mesh must be a DeviceMesh, not a tuple"),
    "a dtype for a precision": (lambda: _wrap(mixed_precision=torch.bfloat16), "mixed_precision"),
    "a number for device ids": (lambda: _wrap(device_ids=0), "device_ids must"),
    "delayed parameters without names": (
        lambda: _delayed(nn.Module.parameters, param_to_hook_all_reduce=torch.ones(1)),
        "delay_all_reduce_named_params must",
    ),
    "a buffer hook that is text": (lambda: _wrap()._register_buffer_comm_hook(None, "hook"), "must be callable"),
}
WRONG_VALUES = {
    "a precision of integers": (lambda: _wrap(mixed_precision=MixedPrecision(param_dtype=torch.int32)), "param_dtype"),
    "a negative capacity": (lambda: _wrap(bucket_cap_mb=-1), "-1"),
    "a negative capacity in a list": (lambda: _wrap(bucket_cap_mb_list=[1, -25]), "-25"),
    "mixed devices": (lambda: _wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))), "meta"),
    "device ids for the CPU": (lambda: _wrap(device_ids=[0]), "device_ids"),
    "an output device for the CPU": (lambda: _wrap(output_device=1), "output_device"),
    "no trigger for delayed parameters": (lambda: _delayed(_named), "param_to_hook_all_reduce"),
}
NOTHING_TO_TRAIN = {
    "an empty module": (lambda: DDP(nn.Identity()), "parameter"),
    "frozen parameters": (lambda: DDP(nn.Linear(2, 2).requires_grad_(False)), "parameter"),
    "buffers only": (lambda: DDP(nn.BatchNorm1d(2, affine=False)), "parameter"),
}


def _refused(case, *kinds):
    make, says = case
    with pytest.raises(PacelineError, match=re.escape(says)) as caught:
        make()
    for kind in kinds:
        assert isinstance(caught.value, kind), type(caught.value).__mro__


@pytest.mark.parametrize("case", WRONG_TYPES)
@on_ranks()
def test_wrong_type(rank, world_size, case):
    _refused(WRONG_TYPES[case], BadTypeError, TypeError)
    _good_step(rank)


@pytest.mark.parametrize("case", WRONG_VALUES)
@on_ranks()
def test_wrong_value(rank, world_size, case):
    _refused(WRONG_VALUES[case], BadArgumentError, ValueError)
    _good_step(rank)


@pytest.mark.parametrize("case", NOTHING_TO_TRAIN)
@on_ranks()
def test_nothing_to_train(rank, world_size, case):
    # RuntimeError is what torch's class raises here.
    _refused(NOTHING_TO_TRAIN[case], MisuseError, RuntimeError)
    _good_step(rank)


# -- process groups ------------------------------------------------------------------------------------------


@on_ranks()
def test_two_process_groups(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    both = "both process_group and device_mesh"
    _refused((lambda: _wrap(process_group=dist.group.WORLD, device_mesh=mesh), both), MisuseError, RuntimeError)
    _good_step(rank)


@on_ranks()
def test_mesh_of_two_dimensions(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size, 1))
    _refused((lambda: _wrap(device_mesh=mesh), "1D device mesh"), MisuseError, RuntimeError)
    _refused((lambda: _wrap(device_mesh=mesh), "2 dimensions. Slice it"), MisuseError, RuntimeError)
    _good_step(rank)


@on_ranks()
def test_a_group_this_rank_is_not_in(rank, world_size):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(MisuseError, match="Rank 1 is not in the process group"):
            DDP(nn.Linear(2, 2), process_group=group)
    else:
        DDP(nn.Linear(2, 2), process_group=group)
    _good_step(rank)


@on_ranks(backend=None)
def test_no_process_group_at_all(rank, world_size):
    # ValueError is what torch raises without a default group.
    _refused((_wrap, "not been initialised. Call paceline.init()"), ValueError)


@on_ranks()
def test_a_group_destroyed_before_wrapping(rank, world_size):
    group = dist.new_group([0, 1])
    # A rank may still be connecting when the other is back, and gloo would tell it that its peer is gone.
    dist.barrier(group)
    dist.destroy_process_group(group)
    _refused((lambda: _wrap(process_group=group), "has been destroyed"), MisuseError, RuntimeError)
    _good_step(rank)


@pytest.mark.parametrize("when", ["forward", "backward"])
@on_ranks()
def test_a_group_destroyed_after_wrapping(rank, world_size, when):
    group = dist.new_group([0, 1])
    ddp = DDP(nn.Linear(4, 2), process_group=group)
    ddp(batch(rank).float()).sum().backward()
    loss = ddp(batch(rank).float()).sum()
    # Only a rank that has left the group's last collective can do without the other's connection.
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(MisuseError, match="group"):
        ddp(batch(rank).float()) if when == "forward" else loss.backward()
    _good_step(rank)


@on_ranks()
def test_an_error_of_the_user_s_forward_comes_through(rank, world_size):
    """What the user's own forward raises on every rank alike comes through as it is."""
    ddp = DDP(nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ddp(torch.zeros(3, 5))
