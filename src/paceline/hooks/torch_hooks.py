"""Which hooks are torch's own, known by identity and not by what they are called.

Importing torch's hooks would import numpy, so this file does not import them. It looks for their modules among those
that are loaded: if nobody has imported a module, no hook can come from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

PACKAGE = "torch.distributed.algorithms.ddp_comm_hooks"

OVERLAPPING = (
    ("default_hooks", "allreduce_hook"),
    ("default_hooks", "fp16_compress_hook"),
    ("default_hooks", "bf16_compress_hook"),
    ("debugging_hooks", "noop_hook"),
    ("post_localSGD_hook", "post_localSGD_hook"),
)
"""Hooks that start all their collectives before they return: module and name."""

TAKING_GROUP = ("default_hooks", "optimizer_overlap_hooks", "ddp_zero_hook")
"""Modules whose hooks have a process group as their state, or hand it to a hook that has."""

MODULES = (*TAKING_GROUP, "debugging_hooks", "post_localSGD_hook", "powerSGD_hook", "quantization_hooks")
"""All modules that have hooks."""


def _loaded(module: str) -> ModuleType | None:
    return sys.modules.get(f"{PACKAGE}.{module}")


def is_torch_hook(hook: object, module: str, name: str) -> bool:
    """Whether ``hook`` is the function ``name`` of torch's ``module``."""
    loaded = _loaded(module)
    return loaded is not None and hook is getattr(loaded, name)


def comes_from(hook: Callable[..., Any], modules: Iterable[str]) -> bool:
    """Whether ``hook`` is a function of one of these modules of torch, inner functions included."""
    names = getattr(hook, "__globals__", None)
    return any(loaded is not None and names is vars(loaded) for loaded in map(_loaded, modules))
