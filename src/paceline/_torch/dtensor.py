"""DTensors: their local tensors as they are, where the public ways make new ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor
from torch.nn import Parameter

from paceline._torch.c10d import settle_async_tensor

DTensor = Any
# Nearly all tensors are of these classes, and isinstance() is slow with the metaclass of tensors.
_PLAIN = frozenset((Tensor, Parameter))


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Nothing is imported to find out: if the module is not there, there is none."""
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor object that a DTensor holds, once it is complete; other tensors are returned as they are.

    ``to_local()`` makes a new tensor at each call, but Paceline knows by identity whether a gradient is in its bucket.
    """
    return settle_async_tensor(tensor._local_tensor) if is_dtensor(tensor) else tensor


def wrap_local(local: Tensor, like: DTensor) -> Tensor:
    """A DTensor around this very tensor, placed as ``like`` is; ``DTensor.from_local`` takes a view of it."""
    return type(like)(local, like._spec, requires_grad=False)


def has_partial_placement(tensor: DTensor) -> bool:
    """Whether its value is a reduction, such as the sum, of what ranks hold."""
    return any(placement.is_partial() for placement in tensor.placements)


def mesh_ranks(tensor: DTensor) -> Sequence[int]:
    """The global ranks over which a DTensor is distributed, this one among them."""
    return tensor.device_mesh.mesh.flatten().tolist()
