"""Options: what the arguments of the wrapper become, and what is refused before anything is communicated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.ddp.arguments import BufferPolicy, Caps, Delay, Placement, check_mixed_precision
from paceline.ddp.precision import MixedPrecision
from paceline.errors import BadArgumentError, BadTypeError
from paceline.gradients.plan import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES, MB

# -- capacities ----------------------------------------------------------------------------------------


def test_the_default_capacities() -> None:
    caps = Caps.from_arguments(None, None)
    assert caps.caps_bytes == (DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES)
    assert caps.main_bytes == 25 * MB
    assert caps.is_default
    assert not caps.from_list


@pytest.mark.parametrize(
    ("mb", "cap_bytes"), [(25, 25 * MB), (1, MB), (0.5, MB // 2), (1e-9, 1), (1.5, MB * 3 // 2), (10**6, 10**6 * MB)]
)
def test_one_capacity_is_one_for_all(mb: float, cap_bytes: int) -> None:
    caps = Caps.from_arguments(mb, None)
    assert caps.caps_bytes == (cap_bytes,)
    assert caps.main_bytes == cap_bytes
    assert not caps.is_default
    assert not caps.from_list


@pytest.mark.parametrize("mbs", [[1, 2.5, 4], (1, 2.5, 4)])
def test_a_list_is_kept_in_order(mbs: Any) -> None:
    caps = Caps.from_arguments(None, mbs)
    assert caps.caps_bytes == (MB, MB * 5 // 2, 4 * MB)
    assert caps.main_bytes == 4 * MB
    assert caps.from_list
    assert not caps.is_default


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_an_empty_list_is_no_list(nothing: Any) -> None:
    assert Caps.from_arguments(None, nothing).is_default
    assert Caps.from_arguments(3, nothing).caps_bytes == (3 * MB,)


@pytest.mark.parametrize("mb", [0, -1, 0.0, float("nan"), float("inf"), -float("inf")])
def test_a_capacity_that_is_no_size_is_refused(mb: float) -> None:
    with pytest.raises(BadArgumentError, match=r"bucket_cap_mb must be.*MiB"):
        Caps.from_arguments(mb, None)
    with pytest.raises(BadArgumentError, match=r"bucket_cap_mb_list\[1\]"):
        Caps.from_arguments(None, [1, mb])


@pytest.mark.parametrize("mb", ["25", b"25", True, [25], {}, torch.tensor(25), 1j])
def test_a_capacity_that_is_no_number_is_refused(mb: Any) -> None:
    with pytest.raises(BadTypeError, match="bucket_cap_mb must be a number"):
        Caps.from_arguments(mb, None)
    with pytest.raises(BadTypeError, match=r"bucket_cap_mb_list\[0\] must be a number"):
        Caps.from_arguments(None, [mb, 1])


@pytest.mark.parametrize("mbs", ["12", b"12", 25, {1: 2}, {3}])
def test_a_list_that_is_none_is_refused(mbs: Any) -> None:
    with pytest.raises(BadTypeError, match="bucket_cap_mb_list must be a list"):
        Caps.from_arguments(None, mbs)


# -- buffers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("forward_sync", "before_forward"), [(None, True), (True, True), (False, False)])
def test_buffers_are_synchronised_by_default(forward_sync: bool | None, before_forward: bool) -> None:
    assert BufferPolicy.from_arguments(None, forward_sync) == BufferPolicy(at_start=True, before_forward=before_forward)


@pytest.mark.parametrize(
    ("broadcast", "forward_sync", "policy"),
    [
        (True, None, BufferPolicy(at_start=True, before_forward=True)),
        (False, None, BufferPolicy(at_start=False, before_forward=False)),
        (0, None, BufferPolicy(at_start=False, before_forward=False)),
        (True, False, BufferPolicy(at_start=True, before_forward=False)),
        (False, True, BufferPolicy(at_start=False, before_forward=True)),
    ],
)
def test_the_old_argument_works_and_warns(broadcast: bool, forward_sync: bool | None, policy: BufferPolicy) -> None:
    with pytest.warns(FutureWarning, match="forward_sync_buffers"):
        assert BufferPolicy.from_arguments(broadcast, forward_sync) == policy


# -- placement -----------------------------------------------------------------------------------------


def _on(*devices: str) -> list[Any]:
    """Stand-ins for parameters: no accelerator is needed to decide where things are."""
    return [SimpleNamespace(device=torch.device(device)) for device in devices]


@pytest.mark.parametrize("device_ids", [None, []])
def test_a_module_on_the_cpu_moves_nothing(device_ids: Any) -> None:
    placement = Placement.from_arguments(_on("cpu", "cpu"), device_ids, None)
    assert placement == Placement(torch.device("cpu"), None, None, is_multi_device=False)


@pytest.mark.parametrize("device_id", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_device_id_may_be_written_in_three_ways(device_id: Any) -> None:
    placement = Placement.from_arguments(_on("cuda:1", "cuda:1"), [device_id], None)
    assert placement == Placement(torch.device("cuda:1"), [1], 1, is_multi_device=False)


def test_an_output_device_of_its_own() -> None:
    assert Placement.from_arguments(_on("cuda:1"), [1], "cuda:0").output_device == 0
    assert Placement.from_arguments(_on("cuda:1"), None, 1).output_device == 1
    assert Placement.from_arguments(_on("cuda:1"), None, None).output_device is None


def test_a_module_on_several_devices() -> None:
    placement = Placement.from_arguments(_on("cuda:0", "cuda:1"), None, None)
    assert placement == Placement(torch.device("cuda:0"), None, None, is_multi_device=True)


@pytest.mark.parametrize(
    ("devices", "device_ids", "words"),
    [
        (["cpu"], [0], r"\[0\].*cpu"),
        (["cuda:0", "cuda:1"], [0], r"cuda:0, cuda:1.*Leave device_ids"),
        (["cuda:0"], [0, 1], r"device_ids can only be None or contain a single element.*\[0, 1\]"),
        (["cuda:0"], ["cuda"], "with an index.*'cuda'"),
        (["cpu", "cuda:0"], None, "different types.*cpu, cuda"),
        (["meta"], None, "meta device.*to_empty"),
        (["cpu", "meta"], None, "meta device.*to_empty"),
    ],
)
def test_a_placement_that_cannot_work_is_refused(devices: list[str], device_ids: Any, words: str) -> None:
    with pytest.raises(BadArgumentError, match=words):
        Placement.from_arguments(_on(*devices), device_ids, None)


@pytest.mark.parametrize("output_device", [3, "cuda:1"])
def test_an_output_device_for_a_module_on_the_cpu_is_refused(output_device: Any) -> None:
    with pytest.raises(BadArgumentError, match=r"output_device.*cpu"):
        Placement.from_arguments(_on("cpu"), None, output_device)


def test_an_output_device_without_an_index_is_refused() -> None:
    with pytest.raises(BadArgumentError, match="with an index"):
        Placement.from_arguments(_on("cuda:0"), [0], "cuda")


# -- delay ---------------------------------------------------------------------------------------------


def test_nothing_is_delayed_by_default() -> None:
    assert Delay.from_arguments(nn.Linear(2, 2), None, None).names == frozenset()


def test_delayed_parameters_are_known_by_the_modules_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    # The user may name them as his own submodule does.
    delay = Delay.from_arguments(module, module[0].named_parameters(), module[1].weight)
    assert delay.names == {"0.weight", "0.bias"}


@pytest.mark.parametrize("which", ["params", "trigger"])
def test_the_two_arguments_go_together(which: str) -> None:
    module = nn.Linear(2, 2)
    params = [("weight", module.weight)] if which == "params" else None
    trigger = module.bias if which == "trigger" else None
    with pytest.raises(BadArgumentError, match="at the same time"):
        Delay.from_arguments(module, params, trigger)


def test_a_delayed_parameter_of_another_module_is_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(BadArgumentError, match=r"'stray'.*not a parameter of the module"):
        Delay.from_arguments(module, [("weight", module.weight), ("stray", nn.Linear(2, 2).weight)], module.bias)


def test_a_trigger_of_another_module_is_refused() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(BadArgumentError, match="param_to_hook_all_reduce is not a parameter"):
        Delay.from_arguments(module, [("weight", module.weight)], nn.Linear(2, 2).weight)


# -- mixed precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, MixedPrecision(), MixedPrecision(param_dtype=torch.bfloat16)])
def test_a_config_that_names_dtypes_is_taken(config: Any) -> None:
    check_mixed_precision(config)
    # torch's own has the same fields.
    check_mixed_precision(SimpleNamespace(param_dtype=torch.float16, reduce_dtype=None, buffer_dtype=None, more=1))


@pytest.mark.parametrize(
    "config",
    [
        torch.bfloat16,
        "bf16",
        {"param_dtype": torch.bfloat16},
        SimpleNamespace(param_dtype=torch.bfloat16),
        MixedPrecision(param_dtype="bfloat16"),  # type: ignore[arg-type]
        MixedPrecision(buffer_dtype=float),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_what_names_no_dtypes_is_refused(config: Any) -> None:
    with pytest.raises(BadTypeError, match=r"mixed_precision must be a paceline\.MixedPrecision"):
        check_mixed_precision(config)


# -- the rest ------------------------------------------------------------------------------------------


def test_options_cannot_be_changed() -> None:
    for options in (Caps.from_arguments(1, None), BufferPolicy(True, True), Delay(frozenset())):
        name = dataclasses.fields(options)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, name, None)
