"""Frozen options of the wrapper, checked before anything is communicated; the only reader of the environment."""

from __future__ import annotations

import math
import numbers
import os
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import _torch
from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.plan import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES, MB

# How much is broadcast at once when a module is wrapped.
BROADCAST_CHUNK_BYTES = 250 * MB


def environment(name: str) -> str | None:
    return os.environ.get(name)


def job_directory() -> Path:
    """Where ranks keep files about themselves while they run: ``PACELINE_JOB_DIR``, or a temporary directory."""
    return Path(environment("PACELINE_JOB_DIR") or Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}")


@dataclass(frozen=True)
class HangWatch:
    """What is done when a rank waits for others and nothing happens."""

    mode: str = "observe"
    """``observe``: a report on stderr, and go on waiting; ``enforce``: raise it as an error; ``off``: neither."""
    after_s: float = 30.0
    """How long nothing has to happen."""

    def __post_init__(self) -> None:
        if self.mode not in ("off", "observe", "enforce"):
            raise BadArgumentError(f"hang_watch must be 'off', 'observe' or 'enforce', not {self.mode!r}.")
        if isinstance(self.after_s, bool) or not isinstance(self.after_s, (int, float)):
            raise BadTypeError(f"hang_after_s must be a number of seconds, not {self.after_s!r}.")
        if not 0 < self.after_s < math.inf:
            raise BadArgumentError(f"hang_after_s must be a finite number of seconds above 0, not {self.after_s!r}.")

    @staticmethod
    def from_arguments(mode: str | None = None, after_s: float | None = None) -> HangWatch:
        """What is given; else ``PACELINE_HANG_WATCH`` and ``PACELINE_HANG_AFTER_S``; else the defaults."""
        mode = mode or environment("PACELINE_HANG_WATCH") or HangWatch.mode
        text = environment("PACELINE_HANG_AFTER_S")
        if after_s is None and text:
            try:
                after_s = float(text)
            except ValueError:
                raise BadArgumentError(f"PACELINE_HANG_AFTER_S must be a number of seconds, not {text!r}.") from None
        return HangWatch(mode, HangWatch.after_s if after_s is None else after_s)


@dataclass(frozen=True)
class Caps:
    """Bucket capacities, from what the user gave in MiB."""

    caps_bytes: tuple[int, ...]
    is_default: bool
    from_list: bool

    @property
    def main_bytes(self) -> int:
        return self.caps_bytes[-1]

    @staticmethod
    def from_arguments(bucket_cap_mb: Any, bucket_cap_mb_list: Any) -> Caps:
        if bucket_cap_mb_list:
            if isinstance(bucket_cap_mb_list, (str, bytes)) or not isinstance(bucket_cap_mb_list, Sequence):
                raise BadTypeError(
                    f"bucket_cap_mb_list must be a list of numbers (MiB), not {type(bucket_cap_mb_list).__name__}."
                )
            caps = tuple(_cap_bytes(mb, f"bucket_cap_mb_list[{n}]") for n, mb in enumerate(bucket_cap_mb_list))
            return Caps(caps, is_default=False, from_list=True)
        if bucket_cap_mb is None:
            return Caps((DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES), is_default=True, from_list=False)
        return Caps((_cap_bytes(bucket_cap_mb, "bucket_cap_mb"),), is_default=False, from_list=False)


def _cap_bytes(mb: Any, argument: str) -> int:
    if isinstance(mb, bool) or not isinstance(mb, numbers.Real):
        raise BadTypeError(f"{argument} must be a number of MiB, not {mb!r}.")
    mb = float(mb)
    if not 0 < mb < math.inf:
        raise BadArgumentError(
            f"{argument} must be a finite number of MiB larger than 0, not {mb!r}. Leave it out for the default of 25."
        )
    return max(1, int(mb * MB))


@dataclass(frozen=True)
class BufferPolicy:
    """When buffers are made alike."""

    at_start: bool
    before_forward: bool

    @property
    def ever(self) -> bool:
        return self.at_start or self.before_forward

    @staticmethod
    def from_arguments(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> BufferPolicy:
        if broadcast_buffers is not None:
            warnings.warn(
                "`broadcast_buffers` is deprecated in favour of `forward_sync_buffers`. They differ in one thing: "
                "`broadcast_buffers=False` also leaves buffers out of the synchronisation when the module is wrapped.",
                FutureWarning,
                stacklevel=3,
            )
        at_start = broadcast_buffers is None or as_flag("broadcast_buffers", broadcast_buffers)
        if forward_sync_buffers is None:
            return BufferPolicy(at_start, at_start)
        before_forward = as_flag("forward_sync_buffers", forward_sync_buffers)
        return BufferPolicy(at_start, before_forward)


@dataclass(frozen=True)
class Placement:
    """Where the module's parameters are, and where inputs and outputs go."""

    device: torch.device
    device_ids: list[int] | None
    output_device: Any
    is_multi_device: bool

    @staticmethod
    def from_arguments(params: Sequence[Tensor], device_ids: Any, output_device: Any) -> Placement:
        devices = {param.device for param in params}
        types = {device.type for device in devices}
        if "meta" in types:
            raise BadArgumentError(
                "The module has parameters on the meta device, which hold no values. Materialise them first: "
                "module.to_empty(device=...) and initialise."
            )
        if len(types) > 1:
            raise BadArgumentError(
                f"The module's parameters are on devices of different types ({', '.join(sorted(types))}); one "
                "process group cannot reduce them. Move them to one type of device."
            )
        if device_ids is not None and (isinstance(device_ids, str) or not isinstance(device_ids, Sequence)):
            raise BadTypeError(f"device_ids must be None or a list of one device, not {device_ids!r}.")
        if device_ids is not None and len(device_ids) > 1:
            raise BadArgumentError(
                f"device_ids can only be None or contain a single element, not {device_ids!r}: one process drives "
                "one device."
            )
        on_cpu = types == {"cpu"}
        if (device_ids or output_device) and (on_cpu or len(devices) > 1):
            raise BadArgumentError(
                f"device_ids={device_ids!r}, output_device={output_device!r} name one device, but the module's "
                "parameters are on "
                f"{', '.join(sorted(map(str, devices)))}. Leave device_ids and output_device out for CPU modules "
                "and for modules on several devices."
            )
        first = next(iter(params)).device
        ids = [_device_index(device_ids[0])] if device_ids else None
        if output_device is None and ids:
            output_device = ids[0]
        elif output_device is not None and not on_cpu:
            output_device = _device_index(output_device)
        return Placement(first, ids, None if on_cpu else output_device, len(devices) > 1)


def _device_index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    if index is None:
        raise BadArgumentError(
            f"device_ids and output_device need a device with an index, such as 'cuda:0'; got {device!r}."
        )
    return index


def check_verify_every(steps: Any) -> int:
    """How often replicas are compared; 0 for never."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise BadTypeError(f"verify_every must be a whole number of steps, or 0 for never, not {steps!r}.")
    if steps < 0:
        raise BadArgumentError(f"verify_every must be a number of steps of at least 1, or 0 for never, not {steps}.")
    return steps


def as_flag(name: str, value: Any) -> bool:
    """``value`` as a bool, if it is meant as one: "no" and [False] would be true."""
    refusal = BadTypeError(f"{name} must be True or False, not {value!r}.")
    if not hasattr(type(value), "__bool__"):
        raise refusal
    try:
        return bool(value)
    except (ValueError, RuntimeError) as error:  # an array, or a tensor, of several
        raise refusal from error


def check_mixed_precision(config: Any) -> None:
    """``config`` may be ours or torch's; what counts is that it names dtypes."""
    if config is None:
        return
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(config, name, config)
        if (dtype is not None and not isinstance(dtype, torch.dtype)) or not hasattr(config, name):
            raise BadTypeError(
                f"mixed_precision must be a paceline.MixedPrecision (or torch's _MixedPrecision), not {config!r}."
            )
        if dtype is not None and not dtype.is_floating_point:
            raise BadArgumentError(f"{name} of mixed_precision must be a floating-point dtype, not {dtype}.")


@dataclass(frozen=True)
class Delay:
    """Parameters that are reduced after all others."""

    names: frozenset[str]

    @staticmethod
    def from_arguments(
        module: nn.Module, delay_all_reduce_named_params: Iterable[tuple[str, Tensor]] | None, trigger: Any
    ) -> Delay:
        if (delay_all_reduce_named_params is None) != (trigger is None):
            raise BadArgumentError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        if delay_all_reduce_named_params is None:
            return Delay(frozenset())
        by_id = {id(param): name for name, param in module.named_parameters()}
        names = []
        for pair in delay_all_reduce_named_params:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise BadTypeError(
                    "delay_all_reduce_named_params must hold pairs of a name and a parameter, as named_parameters() "
                    f"gives them, not a {type(pair).__name__}."
                )
            name, param = pair
            if id(param) not in by_id:
                raise BadArgumentError(
                    f"delay_all_reduce_named_params names {name!r}, but that tensor is not a parameter of the module."
                )
            names.append(by_id[id(param)])
        if id(trigger) not in by_id:
            raise BadArgumentError("param_to_hook_all_reduce is not a parameter of the module.")
        return Delay(frozenset(names))


def choose_group(process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """The process group that the arguments ask for, checked to be usable by this rank."""
    if process_group is not None and device_mesh is not None:
        raise StateError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if not hasattr(device_mesh, "get_group"):
            raise BadTypeError(f"device_mesh must be a DeviceMesh, not a {type(device_mesh).__name__}.")
        if device_mesh.ndim != 1:
            raise StateError(
                f"Only 1D device mesh is supported, but this one has {device_mesh.ndim} dimensions. Slice it: "
                "device_mesh=mesh['the data-parallel dimension']."
            )
        process_group = device_mesh.get_group(mesh_dim=0)
    if not dist.is_available() or not dist.is_initialized():
        raise BadArgumentError(
            "The default process group has not been initialised. Call paceline.init() (or "
            "torch.distributed.init_process_group()) before wrapping a module."
        )
    if process_group is None:
        return _torch.default_group()
    if _torch.is_not_a_member(process_group):
        raise BadArgumentError(
            f"Rank {dist.get_rank()} is not in the process group it was given. Wrap the module only on the ranks of "
            "that group."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise BadTypeError(f"process_group must be a ProcessGroup, not {type(process_group).__name__}.")
    if not _torch.group_is_alive(process_group):
        raise StateError("This process group has been destroyed. Make a new one before wrapping a module.")
    return process_group
