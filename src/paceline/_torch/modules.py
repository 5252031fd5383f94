"""What modules and their parameters keep in attributes that torch has no public name for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

IGNORE_ATTRIBUTE = "_ddp_params_and_buffers_to_ignore"
"""Where ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`` leaves its names on a module."""


# The three dictionaries of a module. ``named_children()`` and its like leave out what is None, make a generator for
# each module, and cannot be written to; Paceline asks every step whether the dictionaries have changed.


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, Any]:
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers


def watch_applications(applied: Callable[[nn.Module], None]) -> None:
    """Call ``applied`` with every module that has been cast, moved or the like, from now on.

    Casts may put new parameters into ``_parameters`` directly (``to_empty`` of meta tensors, and all casts if
    ``torch.__future__.set_overwrite_module_params_on_conversion`` is set). Hooks on registration do not hear of that.
    """
    apply = nn.Module._apply

    @functools.wraps(apply)
    def apply_and_tell(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        result = apply(self, *args, **kwargs)
        applied(self)
        return result

    nn.Module._apply = apply_and_tell  # type: ignore[method-assign]


_IGNORED_MARK = "_ddp_ignored"
"""What torch's wrapper leaves on each tensor that it was told to ignore. Dynamo and torch's comm hooks look for it."""


def mark_ignored(module: nn.Module, names: Collection[str]) -> None:
    """Mark the parameters and buffers of ``module`` with these names as ignored, and no others."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in names:
            setattr(tensor, _IGNORED_MARK, True)
        elif hasattr(tensor, _IGNORED_MARK):
            delattr(tensor, _IGNORED_MARK)


def is_marked_ignored(tensor: Tensor) -> bool:
    return getattr(tensor, _IGNORED_MARK, False)


def set_both_precisions(param: Tensor, full: Tensor, low: Tensor) -> None:
    """Leave a parameter's value in two dtypes where torch's mixed precision leaves them."""
    param._fp_param = full  # type: ignore[attr-defined]
    param._mp_param = low  # type: ignore[attr-defined]


def backward_hook_ids(module: nn.Module) -> tuple[list[int], list[int]]:
    """The numbers of a module's full backward hooks and pre-hooks, global ones first, in the order they are called."""
    shared = torch.nn.modules.module
    hooks = [*shared._global_backward_hooks, *module._backward_hooks]
    return hooks, [*shared._global_backward_pre_hooks, *module._backward_pre_hooks]


def backward_hooks(module: nn.Module, ids: list[int], *, before: bool) -> list[Callable[..., Any]]:
    """The hooks with these numbers that were not removed since."""
    shared = torch.nn.modules.module
    if before:
        known = {**shared._global_backward_pre_hooks, **module._backward_pre_hooks}
    else:
        known = {**shared._global_backward_hooks, **module._backward_hooks}
    return [known[number] for number in ids if number in known]
