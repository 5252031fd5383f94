"""``paceline.load_state_dict``: a state is loaded whether it was saved from a wrapper or from the bare module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline import _torch
from paceline.errors import BadArgumentError, BadTypeError

# What wrappers put in front of a name: DistributedDataParallel, and torch.compile.
_WRAPPERS = ("module", "_orig_mod")
_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """What did not fit when a state was loaded; names are those of the bare module."""

    missing: tuple[str, ...] = ()
    """What the module has and the state does not."""
    unexpected: tuple[str, ...] = ()
    """What the state has and the module does not, by its name in the state."""
    reshaped: tuple[str, ...] = ()
    """What both have in different shapes, with both shapes."""

    def __bool__(self) -> bool:
        """Whether anything did not fit."""
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        parts = [
            ("missing in the state", self.missing),
            ("not in the module", self.unexpected),
            ("of another shape", self.reshaped),
        ]
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names) or "everything fits"


def load_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> LoadReport:
    """Load ``state`` into ``model``, each of which may be wrapped, compiled, both or neither.

    Names match with and without the ``module.`` and ``_orig_mod.`` that wrappers put into them. If anything is missing,
    left over or of another shape, this raises ``BadArgumentError``, which names it, and loads nothing. With
    ``strict=False`` it loads what fits and returns what did not. It speaks with no other rank: load the same state on
    all ranks.

    >>> import torch, paceline
    >>> saved = {"module.weight": torch.ones(1, 2), "module.bias": torch.zeros(1)}
    >>> print(paceline.load_state_dict(torch.nn.Linear(2, 1), saved))
    everything fits
    """
    if not isinstance(model, nn.Module) or not isinstance(state, Mapping):
        raise BadTypeError(
            "load_state_dict takes a module and the dictionary to load into it, not "
            f"{type(model).__name__} and {type(state).__name__}."
        )
    bare = _bare(model)
    own = bare.state_dict(keep_vars=True)
    found = _matched(list(own), list(state))
    reshaped = {name: text for name, key in found.items() if (text := _shapes(name, own[name], state[key]))}
    matched_keys = set(found.values())
    report = LoadReport(
        tuple(name for name in own if name not in found),
        tuple(str(key) for key in state if key not in matched_keys),
        tuple(reshaped.values()),
    )
    if report and strict:
        raise BadArgumentError(f"The state does not fit {type(bare).__name__}: {report}.{_advice(state, found)}")
    bare.load_state_dict({name: state[key] for name, key in found.items() if name not in reshaped}, strict=False)
    return report


def _bare(model: nn.Module) -> nn.Module:
    """The module inside of all wrappers around the whole of it."""
    while True:
        inner = model.module if isinstance(model, (TorchDDP, DataParallel)) else _torch.optimized_module(model)
        if inner is None:
            return model
        model = inner


def _matched(names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """For names of the bare module, the keys of a state that stand for them."""
    # A module may itself have a part called "module". So the prefix that all keys share counts first, and as many of
    # its parts are taken off as makes most names equal.
    plain = [tuple(str(key).split(".")) for key in keys]
    best = dict(zip(plain, keys, strict=True))
    wanted = {tuple(name.split(".")): name for name in names}
    while plain and all(len(parts) > 1 for parts in plain) and {parts[0] for parts in plain} <= set(_WRAPPERS):
        plain = [parts[1:] for parts in plain]
        stripped = dict(zip(plain, keys, strict=True))
        if len(stripped) == len(keys) and len(stripped.keys() & wanted) > len(best.keys() & wanted):
            best = stripped
    found = {wanted[parts]: best[parts] for parts in wanted if parts in best}
    # Wrappers may also sit inside of the module, or have sat there when the state was saved.
    left_names = _by_core(parts for parts, name in wanted.items() if name not in found)
    left_keys = _by_core(parts for parts in best if parts not in wanted)
    for core, places in left_names.items():
        sources = left_keys.get(core, [])
        if len(places) == len(sources) == 1:
            found[wanted[places[0]]] = best[sources[0]]
    return found


def _by_core(names: Any) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Names by what is left of them without any part that may be a wrapper's."""
    found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for parts in names:
        found.setdefault(tuple(part for part in parts if part not in _WRAPPERS), []).append(parts)
    return found


def _shapes(name: str, own: Any, given: Any) -> str:
    """Both shapes in words, if they differ."""
    if not isinstance(own, Tensor) or isinstance(own, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return ""
    if not isinstance(given, Tensor):
        return f"{name} (a {type(given).__name__} in the state)"
    if own.shape == given.shape:
        return ""
    return f"{name} {tuple(given.shape)} in the state, {tuple(own.shape)} in the module"


def _advice(state: Mapping[str, Any], found: Mapping[str, str]) -> str:
    inner = [key for key, value in state.items() if isinstance(value, Mapping)]
    if found or not inner:
        return " Nothing was loaded; strict=False loads what fits."
    return f" It is a whole checkpoint: give the part that belongs to the module, such as state[{inner[0]!r}]."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
