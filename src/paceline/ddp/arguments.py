"""What the constructor of the wrapper was asked for, as frozen values.

Each value is checked as far as one rank can do so by itself, before anything is communicated.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import _torch
from paceline.control import OPTION
from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.gradients.outputs import move_to_device
from paceline.gradients.plan import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES, MB
from paceline.gradients.portion import describe_placement
from paceline.reduction.planner import ReducerOptions

_FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "skip_all_reduce_unused_params",
    "gradient_as_bucket_view",
    "batched_grad_copy",
)


@dataclass(frozen=True)
class Arguments:
    """The arguments that change what is communicated, or when. The names are those of the constructor."""

    caps: Caps
    delay: Delay
    buffer_policy: BufferPolicy
    find_unused_parameters: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    gradient_as_bucket_view: bool
    batched_grad_copy: bool
    mixed_precision: Any
    verify_every: int

    def __post_init__(self) -> None:
        for name in _FLAGS:
            object.__setattr__(self, name, as_flag(name, getattr(self, name)))
        check_mixed_precision(self.mixed_precision)
        check_verify_every(self.verify_every)

    def warn(self, *, check_reduction: Any) -> None:
        """Warn of arguments that do nothing. The constructor calls this, and the warnings point at its caller."""
        if self.static_graph and self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True is not needed with static_graph=True, which finds unused parameters by "
                "itself.",
                UserWarning,
                stacklevel=3,
            )
        if check_reduction:
            warnings.warn(
                "The `check_reduction` argument of `DistributedDataParallel` is deprecated and does nothing.",
                FutureWarning,
                stacklevel=3,
            )

    def with_switches(self, switches: Switches) -> Arguments:
        """The arguments that would make a wrapper with these switches."""
        return replace(
            self,
            find_unused_parameters=switches.find_unused_parameters,
            static_graph=switches.static_graph,
            buffer_policy=replace(self.buffer_policy, before_forward=switches.forward_sync_buffers),
        )

    def reducer_options(self) -> ReducerOptions:
        return ReducerOptions(
            caps_bytes=None if self.caps.is_default else self.caps.caps_bytes,
            static_graph=self.static_graph,
            skip_unused=self.skip_all_reduce_unused_params,
            rebuild=self.static_graph or not self.find_unused_parameters,
            stable_storage=self.gradient_as_bucket_view,
            copy_in_batches=self.batched_grad_copy,
        )

    def rows(self, buffers: Mapping[str, Tensor]) -> list[Sequence[Any]]:
        """The arguments and the module's buffers in the form in which ranks compare them."""
        parts = [
            [name, list(_torch.local_tensor(buffer).shape), describe_placement(buffer)]
            for name, buffer in buffers.items()
            if self.buffer_policy.ever and _torch.is_dtensor(buffer)
        ]
        options = {
            "bucket_cap_mb": [cap / MB for cap in self.caps.caps_bytes],
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.buffer_policy.before_forward,
            "broadcast_buffers": self.buffer_policy.at_start,
            "mixed_precision": repr(self.mixed_precision).rpartition("(")[2],
            "verify_every": self.verify_every,
            "buffers": [[name, list(b.shape), str(b.dtype)] for name, b in buffers.items()],
            "parts of buffers": parts,
        }
        return [[OPTION + name, value] for name, value in options.items()]


@dataclass
class Switches:
    """What a program may change on a wrapper that exists already, under the names that torch's class has for it."""

    find_unused_parameters: bool
    static_graph: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool = True
    """Whether the next forward may broadcast buffers: only if the one before it synchronised, or if there was none."""

    @staticmethod
    def of(arguments: Arguments) -> Switches:
        return Switches(
            arguments.find_unused_parameters, arguments.static_graph, arguments.buffer_policy.before_forward
        )


@dataclass(frozen=True)
class Caps:
    """The capacities of buckets, which the user gives in MiB."""

    caps_bytes: tuple[int, ...]
    is_default: bool
    from_list: bool

    @property
    def main_bytes(self) -> int:
        return self.caps_bytes[-1]

    @property
    def as_list(self) -> list[int]:
        """The capacities if they were given as a list, else none."""
        return list(self.caps_bytes) if self.from_list else []

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
    """When the buffers of all ranks are made equal."""

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
class Delay:
    """The parameters that are reduced after all others."""

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


@dataclass(frozen=True)
class Placement:
    """Where the module's parameters are, and where inputs and outputs go."""

    device: torch.device
    device_ids: list[int] | None
    output_device: Any
    is_multi_device: bool

    def move(self, inputs: Any) -> Any:
        """Move ``inputs`` to the device of ``device_ids``, if that was given."""
        return move_to_device(inputs, self.device) if self.device_ids else inputs

    @staticmethod
    def from_arguments(params: Sequence[Tensor], device_ids: Any, output_device: Any) -> Placement:
        devices = {param.device for param in params}
        types = {device.type for device in devices}
        if "meta" in types:
            raise BadArgumentError(
                "The module has parameters on the meta device, which hold no values. Materialise them with "
                "module.to_empty(device=...) and initialise them, before you wrap the module."
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


def as_flag(name: str, value: Any) -> bool:
    """``value`` as a bool, if it is meant as one: ``bool`` would make True of "no" and of [False]."""
    refusal = BadTypeError(f"{name} must be True or False, not {value!r}.")
    if not hasattr(type(value), "__bool__"):
        raise refusal
    try:
        return bool(value)
    except (ValueError, RuntimeError) as error:  # an array or a tensor of several elements
        raise refusal from error


def check_verify_every(steps: Any) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise BadTypeError(f"verify_every must be a whole number of steps, or 0 for never, not {steps!r}.")
    if steps < 0:
        raise BadArgumentError(f"verify_every must be a number of steps of at least 1, or 0 for never, not {steps}.")


def check_mixed_precision(config: Any) -> None:
    """Accept our configuration or torch's: what counts is that it names dtypes."""
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


def choose_group(process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """Find the process group that the arguments ask for, and check that this rank can use it."""
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
