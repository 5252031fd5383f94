"""Finding the tensors in what a forward returns, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.autograd.graph import Node

_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.nn.Module)
# Only where RPC is built in; its absence must not matter to anybody else.
_RRef: type | None = getattr(rpc, "RRef", None)


def find_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, dataclasses, RRefs this rank owns, and objects with attributes."""
    # Kept alive while we look: a container made on demand would leave its id to the next one.
    seen: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            yield item
            continue
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        stack.extend(reversed(_children(item)))


def _children(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if _RRef is not None and isinstance(item, _RRef):
        return [item.local_value()] if item.is_owner() else []  # type: ignore[attr-defined]
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in fields(item)]
    if isinstance(item, type) or callable(item):
        return []
    attributes = list(getattr(item, "__dict__", {}).values())
    for owner in type(item).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        attributes += [getattr(item, name) for name in names if hasattr(item, name)]
    return attributes


def unreachable_params(outputs: list[Tensor], params: list[Tensor]) -> frozenset[int]:
    """The indices of the ``params`` that no path of the autograd graph leads to from ``outputs``."""
    index = {id(param): n for n, param in enumerate(params)}
    missing = set(index.values())
    seen: set[Node] = set()
    stack: list[Node] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    for output in outputs:
        missing.discard(index.get(id(output), -1))
    while stack and missing:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            missing.discard(index.get(id(variable), -1))
        stack.extend(child for child, _ in node.next_functions if child is not None)
    return frozenset(missing)


def first_param_node(outputs: list[Tensor], is_param: Callable[[Tensor], bool]) -> Node | None:
    """The node of some parameter that the autograd graph of ``outputs`` leads to; None if there is none.

    Stops at the first one, which in most models is a step or two away.
    """
    seen: set[Node] = set()
    stack: list[Node] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and is_param(variable):
            return node
        stack.extend(child for child, _ in node.next_functions if child is not None)
    return None


class _Anchor(torch.autograd.Function):
    """Ties a tensor to a leaf, so that a backward through it is noticed although no parameter was used."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        # Not a view: users change outputs in place, which autograd forbids for views made in a function.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def tie_to_graph(value: Any, anchor: Tensor) -> Any:
    """``value`` with its first floating-point tensor made part of the autograd graph.

    Only plain containers are entered: an object of the user's is not rebuilt behind his back.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            return _Anchor.apply(value, anchor)
        return value
    if type(value) in (list, tuple):
        items = list(value)
        for n, item in enumerate(items):
            tied = tie_to_graph(item, anchor)
            if tied is not item:
                items[n] = tied
                return type(value)(items)
    if type(value) is dict:
        for key, item in value.items():
            tied = tie_to_graph(item, anchor)
            if tied is not item:
                return {**value, key: tied}
    return value


def move_to_device(value: Any, device: torch.device | str) -> Any:
    """``value`` with the tensors in its containers on ``device``; what is there already stays the same object."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move_to_device(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, move_to_device(item, device)) for key, item in value.items())
    return value
