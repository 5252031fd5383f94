"""The outputs of a forward: the tensors in them, and the parameters behind those."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.autograd.graph import Node

from paceline import _torch

_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.nn.Module)
# torch may be built without RPC, which must not matter to anybody else.
_RRef: type | None = getattr(rpc, "RRef", None)


def find_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, dataclasses, RRefs that this rank owns, and objects with attributes."""
    # Items are kept alive while we look: a container that was made on demand would leave its id to the next one.
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
    if _is_rref(item):
        return [item.local_value()] if item.is_owner() else []
    return list(_attributes(item).values())


def _is_rref(item: Any) -> bool:
    return _RRef is not None and isinstance(item, _RRef)


def _attributes(item: Any) -> dict[str, Any]:
    """The attributes of an object of the user's. Classes and functions have none."""
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in fields(item) if hasattr(item, field.name)}
    if isinstance(item, type) or callable(item):
        return {}
    attributes = dict(getattr(item, "__dict__", {}))
    for owner in type(item).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        attributes.update((name, getattr(item, name)) for name in names if hasattr(item, name))
    return attributes


def needs_grad(value: Any) -> bool:
    """Whether a backward can start from a tensor in these containers. For unknown objects the answer is yes."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(needs_grad(item) for item in value)
    if isinstance(value, dict):
        return any(needs_grad(item) for item in value.values())
    return not isinstance(value, _LEAVES)


def plain_tensors(value: Any) -> list[Tensor]:
    """The plain tensors in these containers that a backward can start from. A compiler can trace this function."""
    if isinstance(value, Tensor):
        return [value] if type(value) is Tensor and value.requires_grad else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in plain_tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in plain_tensors(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for field in fields(value) for tensor in plain_tensors(getattr(value, field.name, None))]
    return []


def _leaves(outputs: Iterable[Tensor]) -> Iterator[tuple[Node, Tensor]]:
    """The node and the tensor of each leaf that the autograd graph of ``outputs`` leads to."""
    seen: set[Node] = set()
    stack: list[Node] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield node, variable
        stack.extend(child for child, _ in node.next_functions if child is not None)


def unreachable_params(outputs: list[Tensor], params: list[Tensor]) -> frozenset[int]:
    """The indices of the ``params`` that no path of the autograd graph leads to from ``outputs``."""
    index = {id(param): n for n, param in enumerate(params)}
    missing = set(index.values()) - {index.get(id(output), -1) for output in outputs}
    for _, leaf in _leaves(outputs):
        missing.discard(index.get(id(leaf), -1))
        if not missing:
            break
    return frozenset(missing)


def first_param_node(output: Tensor, is_param: Callable[[Tensor], bool]) -> Node | None:
    """The node of some parameter that the autograd graph of ``output`` leads to; None if there is none.

    The search stops at the first one, which in most models is a node or two away.
    """
    return next((node for node, leaf in _leaves([output]) if is_param(leaf)), None)


def first_leaf_node(output: Tensor) -> Node | None:
    """The node of some leaf that the autograd graph of ``output`` leads to."""
    return next((node for node, _ in _leaves([output])), None)


class _Anchor(torch.autograd.Function):
    """Ties a tensor to a leaf, so that a backward through it is noticed although no parameter was used.

    It is written for ``torch.func`` too: vjp, vmap and the like run through whatever a wrapper returns.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, anchor: Tensor) -> Tensor:
        # It is not a view, since users change outputs in place, which autograd forbids for views made in a function.
        return tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save nothing: the gradient of a copy is the gradient of the original."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, anchor_tangent: Tensor | None) -> Tensor:
        return tangent.clone()


def tie(tensor: Tensor, anchor: Tensor) -> Tensor:
    """``tensor`` made part of the autograd graph, with ``anchor`` as its leaf."""
    if _torch.is_functionalizing():
        return tensor
    tied: Tensor = _Anchor.apply(tensor, anchor)
    return tied


def tie_to_graph(
    value: Any,
    anchor: Tensor,
    chosen: Callable[[Tensor], bool],
    *,
    tie: Callable[[Tensor, Tensor], Tensor] = tie,
    twins: dict[int, Any] | None = None,
) -> Any:
    """``value`` with its ``chosen`` floating-point tensors made part of the autograd graph.

    Containers and objects that hold one are copied; others stay the same object. ``twins`` has the copies so far, by
    the id of the original, since objects may lead back to themselves.
    """
    if isinstance(value, Tensor):
        return tie(value, anchor) if _can_be_tied(value) and chosen(value) else value
    copies: dict[int, Any] = {} if twins is None else twins

    def tied(item: Any) -> Any:
        return tie_to_graph(item, anchor, chosen, tie=tie, twins=copies)

    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(tied(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(tied(item) for item in value)
    if isinstance(value, dict):
        # It is copied and filled again, since some kinds of dictionary have attributes beside their items.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = tied(item)
        return copied
    if isinstance(value, _LEAVES):
        return value
    if id(value) in copies:
        return copies[id(value)]
    attributes = {} if _is_rref(value) else _attributes(value)
    if not any(_can_be_tied(tensor) and chosen(tensor) for tensor in find_tensors(attributes)):
        return value
    twin = copies[id(value)] = copy.copy(value)
    for name, item in attributes.items():
        object.__setattr__(twin, name, tied(item))
    return twin


def _can_be_tied(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def move_to_device(value: Any, device: torch.device | str) -> Any:
    """``value`` with the tensors in its containers on ``device``. What is there already stays the same object."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move_to_device(item, device) for item in value)
    if isinstance(value, dict):
        return type(value)((key, move_to_device(item, device)) for key, item in value.items())
    return value
