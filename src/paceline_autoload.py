"""What ``import torch`` runs if Paceline is installed: torch calls the entry points of the group ``torch.backends``.

It makes the backend "shm" known, so that ``init_process_group("cpu:shm")`` works in programs that never import
Paceline, also in processes that a framework starts by itself. With ``PACELINE_SWAP=1`` in the environment, code that
asks ``torch.nn.parallel`` for its ``DistributedDataParallel`` gets ours. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is torch's
switch that leaves all of this out.

This file is not in the package, since importing anything of the package imports all of it. Every program that imports
torch runs this, so it imports nothing itself, and never raises: Paceline is imported when a group with the backend is
made, or when the class is asked for.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

NAME = "DistributedDataParallel"
MODULES = ("torch.nn.parallel", "torch.nn.parallel.distributed")
"""Where programs find torch's class."""


def register() -> None:
    """Torch calls this at the end of ``import torch``. Whatever is wrong with Paceline, torch is to be imported."""
    try:
        register_backend()
        if os.environ.get("PACELINE_CPU_BACKEND") == "shm":
            make_default()
        if os.environ.get("PACELINE_SWAP", "0") not in ("", "0"):
            swap()
    except Exception as error:
        try:
            print(f"paceline: could not be set up in `import torch`: {error!r}", file=sys.stderr)
        except Exception:
            return


def register_backend() -> None:
    """Tell c10d about the backend "shm"."""
    import torch.distributed as dist

    if dist.is_available() and "shm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("shm", _new_group, extended_api=True, devices=["cpu"])


def make_default() -> None:
    """Let groups that name no backend carry their CPU tensors through shared memory."""
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.default_device_backend_map["cpu"] = "shm"


def _new_group(backend_options: Any, group_options: Any) -> Any:
    from paceline.transport.creation import new_group

    return new_group(backend_options, group_options)


# -- our class in the place of torch's -----------------------------------------------------------------


class _Swapped(ModuleType):
    """A module of torch that hands out our class in the place of torch's.

    The module's own dictionary keeps torch's class, which torch's functions find there. A property comes before that
    dictionary when somebody else asks the module for the name. It imports Paceline when it is first asked, and not
    before, so that ``import torch`` takes as long as ever.
    """

    @property
    def DistributedDataParallel(self) -> Any:
        # Torch's own modules, and ours, mean torch's class when they say its name.
        if _asking_package() in ("torch", "paceline"):
            return vars(self)[NAME]
        from paceline import DistributedDataParallel

        return DistributedDataParallel

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: Any) -> None:
        # Somebody else replaces the class, and gets what they ask for.
        _set_class(self, ModuleType)
        setattr(self, NAME, value)


def _asking_package() -> str:
    """The package of the code that asks a module for a name. An import statement asks by way of importlib."""
    frame = sys._getframe(2)
    while (package := str(frame.f_globals.get("__name__", "")).partition(".")[0]) == "importlib" and frame.f_back:
        frame = frame.f_back
    return package


def _set_class(module: Any, kind: type[ModuleType]) -> None:
    module.__class__ = kind


def swap() -> list[str]:
    """Let torch's modules hand out our class from now on; returns the names that had not been replaced before."""
    import torch.nn.parallel.distributed  # noqa: F401

    found = [sys.modules[name] for name in MODULES]
    replaced = [f"{module.__name__}.{NAME}" for module in found if type(module) is ModuleType]
    for module in found:
        if type(module) is ModuleType:
            _set_class(module, _Swapped)
    return replaced


def swap_back() -> None:
    """Undo `swap`."""
    for name in MODULES:
        if isinstance(module := sys.modules.get(name), _Swapped):
            _set_class(module, ModuleType)
