"""Parameters that are registered in a module after it was wrapped: their first gradient must be noticed.

The next backward that is noticed finds them, because it reads the roster anew. But if the program calls the bare
module, and only the newcomers are trained, there is no hook that would notice a backward. So each newcomer gets a hook
as soon as torch registers it.

A parameter whose contents are swapped (``torch.utils.swap_tensors``) is a newcomer too, though it is the same object.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline import _torch
from paceline.reduction import ownership
from paceline.reduction.gradient_hooks import keep_tables
from paceline.reduction.reducer import Reducer


@cache
def watch() -> None:
    """Notice parameters and modules that are registered in wrapped modules, from now on."""
    register_module_parameter_registration_hook(_parameter_registered)
    register_module_module_registration_hook(_module_registered)
    _torch.watch_swaps(_swapped)
    _torch.watch_applications(_applied)


def _parameter_registered(module: nn.Module, name: str, param: Tensor | None) -> None:
    if param is not None and not _is_traced():
        for reducer in ownership.live():
            if reducer.roster.has_module(module):
                _expect(param, reducer)


def _module_registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if submodule is not None and not _is_traced():
        for reducer in ownership.live():
            if reducer.roster.has_module(module):
                reducer.roster.expect_modules(submodule)
                for param in submodule.parameters():
                    _expect(param, reducer)


def _applied(module: nn.Module) -> None:
    for param in _torch.parameters_of(module).values():
        _parameter_registered(module, "", param)


def _swapped(first: Tensor, second: Tensor) -> None:
    keep_tables(first, second)
    for reducer in ownership.live():
        for param in (first, second):
            reducer.roster.swapped(param)


def _is_traced() -> bool:
    """Whether the compiler only looks at what would be registered.

    Compiled code makes modules, too: a slice of a ``ModuleList`` is a new one. None of them is a part of a wrapped
    module, and the compiler could not trace what follows.
    """
    return torch.compiler.is_dynamo_compiling()


def _expect(param: Tensor, reducer: Reducer) -> None:
    if reducer.active and not reducer.slots.has(param):
        reducer.inbox.listen_to_stranger(param)
