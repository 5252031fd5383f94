"""Placements and DTensor: what torch's own tracing of them leaves out."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.tracing.collectives import named
from paceline.tracing.import_hook import when_imported
from paceline.tracing.operator_namespace import operators
from paceline.tracing.registry import SpecialRow, stand_in


def metadata(tensor: Tensor, requires_grad: bool, with_layout: bool) -> list[int]:
    """What ranks compare, as numbers. How many there are depends on the number of dimensions."""
    about = [_torch.dtype_number(tensor.dtype), int(requires_grad)]
    return [*about, tensor.dim(), *tensor.shape, *tensor.stride()] if with_layout else about


def check_same(tensor: Tensor, requires_grad: bool, with_layout: bool, group: str) -> None:
    """The operator: raise on all ranks, unless all have a tensor of the same kind."""
    process_group = _torch.group_named(group)
    mine = torch.tensor(metadata(tensor, requires_grad, with_layout))
    size = dist.get_world_size(process_group)
    length = torch.tensor([len(mine), -len(mine)])
    dist.all_reduce(length, dist.ReduceOp.MAX, process_group)
    alike = bool(length[0] == -length[1])
    if alike:
        everybody = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(everybody, mine, process_group)
        alike = all(torch.equal(one, mine) for one in everybody)
    if not alike:
        raise ValueError("Inconsistent tensor metadata (including shape and stride) across ranks.")


CHECK_SCHEMA = "(Tensor tensor, bool requires_grad, bool with_layout, str group) -> ()"


# --- what is traced in place of torch's functions; filled in when DTensor is imported, which takes long ------------


torchs_from_local = stand_in()
torchs_distribute_tensor = stand_in()


def current_mesh():
    """The mesh of the innermost ``with mesh:`` around the compiled function; torch's forms take it as a constant."""
    return _torch.mesh_environment().get_current_mesh()


def from_local(*args, **kwargs):
    # Arguments are looked at in the order in which they are written, since that becomes the order of a graph's inputs.
    values = {**dict(zip(("local_tensor", "device_mesh", "placements"), args, strict=False)), **kwargs}
    given = [name for name, value in values.items() if value is not None]
    if "device_mesh" in given and not kwargs.get("run_check"):
        return torchs_from_local(*args, **kwargs)
    return completed_from_local(*args, **kwargs)


def completed_from_local(local_tensor, device_mesh=None, placements=None, *, run_check=False, **more):
    if device_mesh is None:
        device_mesh = current_mesh()
    if run_check:
        with_layout = more.get("shape") is None
        operators.check_same(local_tensor.detach(), local_tensor.requires_grad, with_layout, named(None))
        for index in range(device_mesh.ndim):
            if placements is None or placements[index].is_replicate():
                local_tensor = local_tensor.contiguous()
                dist.broadcast(local_tensor, group=device_mesh.get_group(index), group_src=0)
    return torchs_from_local(local_tensor, device_mesh, placements, run_check=False, **more)


def distribute_tensor(tensor, device_mesh=None, placements=None, *, src_data_rank=0):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if device_mesh is None:
        device_mesh = current_mesh()
    if (
        isinstance(tensor, DTensor)
        or tensor.requires_grad
        or not all(isinstance(one, (Shard, Replicate)) for one in placements or ())
    ):
        return torchs_distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    if placements is None:
        placements = [Replicate()] * device_mesh.ndim
    local = tensor.clone(memory_format=torch.contiguous_format)
    for index, placement in enumerate(placements):
        if src_data_rank is not None:
            dist.broadcast(local, group=device_mesh.get_group(index), group_src=src_data_rank)
        if placement.is_shard():
            parts = local.chunk(device_mesh.size(index), placement.dim)
            rank = device_mesh.get_local_rank(index)
            local = parts[rank] if rank < len(parts) else local.narrow(placement.dim, 0, 0)
            local = local.clone(memory_format=torch.contiguous_format)
    return torchs_from_local(
        local, device_mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _install() -> None:
    from torch.distributed import tensor

    for original, alias, traced in (
        (tensor.DTensor.from_local, torchs_from_local, from_local),
        (tensor.distribute_tensor, torchs_distribute_tensor, distribute_tensor),
    ):
        _torch.trace_as(alias, original)
        _torch.trace_instead(original, traced)


ROWS = (
    SpecialRow(
        "DTensor.from_local(run_check=True)",
        "an operator that compares what ranks have, and broadcasts; else torch's form",
        lambda: when_imported("torch.distributed.tensor", _install),
    ),
    SpecialRow(
        "distribute_tensor",
        "a broadcast for each dimension of the mesh, and a slice",
        lambda: None,  # put in place by the row above
    ),
    SpecialRow("type(placement) == Shard", "a constant", _torch.compare_opaque_classes),
)
