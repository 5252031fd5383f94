"""Placements and distributed tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tests.tracing.row import Rows

row = Rows(3)


row.add("Shard(dim)", lambda at: [Shard(0), Shard(1)], lambda: [Shard(0), Shard(dim=1)])
row.add("Replicate()", lambda at: Replicate(), lambda: Replicate())
row.add("Partial()", lambda at: [Partial("sum"), Partial("avg")], lambda: [Partial(), Partial("avg")])


@row("placement.is_shard()", lambda at: [True, False, True, False])
def is_shard():
    return [Shard(0).is_shard(), Replicate().is_shard(), Shard(1).is_shard(1), Shard(1).is_shard(dim=0)]


@row("placement.is_replicate()", lambda at: [False, True, False])
def is_replicate():
    return [Shard(0).is_replicate(), Replicate().is_replicate(), Partial().is_replicate()]


@row("placement.is_partial()", lambda at: [False, True, True, False])
def is_partial():
    return [
        Shard(0).is_partial(),
        Partial().is_partial(),
        Partial().is_partial("sum"),
        Partial().is_partial("max"),
    ]


row.add("placement.dim", lambda at: 1, lambda x, sharded: (x + sharded.dim, sharded.dim))


row.add("placement.reduce_op", lambda at: ["sum", "max"], lambda: [Partial().reduce_op, Partial("max").reduce_op])


@row("placement == placement", lambda at: [True, False, False, True, True])
def equality():
    return [
        Shard(0) == Shard(0),
        Shard(0) == Shard(1),
        Replicate() == Partial(),
        Replicate() == Replicate(),
        Partial("sum") != Partial("avg"),
    ]


@row("placement in [placements]", lambda at: [True, False, True])
def membership_in_list(sharded):
    known = [Shard(1), Replicate()]
    return [sharded in known, Partial() in known, Replicate() in tuple(known)]


@row("{placement: ...}[placement]", lambda at: [1, 2])
def dictionary_key():
    table = {Shard(0): 1, Replicate(): 2}
    return [table[Shard(0)], table[Replicate()]]


@row("hash(placement)", lambda at: [True, False])
def hash_of_placement():
    return [hash(Shard(0)) == hash(Shard(0)), hash(Shard(0)) == hash(Shard(1))]


@row("isinstance(placement, Shard)", lambda at: [True, False, True])
def is_instance(sharded):
    return [isinstance(sharded, Shard), isinstance(sharded, Replicate), isinstance(Partial(), Placement)]


@row("placements as arguments", lambda at: [Shard(1), Replicate(), Partial("avg")])
def as_arguments(x, placements):
    return x + len(placements), list(placements)


@row("type(placement)", lambda at: [True, False])
def type_of_placement(sharded):
    return [type(sharded) is Shard, type(sharded) == Replicate]  # noqa: E721


@row("DTensor.from_local(x, mesh, placements)", grad=True, inductor=True)
def from_local(x, mesh):
    return DTensor.from_local(x * 2, mesh, [Shard(0)]).to_local()


@row("DTensor.from_local with keywords", grad=True)
def from_local_keywords(x, mesh):
    return DTensor.from_local(x * 2, device_mesh=mesh, placements=[Replicate()], run_check=False).to_local()


@row("DTensor.from_local with tuple of placements from outside")
def from_local_of_outside(x, grid, pair_of_placements):
    return DTensor.from_local(x * 2, grid, pair_of_placements)


row.add("DTensor.from_local(x, mesh)", None, lambda x, mesh: DTensor.from_local(x * 2, mesh).to_local(), grad=True)


@row("DTensor.from_local(run_check=True)")
def from_local_checked(x, mesh):
    return DTensor.from_local(x * 0, mesh, [Replicate()], run_check=True).to_local()


@row("DTensor.from_local(shape=..., stride=...)")
def from_local_with_shape(x, mesh):
    n = x.shape[0] * mesh.size()
    return DTensor.from_local(x * 2, mesh, (Shard(0),), run_check=False, shape=torch.Size([n]), stride=(1,))


@row("DTensor.from_local(grad_placements=...)", grad=True)
def from_local_with_grad_placements(x, mesh):
    return DTensor.from_local(x * 2, mesh, [Replicate()], grad_placements=[Replicate()]).to_local()


@row("DTensor.from_local of a partial value")
def from_local_partial(x, mesh):
    return DTensor.from_local(x * 2, mesh, [Partial()]).full_tensor(), DTensor.from_local(x, mesh, [Partial("max")])


@row("DTensor.from_local on a sliced mesh", ranks=4)
def from_local_on_slice(x, grid):
    return DTensor.from_local(x * 2, grid["tp"], [Shard(0)]).full_tensor()


row.add("DTensor.to_local()", None, lambda x, mesh: (DTensor.from_local(x, mesh, [Shard(0)]) * 3).to_local(), grad=True)


@row("DTensor.to_local(grad_placements=...)", grad=True)
def to_local_with_grad_placements(x, mesh):
    return (
        DTensor.from_local(x, mesh, [Shard(0)])
        .redistribute(placements=[Replicate()])
        .to_local(grad_placements=[Partial()])
    )


@row("DTensor.redistribute(mesh, placements)", grad=True, inductor=True)
def redistribute(x, mesh):
    return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()


@row("DTensor.redistribute(placements=...)", grad=True)
def redistribute_keywords(x, mesh):
    return DTensor.from_local(x, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


@row("DTensor.redistribute(async_op=True)")
def redistribute_async(x, mesh):
    return DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True).to_local() + 1


@row("DTensor.full_tensor()", grad=True, inductor=True)
def full_tensor(x, mesh):
    return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()


@row("DTensor.full_tensor(grad_placements=...)", grad=True)
def full_tensor_with_grad_placements(x, mesh):
    return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor(grad_placements=[Replicate()])


@row("dtensor.placements, .device_mesh, .shape", lambda at: [(Shard(0),), at.mesh, torch.Size([2 * at.size**2])])
def members(x, mesh):
    d = DTensor.from_local(x, mesh, [Shard(0)])
    return x + 1, [d.placements, d.device_mesh, d.shape]


@row("distribute_tensor(x, mesh, placements)")
def distribute(x, mesh):
    return distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).to_local() + x[0]


@row("a DTensor as argument and result", builds=True)
def dtensor_in_and_out(mesh):
    weight = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])

    def function(x):
        # It does not return the product itself. From the second default group on, torch (2.13) gives that a fake mesh.
        return (weight * 2 + x[0]).to_local(), weight, weight.placements

    return function, None
