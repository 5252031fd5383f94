"""Which parameters and buffers of a module take part, and whether that has changed since.

The module is read anew, and what it held when it was wrapped is not trusted: people freeze, unfreeze, add and replace
parameters, and assign new tensors to buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from paceline import _torch
from paceline.errors import StateError
from paceline.gradients.plan import ParameterSpec
from paceline.gradients.portion import check_placement, describe_placement

_requires_grad, _dtype = attrgetter("requires_grad"), attrgetter("dtype")
SPEC_FIELDS = ["name", "shape", "stride", "dtype", "device type", "requires_grad", "sparse", "delayed", "placement"]


def ignored_names(module: nn.Module) -> frozenset[str]:
    """The fully qualified names of the parameters and buffers that are not to be synchronised."""
    return frozenset(getattr(module, _torch.IGNORE_ATTRIBUTE, ()))


def makes_sparse_gradients(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


@functools.cache
def _name(thing: torch.dtype | torch.device) -> str:
    """The name without its module, such as "float32" or "cuda:0"."""
    return str(thing).removeprefix("torch.")


class ModuleTree:
    """The modules of ``root`` as they hang together now. It is cheap to ask whether that has changed."""

    def __init__(self, root: nn.Module) -> None:
        self.owners = list(root.named_modules())
        children = [_torch.children_of(owner) for _, owner in self.owners]
        self._dicts = children
        self._sizes = list(map(len, children))
        links = [(held, key) for held in children for key in held]
        self._of, self._keys = [held for held, _ in links], [key for _, key in links]
        self._held = [held[key] for held, key in links]

    def changed(self) -> bool:
        try:
            return list(map(len, self._dicts)) != self._sizes or not all(
                map(is_, map(getitem, self._of, self._keys), self._held)
            )
        except KeyError:
            return True


class Roster:
    """The parameters of ``module`` as they are now. It is cheap to ask whether that has changed."""

    def __init__(
        self,
        module: nn.Module,
        *,
        ignored: frozenset[str],
        delayed: frozenset[str] = frozenset(),
        tree: ModuleTree | None = None,
    ) -> None:
        """``tree`` is the tree of ``module`` as it is now; it is made if it is not given."""
        self._module = module
        self._ignored = ignored
        self.params: list[Tensor] = []
        self.specs: list[ParameterSpec] = []
        self.ignored: list[Tensor] = []
        seen: set[int] = set()
        self._tree = tree or ModuleTree(module)
        self._owner_ids = {id(owner) for _, owner in self._tree.owners}
        # These have, for each parameter: the dictionary that it is in, its key there, and the parameter itself.
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[Any] = []
        # A cast changes whole modules, so one parameter of each shows it.
        self._samples: list[Tensor] = []
        for prefix, owner in self._tree.owners:
            held = _torch.parameters_of(owner)
            sparse = makes_sparse_gradients(owner)
            sample: Tensor | None = None
            for key, param in held.items():
                self._dicts.append(held)
                self._keys.append(key)
                self._held.append(param)
                if param is None:
                    continue
                sample = param if sample is None else sample
                name = f"{prefix}.{key}" if prefix else key
                if name in ignored:
                    self.ignored.append(param)
                elif id(param) not in seen:
                    seen.add(id(param))
                    self.params.append(param)
                    self.specs.append(self._spec(name, param, sparse, name in delayed))
            if sample is not None:
                self._samples.append(sample)
        self._sized = [_torch.parameters_of(owner) for _, owner in self._tree.owners]
        self._sizes = list(map(len, self._sized))
        self._dtypes = list(map(_dtype, self._samples))
        self._trainable = [param for param in self.params if param.requires_grad]
        self._frozen = [param for param in self.params if not param.requires_grad]
        self._ids, self._swapped = seen, set[int]()

    def swapped(self, param: Tensor) -> None:
        """``param``, if it is one of ours, has got the contents of another tensor, so that it is a new parameter."""
        if id(param) in self._ids:
            self._swapped.add(id(param))

    def has_kept(self) -> set[int]:
        """The ids of the parameters whose values ranks have compared, or made equal."""
        return self._ids - self._swapped

    def training(self) -> bool:
        return self._module.training

    def is_frozen(self) -> bool:
        """Whether no parameter that takes part requires a gradient.

        The answer may be a wrong no: parameters that were replaced may have required one.
        """
        # The first of these two checks nearly always ends at the first parameter.
        return not any(map(_requires_grad, self.params)) and self.is_frozen_now()

    def is_frozen_now(self) -> bool:
        """Whether the module, as it is now, has no parameter that takes part and requires a gradient."""
        named = self._module.named_parameters()
        return not any(param.requires_grad for name, param in named if name not in self._ignored)

    def name_now(self, param: Tensor) -> str | None:
        """The name of ``param`` in the module as it is now; None if it is not there or takes no part."""
        found = (name for name, other in self._module.named_parameters() if other is param)
        return next((name for name in found if name not in self._ignored), None)

    def has_module(self, module: nn.Module) -> bool:
        """Whether ``module`` is a part of the module, as far as can be told without walking through all of it.

        The answer may be a wrong yes: a new module may have the id of a part that was deleted.
        """
        return id(module) in self._owner_ids

    def expect_modules(self, module: nn.Module) -> None:
        """Count ``module`` and its parts as parts of the module, before it is read anew."""
        self._owner_ids.update(map(id, module.modules()))

    @staticmethod
    def _spec(name: str, param: Tensor, sparse: bool, delayed: bool) -> ParameterSpec:
        placement, local = "", param
        if type(param) is nn.Parameter:
            # Nearly all parameters are of this class, and there are many of them, so further checks would take long.
            pass
        elif isinstance(param, UninitializedParameter):
            raise StateError(
                f"Parameter {name!r} has no shape yet (lazy module). Run one forward of the bare module on a "
                "dummy batch before wrapping it, so that every rank knows its shapes."
            )
        elif not param.is_leaf:
            raise StateError(
                f"Parameter {name!r} is computed from other tensors at the moment, so autograd keeps no gradient for "
                "it that could be synchronised. Wrap the module before it is reparametrised, or leave this one out "
                "with DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)."
            )
        elif hasattr(param, "__tensor_flatten__"):
            check_placement(name, param)
            local, placement = _torch.local_tensor(param), describe_placement(param)
        return ParameterSpec(
            name,
            tuple(local.shape),
            local.stride(),
            _name(param.dtype),
            param.element_size(),
            _name(param.device),
            param.requires_grad,
            sparse,
            delayed,
            placement,
        )

    def changed(self) -> bool:
        """Whether parameters were added, removed, replaced, frozen, unfrozen or cast since this roster was made."""
        # This runs in every backward, so it is a sweep without a Python loop.
        try:
            same = (
                not self._swapped
                and not self._tree.changed()
                and list(map(len, self._sized)) == self._sizes
                and all(map(is_, map(getitem, self._dicts, self._keys), self._held))
                and all(map(_requires_grad, self._trainable))
                and not any(map(_requires_grad, self._frozen))
                and list(map(_dtype, self._samples)) == self._dtypes
            )
        except KeyError:
            return True
        return not same

    def rows(self) -> list[Sequence[Any]]:
        """What ranks compare: a row for each parameter, with the fields of ``SPEC_FIELDS``."""
        return [spec.row() for spec in self.specs]

    def difference(self, newer: Roster) -> str:
        """How ``newer`` differs from this roster, in words."""
        ours = {spec.name: (spec, param) for spec, param in zip(self.specs, self.params, strict=True)}
        theirs = {spec.name: (spec, param) for spec, param in zip(newer.specs, newer.params, strict=True)}
        told = [f"{name!r} was added" for name in theirs.keys() - ours.keys()]
        told += [f"{name!r} was removed" for name in ours.keys() - theirs.keys()]
        for name in ours.keys() & theirs.keys():
            (spec, param), (new_spec, new_param) = ours[name], theirs[name]
            if spec.requires_grad != new_spec.requires_grad:
                told.append(f"{name!r} was {'unfrozen' if new_spec.requires_grad else 'frozen'}")
            elif param is not new_param or id(param) in self._swapped:
                told.append(f"{name!r} was replaced")
            elif spec.dtype != new_spec.dtype:
                told.append(f"{name!r} was cast to {new_spec.dtype}")
        return "; ".join(sorted(told)) or "nothing that matters"
