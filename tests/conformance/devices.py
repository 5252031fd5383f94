"""Make whatever names a CUDA device name the CPU, for the suite's code only where that is possible.

The suite's module gets a stand-in for its global `torch`: factories, `torch.device` and `torch.cuda` are
mapped there, so torch's own code (and ours) still sees a machine without GPUs. Methods can't be mapped by
module: `.cuda()` and `.to()` are replaced on the tensor and module classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed.device_mesh as device_mesh

CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "empty", "full", "ones", "rand", "randn", "randint", "tensor", "zeros"),
    *("empty_like", "ones_like", "zeros_like"),
)
# The one input that a CPU can't take: three convolutions over a 1000 x 1000 image, again and again. Its
# size plays no part in what the test checks (uneven inputs).
_LARGE_IMAGE = (1, 1, 1000, 1000)
_SMALL_IMAGE = (1, 1, 24, 24)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def on_cpu(device: Any) -> Any:
    """`device`, or the CPU where it names a GPU (by index, by name or as a `torch.device`)."""
    return CPU if _is_gpu(device) else device


def _factory(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if all(type(arg) is int for arg in args) and args == _LARGE_IMAGE:
            args = _SMALL_IMAGE
        return make(*args, **kwargs)

    return mapped


class _DeviceType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return CPU if args and _is_gpu(args[0]) else torch.device(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.device)


class _Device(metaclass=_DeviceType):
    """`torch.device` for the suite: GPUs are the CPU."""


class _Cuda(ModuleType):
    """`torch.cuda` for the suite: the calls that manage a device do nothing."""

    Stream = staticmethod(lambda *_args: mock.Mock())
    synchronize = manual_seed = staticmethod(lambda *_args, **_device: None)

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self._current = 0

    def set_device(self, device: Any) -> None:
        self._current = device if isinstance(device, int) else 0

    def current_device(self) -> int:
        return self._current

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(ModuleType):
    """`torch` for the suite."""

    device = _Device

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()
        for name in _FACTORIES:
            setattr(self, name, _factory(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def map_methods() -> None:
    """Replace `.cuda()` and `.to()` of tensors and modules, and `init_device_mesh`, for this process."""
    for cls in (torch.Tensor, torch.nn.Module):
        cls.cuda = lambda self, *args, **kwargs: self
        cls.to = _mapped_to(cls.to)
    make_mesh = device_mesh.init_device_mesh

    @functools.wraps(make_mesh)
    def mesh_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make_mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    device_mesh.init_device_mesh = mesh_on_cpu


def _mapped_to(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def mapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_gpu(args[0]):
            args = (CPU, *args[1:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    return mapped


def map_amp() -> None:
    """Point `torch.cuda.amp` at the CPU's autocast and scaler; the suite imports both by name."""
    torch.cuda.amp.autocast = functools.partial(torch.amp.autocast, "cpu", dtype=torch.float16)
    torch.cuda.amp.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")


def map_suite(suite: ModuleType) -> None:
    """Give the suite its stand-in for `torch`, and one imaginary GPU a rank."""
    suite.torch = _Torch()
    suite.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}


def drop_device_ids(ddp_class: type) -> None:
    """Let `ddp_class` ignore the GPUs it is told to use: its module is on the CPU."""
    init = ddp_class.__init__

    @functools.wraps(init)
    def without_devices(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        init(self, *args, **kwargs)

    ddp_class.__init__ = without_devices
