"""This rank's part of a parameter that is distributed over other ranks (a ``DTensor``: tensor parallelism).

[Note: portions]
The ranks of a wrapper's group hold the same part of such a parameter, each a replica of it. So what is compared,
broadcast and averaged is the local tensor, and nobody else of the parameter's own mesh is asked. To the reducer a
:class:`Portion` stands for the parameter: its ``grad`` is the local tensor of the gradient, which lives in a bucket
as any other. For the user parameter and gradient stay DTensors.

Autograd may bring a gradient that is placed otherwise than its parameter: one that is to be summed over the mesh yet
(a norm under sequence parallelism). It is brought to the parameter's placement first, a collective of the mesh, since
ranks that did not use the parameter cannot know what their zeros are to be part of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.errors import StateError
from paceline.plan import ParameterSpec


class Portion:
    """Has the gradient of ``whole``, a DTensor, as the local tensor that it is here."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    @property
    def local(self) -> Tensor:
        return _torch.local_tensor(self.whole)

    def place_grad(self) -> Any:
        """Bring the gradient to the parameter's placement, a collective of its mesh where it is not there yet."""
        whole = self.whole
        grad = whole.grad
        if grad is not None and grad.placements != whole.placements:
            grad = whole.grad = grad.redistribute(placements=whole.placements)
        return grad

    @property
    def grad(self) -> Tensor | None:
        grad = self.place_grad()
        if grad is None:
            return None
        if grad.requires_grad:
            # ``create_graph=True``: how it came about matters, and not where it lives.
            local: Tensor = grad.to_local()
            return _torch.settle_async_tensor(local)
        return _torch.local_tensor(grad)

    @grad.setter
    def grad(self, local: Tensor | None) -> None:
        whole = self.whole
        if local is None or not local.requires_grad:
            whole.grad = None if local is None else _torch.wrap_local(local, whole)
            return
        whole.grad = type(whole).from_local(
            local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def describe_placement(param: Tensor) -> str:
    """What ranks compare of a parameter besides its local tensor: of what it is which part. Empty for plain ones."""
    if not _torch.is_dtensor(param):
        return ""
    coordinate = param.device_mesh.get_coordinate() or ()
    # Where it is replicated, one place in the mesh is as good as another.
    part = [where for where, placement in zip(coordinate, param.placements, strict=False) if placement.is_shard()]
    described = f"{', '.join(map(str, param.placements))} of {tuple(param.shape)}"
    return f"{described}, part {', '.join(map(str, part))}" if part else described


def check_placement(name: str, param: Tensor, *, kind: str = "Parameter") -> None:
    """Refuse a tensor whose elements are not its own to send."""
    if _torch.is_dtensor(param):
        if _torch.has_partial_placement(param):
            raise StateError(
                f"{kind} {name!r} is a DTensor with a partial placement ({describe_placement(param)}): its value is "
                "the sum of what several ranks hold, and so no rank's to update. Redistribute it to Replicate() or "
                "Shard(dim) before wrapping the module."
            )
    elif hasattr(param, "__tensor_flatten__"):
        # The protocol of tensors made of other tensors.
        raise StateError(
            f"{kind} {name!r} is a {type(param).__name__}, which holds its values in other tensors; only plain "
            "tensors and DTensors are made alike. Leave it out with "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)."
        )


def check_parameters(specs: Sequence[ParameterSpec], params: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Refuse parameters of which the ranks of ``group`` hold different parts: those are not to be averaged."""
    _check_group([(s.name, p) for s, p in zip(specs, params, strict=True) if s.placement], group, kind="Parameter")


def check_buffers(buffers: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Refuse buffers that cannot be broadcast in ``group``, for the same reasons as parameters."""
    special = [(name, buffer) for name, buffer in buffers.items() if type(buffer) is not Tensor]
    for name, buffer in special:
        check_placement(name, buffer, kind="Buffer")
    _check_group([(name, buffer) for name, buffer in special if _torch.is_dtensor(buffer)], group, kind="Buffer")


def _check_group(distributed: Sequence[tuple[str, Any]], group: dist.ProcessGroup, *, kind: str) -> None:
    if not distributed:
        return
    others = frozenset(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for name, tensor in distributed:
        both = sorted(others.intersection(_torch.mesh_ranks(tensor)))
        if both:
            raise StateError(
                f"{kind} {name!r} is a DTensor over a mesh in which rank {dist.get_rank()} is together with rank "
                f"{', '.join(map(str, both))} of this wrapper's process group, so its ranks hold parts of one replica, "
                "which cannot be made alike. Use a mesh with a dimension for each, "
                "mesh = init_device_mesh(device, (n, m), mesh_dim_names=('dp', 'tp')): distribute the module over "
                "mesh['tp'] and wrap with device_mesh=mesh['dp']."
            )
