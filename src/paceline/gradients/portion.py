"""This rank's part of a parameter that is distributed over other ranks (a ``DTensor``: tensor parallelism).

[Note: portions]
The ranks of a wrapper's group hold the same part of such a parameter: each has a replica of it. So the local tensor is
what is compared, broadcast and averaged, and no other rank of the parameter's own mesh is asked. To the reducer a
:class:`Portion` stands for the parameter: its ``grad`` is the local tensor of the gradient, which lives in a bucket
like any other. For the user, parameter and gradient stay DTensors.

Autograd may bring a gradient whose placement differs from its parameter's, because it has yet to be summed over the
mesh (as for a norm under sequence parallelism). It is brought to the parameter's placement first, by a collective of
the mesh: a rank that did not use the parameter could not know what placement its zeros should have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.errors import StateError
from paceline.gradients.plan import ParameterSpec


class Portion:
    """Stands for ``whole``, a DTensor, and has the local tensor of its gradient as ``grad``."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    @property
    def local(self) -> Tensor:
        return _torch.local_tensor(self.whole)

    def redistribute_grad(self) -> Any:
        """Bring the gradient to the parameter's placement. If it has another one, this is a collective of the mesh."""
        whole = self.whole
        grad = whole.grad
        if grad is not None and grad.placements != whole.placements:
            grad = whole.grad = grad.redistribute(placements=whole.placements)
        return grad

    @property
    def grad(self) -> Tensor | None:
        grad = self.redistribute_grad()
        if grad is None:
            return None
        if grad.requires_grad:
            # With ``create_graph=True`` it matters how the gradient came about, and not where it lives.
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
    """Which part of which whole the parameter is, as ranks compare it. The text is empty for a plain parameter."""
    if not _torch.is_dtensor(param):
        return ""
    coordinate = param.device_mesh.get_coordinate() or ()
    # Along dimensions in which it is replicated, the coordinate does not matter.
    part = [where for where, placement in zip(coordinate, param.placements, strict=False) if placement.is_shard()]
    described = f"{', '.join(map(str, param.placements))} of {tuple(param.shape)}"
    return f"{described}, part {', '.join(map(str, part))}" if part else described


def check_placement(name: str, param: Tensor, *, kind: str = "Parameter") -> None:
    """Refuse a tensor whose values cannot be sent as its elements."""
    if _torch.is_dtensor(param):
        if _torch.has_partial_placement(param):
            raise StateError(
                f"{kind} {name!r} is a DTensor with a partial placement ({describe_placement(param)}): its value is "
                "the sum of what several ranks hold, so that no single rank can update it. Redistribute it to "
                "Replicate() or Shard(dim) before wrapping the module."
            )
    elif hasattr(param, "__tensor_flatten__"):
        # Tensors that are made of other tensors have this method.
        raise StateError(
            f"{kind} {name!r} is a {type(param).__name__}, which holds its values in other tensors; only plain "
            "tensors and DTensors can be synchronised. Leave it out with "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)."
        )


def check_parameters(specs: Sequence[ParameterSpec], params: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Refuse parameters of which the ranks of ``group`` hold different parts, which must not be averaged."""
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
                f"{kind} {name!r} is a DTensor over a mesh that has rank {dist.get_rank()} together with rank "
                f"{', '.join(map(str, both))} of this wrapper's process group. These ranks hold different parts of one "
                "replica, which cannot be synchronised. Use a mesh with a dimension for each, "
                "mesh = init_device_mesh(device, (n, m), mesh_dim_names=('dp', 'tp')): distribute the module over "
                "mesh['tp'] and wrap with device_mesh=mesh['dp']."
            )
