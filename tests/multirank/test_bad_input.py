"""Bad input: a clear message before any collective starts, and the process stays usable."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from paceline import MixedPrecision
from paceline.errors import BadArgumentError, BadTypeError, MisuseError, PacelineError, StateError
from paceline.testing import InjectedFaultError, fail_at

from ._ddp import DDP, assert_in_sync, batch, ours_only

pytestmark = ours_only


def _good_step(rank, group=None):
    """The group is in step and a wrapper works: nothing was started by what was refused."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 2)
    ddp = DDP(model, process_group=group)
    ddp(batch(rank).float()).square().sum().backward()
    # A failed step may leave collectives of the old group behind: ask in the one that is tested.
    assert_in_sync(model, group=group)


def _refused(rank, world_size, make, kinds):
    with pytest.raises(PacelineError) as caught:
        make(rank)
    error = caught.value
    for kind in kinds:
        assert isinstance(error, kind), f"{type(error).__mro__}: {error}"
    _good_step(rank)
    return str(error)


# -- wrong types ---------------------------------------------------------------------------------------------


def not_a_module(rank):
    DDP("a module")


def a_class(rank):
    DDP(nn.Linear)


def a_list(rank):
    DDP([nn.Linear(2, 2)])


def group_is_a_name(rank):
    DDP(nn.Linear(2, 2), process_group="gloo")


def cap_is_text(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb="25")


def cap_list_is_a_number(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb_list=25)


def cap_list_of_text(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb_list=["25"])


def mesh_is_a_tuple(rank):
    DDP(nn.Linear(2, 2), device_mesh=(2,))


def precision_is_a_dtype(rank):
    DDP(nn.Linear(2, 2), mixed_precision=torch.bfloat16)


def device_ids_is_a_number(rank):
    DDP(nn.Linear(2, 2), device_ids=0)


def delayed_without_names(rank):
    model = nn.Linear(2, 2)
    DDP(model, delay_all_reduce_named_params=model.parameters(), param_to_hook_all_reduce=model.weight)


def flag_is_text(rank):
    DDP(nn.Linear(2, 2), find_unused_parameters="no")


def flag_of_many(rank):
    DDP(nn.Linear(2, 2), static_graph=torch.tensor([True, False]))


def buffer_flag_is_text(rank):
    with pytest.warns(FutureWarning, match="broadcast_buffers"):
        DDP(nn.Linear(2, 2), broadcast_buffers="no")


def hook_without_state(rank):
    DDP(nn.Linear(2, 2)).register_comm_hook(None, lambda bucket: None)


def ignored_is_text(rank):
    DDP._set_params_and_buffers_to_ignore_for_model(nn.Linear(2, 2), "weight")


WRONG_TYPES = [
    (flag_is_text, "find_unused_parameters must be True or False, not 'no'"),
    (flag_of_many, "static_graph must be True or False, not tensor"),
    (buffer_flag_is_text, "broadcast_buffers must"),
    (hook_without_state, "(state, bucket)"),
    (ignored_is_text, "['weight']"),
    (not_a_module, "str"),
    (a_class, "Linear"),
    (a_list, "Linear"),
    (group_is_a_name, "process_group"),
    (cap_is_text, "bucket_cap_mb"),
    (cap_list_is_a_number, "bucket_cap_mb_list"),
    (cap_list_of_text, "bucket_cap_mb_list"),
    (mesh_is_a_tuple, "device_mesh"),
    (precision_is_a_dtype, "mixed_precision"),
    (device_ids_is_a_number, "device_ids must"),
    (delayed_without_names, "delay_all_reduce_named_params must"),
]


@pytest.mark.parametrize(("make", "says"), WRONG_TYPES, ids=lambda value: getattr(value, "__name__", ""))
def test_wrong_type(ranks, make, says):
    for text in ranks(_refused, make, (BadTypeError, TypeError)):
        assert says in text


# -- wrong values --------------------------------------------------------------------------------------------


def negative_cap(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb=-1)


def zero_cap(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb=0)


def nan_cap(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb=float("nan"))


def negative_cap_in_list(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb_list=[1, -25])


def zero_cap_in_list(rank):
    DDP(nn.Linear(2, 2), bucket_cap_mb_list=[0])


def mixed_devices(rank):
    DDP(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, device="meta")}))


def device_ids_for_cpu(rank):
    DDP(nn.Linear(2, 2), device_ids=[0])


def output_device_for_cpu(rank):
    DDP(nn.Linear(2, 2), output_device=1)


def delayed_without_hook_parameter(rank):
    model = nn.Linear(2, 2)
    DDP(model, delay_all_reduce_named_params=[("weight", model.weight)])


def precision_of_integers(rank):
    DDP(nn.Linear(2, 2), mixed_precision=MixedPrecision(param_dtype=torch.int32))


WRONG_VALUES = [
    (precision_of_integers, "param_dtype"),
    (negative_cap, "-1"),
    (zero_cap, "bucket_cap_mb"),
    (nan_cap, "nan"),
    (negative_cap_in_list, "-25"),
    (zero_cap_in_list, "bucket_cap_mb_list"),
    (mixed_devices, "meta"),
    (device_ids_for_cpu, "device_ids"),
    (output_device_for_cpu, "output_device"),
    (delayed_without_hook_parameter, "param_to_hook_all_reduce"),
]


@pytest.mark.parametrize(("make", "says"), WRONG_VALUES, ids=lambda value: getattr(value, "__name__", ""))
def test_wrong_value(ranks, make, says):
    for text in ranks(_refused, make, (BadArgumentError, ValueError)):
        assert says in text


# -- modules that cannot be trained --------------------------------------------------------------------------


def empty_module(rank):
    DDP(nn.Identity())


def nothing_trainable(rank):
    DDP(nn.Linear(2, 2).requires_grad_(False))


def only_buffers(rank):
    DDP(nn.BatchNorm1d(2, affine=False))


@pytest.mark.parametrize("make", [empty_module, nothing_trainable, only_buffers], ids=lambda make: make.__name__)
def test_nothing_to_train(ranks, make):
    # RuntimeError is what torch's class raises here.
    for text in ranks(_refused, make, (MisuseError, RuntimeError)):
        assert "parameter" in text


# -- process groups ------------------------------------------------------------------------------------------


def _two_groups(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(RuntimeError, match="device_mesh") as caught:
        DDP(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh)
    assert isinstance(caught.value, MisuseError)
    assert "process_group" in str(caught.value)
    _good_step(rank)


def test_two_process_groups(ranks):
    ranks(_two_groups)


def _mesh_of_two_dimensions(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size, 1))
    with pytest.raises(RuntimeError, match=r"1D|dimension") as caught:
        DDP(nn.Linear(2, 2), device_mesh=mesh)
    assert isinstance(caught.value, MisuseError)
    _good_step(rank)


def test_mesh_of_two_dimensions(ranks):
    ranks(_mesh_of_two_dimensions)


def _foreign_group(rank, world_size):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(MisuseError, match=r"(?i)rank 1"):
            DDP(nn.Linear(2, 2), process_group=group)
    else:
        DDP(nn.Linear(2, 2), process_group=group)
    _good_step(rank)


def test_a_group_this_rank_is_not_in(ranks):
    ranks(_foreign_group)


def _no_group(rank, world_size):
    with pytest.raises(PacelineError, match="init") as caught:
        DDP(nn.Linear(2, 2))
    # ValueError is what torch raises without a default group.
    assert isinstance(caught.value, (ValueError, RuntimeError))
    return isinstance(caught.value, ValueError)


def test_no_process_group_at_all(ranks):
    assert ranks(_no_group, backend=None) == [True, True]


def _destroyed_before(rank, world_size):
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    with pytest.raises(MisuseError):
        DDP(nn.Linear(2, 2), process_group=group)
    _good_step(rank)


def test_a_group_destroyed_before_wrapping(ranks):
    ranks(_destroyed_before)


def _destroyed_after(rank, world_size, when):
    group = dist.new_group([0, 1])
    ddp = DDP(nn.Linear(4, 2), process_group=group)
    ddp(batch(rank).float()).sum().backward()
    if when == "forward":
        dist.destroy_process_group(group)
        with pytest.raises(MisuseError, match="group"):
            ddp(batch(rank).float())
    else:
        loss = ddp(batch(rank).float()).sum()
        dist.destroy_process_group(group)
        with pytest.raises(MisuseError, match="group"):
            loss.backward()
    _good_step(rank)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_group_destroyed_after_wrapping(ranks, when):
    ranks(_destroyed_after, when)


# -- use after an error --------------------------------------------------------------------------------------


def _use_after_error(rank, world_size):
    """Returns what a later step raises: on the rank that failed, and on the one that heard of it."""
    torch.manual_seed(0)
    fault = fail_at(rank=1, step=0, phase="backward")
    model = nn.Sequential(nn.Linear(4, 4), fault.layer(), nn.Linear(4, 2))
    ddp = DDP(model)
    store = dist.distributed_c10d._get_default_store()
    with pytest.raises(RuntimeError):
        ddp(batch(rank).float()).sum().backward()
    texts = []
    if rank == 0:
        for _ in range(2):
            with pytest.raises(StateError) as caught:
                ddp(batch(rank).float())
            texts.append(str(caught.value))
        store.set("rank 0 has given up", "1")
    else:
        # Before that, the failed rank may try again; after it, there is nobody to train with.
        store.wait(["rank 0 has given up"])
        start = time.monotonic()
        with pytest.raises(PacelineError) as caught:
            ddp(batch(rank).float()).sum().backward()
        assert time.monotonic() - start < 60  # the group's time-out is 600
        texts.append(str(caught.value))
    # The inner module still works by itself, as does saving what there is.
    model.state_dict()
    with torch.no_grad():
        model(batch(rank).float())
    return texts


def test_use_after_an_error(ranks):
    healthy, failed = ranks(_use_after_error, group_timeout_s=600)
    for text in healthy:
        assert "rank 1" in text.lower(), "it says what had happened"
    assert all(failed)


def _try_again(rank, world_size):
    """A rank that catches its own error and repeats the step at once: nobody else notices."""
    torch.manual_seed(0)
    fault = fail_at(rank=1, step=1, phase="forward")
    model = nn.Sequential(nn.Linear(4, 4), fault.layer(), nn.Linear(4, 2))
    ddp = DDP(model)
    for i in range(3):
        x = batch(rank, i).float()
        try:
            out = ddp(x)
        except InjectedFaultError:
            out = ddp(x)
        out.square().sum().backward()
        assert_in_sync(model)
        ddp.zero_grad()


def test_a_rank_that_tries_again_at_once(ranks):
    ranks(_try_again)


def _new_group_after_error(rank, world_size):
    """The process is not lost: with a new group, a new wrapper trains."""
    fault = fail_at(rank=1, step=0, phase="forward")
    ddp = DDP(nn.Sequential(nn.Linear(4, 2), fault.layer()))
    with pytest.raises(RuntimeError):
        ddp(batch(rank).float()).sum().backward()
    del ddp
    _good_step(rank, dist.new_group([0, 1]))


def test_the_process_is_usable_after_an_error(ranks):
    ranks(_new_group_after_error)


# -- calls with wrong arguments ------------------------------------------------------------------------------


def _bad_weight(rank, world_size, weight, kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    ddp = DDP(model)
    with pytest.raises(kind), ddp.weighted(weight):
        pass
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(model)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [(-1.0, BadArgumentError), (float("nan"), BadArgumentError), (float("inf"), BadArgumentError), ("3", BadTypeError)],
)
def test_weighted_refuses_bad_weights(ranks, weight, kind):
    ranks(_bad_weight, weight, kind)


def _all_weights_zero(rank, world_size):
    """No rank has anything to say: no division by zero in silence."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    ddp = DDP(model)
    try:
        with ddp.weighted(0):
            ddp(batch(rank).float()).sum().backward()
    except PacelineError as error:
        return "weight" in str(error)
    return all(p.grad is None or torch.isfinite(p.grad).all().item() for p in model.parameters())


def test_weights_that_sum_to_zero(ranks):
    assert ranks(_all_weights_zero) == [True, True]


def _bad_buffer_hook(rank, world_size):
    ddp = DDP(nn.BatchNorm1d(4))
    with pytest.raises(TypeError):
        ddp._register_buffer_comm_hook(None, "not callable")
    _good_step(rank)


def test_buffer_hook_must_be_callable(ranks):
    ranks(_bad_buffer_hook)


def _forward_error_is_the_user_s(rank, world_size):
    """What the user's own forward raises on every rank alike comes through as it is."""
    ddp = DDP(nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ddp(torch.zeros(3, 5))


def test_an_error_of_the_user_s_forward_comes_through(ranks):
    ranks(_forward_error_is_the_user_s)
