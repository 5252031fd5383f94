"""Point-to-point, coalesced and functional collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.tracing.row import Rows

row = Rows(4, inductor=True)


# --- point to point -----------------------------------------------------------------------------------------


@row("dist.send / dist.recv", lambda at: at.x(0))
def send_recv(x):
    if dist.get_rank() == 0:
        dist.send(x, dst=1)
        return x + 1, x.clone()
    out = torch.empty_like(x)
    dist.recv(out, src=0)
    return x + 1, out


@row("the value of dist.recv()", lambda at: 0, inductor=False, fake=False)
def value_of_recv(x):
    if dist.get_rank() == 0:
        dist.send(x, 1)
        return x + 1, 0
    out = torch.empty_like(x)
    source = dist.recv(out, 0)
    return out + 1, source


@row("dist.recv() from any rank", lambda at: at.x(0), fake=False)
def recv_any(x):
    if dist.get_rank() == 0:
        dist.send(x, 1)
        return x + 1, x.clone()
    out = torch.empty_like(x)
    source = dist.recv(out)
    return x + 1, out + source


@row("dist.isend / dist.irecv", lambda at: at.x(at.previous))
def isend_irecv(x, next, previous):
    out = torch.empty_like(x)
    sending = dist.isend(x, next)
    receiving = dist.irecv(out, previous)
    receiving.wait()
    sending.wait()
    return x + 1, out


@row("dist.send(group_dst=...) / dist.recv(group_src=...)", lambda at: at.x(0), inductor=False)
def group_peers(x, reverse):
    # In the reversed group of 2, rank 0 is number 1.
    out = x.clone()
    if dist.get_rank() == 0:
        dist.send(x, group=reverse, group_dst=0)
    elif dist.get_rank() == 1:
        dist.recv(out, group=reverse, group_src=1)
    return x + 1, out


@row("dist.isend / dist.irecv with tags", lambda at: [at.x(at.previous), at.x(at.previous) * 2])
def tags(x, next, previous):
    one, two = torch.empty_like(x), torch.empty_like(x)
    y = x * 2
    works = [
        dist.isend(x, next, tag=1),
        dist.isend(y, next, tag=2),
        dist.irecv(two, previous, tag=2),
        dist.irecv(one, previous, tag=1),
    ]
    for work in works:
        work.wait()
    return x + 1, [one, two]


@row("dist.batch_isend_irecv(ops)", lambda at: at.x(at.previous))
def batch(x, next, previous):
    out = torch.empty_like(x)
    ops = [dist.P2POp(dist.isend, x, next), dist.P2POp(dist.irecv, out, previous)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return x + 1, out


@row("dist.batch_isend_irecv(ops of a group)", lambda at: at.x(at.previous), inductor=False)
def batch_of_group(x, next, previous, other):
    out = torch.empty_like(x)
    ops = [
        dist.P2POp(op=dist.irecv, tensor=out, peer=previous, group=other),
        dist.P2POp(op=dist.isend, tensor=x, peer=next, group=other),
    ]
    works = dist.batch_isend_irecv(ops)
    [work.wait() for work in works]
    return x + 1, out


# --- coalesced ----------------------------------------------------------------------------------------------


def coalescing_manager(x, group, later):
    a, b = x.clone(), x * 2
    with dist._coalescing_manager(group=group, device=x.device, async_ops=later) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    if later:
        manager.wait()
    return x + 1, [a, b]


for _call, _later in (("(): all_reduce", False), ("(async_ops=True)", True)):
    row.add(
        f"with dist._coalescing_manager{_call}",
        lambda at: [sum(at.all_x()), sum(at.all_x()) * 2],
        coalescing_manager,
        eager_on_gloo=False,
        given={"later": _later},
    )


@row("with dist._coalescing_manager(): all_gather_into_tensor", lambda at: torch.cat(at.all_x()), eager_on_gloo=False)
def coalescing_manager_gather(x, group):
    a, b = x.new_empty(group.size() * x.shape[0]), x.new_empty(group.size() * x.shape[0])
    with dist._coalescing_manager(group=group, device=x.device):
        dist.all_gather_into_tensor(a, x)
        dist.all_gather_into_tensor(b, x * 2)
    return b, a


@row(
    "with dist._coalescing_manager(): reduce_scatter_tensor",
    lambda at: sum(at.all_x()).chunk(at.size)[at.rank],
    eager_on_gloo=False,
)
def coalescing_manager_scatter(x, group):
    a, b = x.new_empty(x.shape[0] // group.size()), x.new_empty(x.shape[0] // group.size())
    with dist._coalescing_manager(group=group, device=x.device):
        dist.reduce_scatter_tensor(a, x)
        dist.reduce_scatter_tensor(b, x * 2)
    return b, a


@row("dist.all_reduce_coalesced([...])", lambda at: [sum(at.all_x()), sum(at.all_x()) * 2])
def all_reduce_coalesced(x):
    a, b = x.clone(), x * 2
    dist.all_reduce_coalesced([a, b])
    return x + 1, [a, b]


@row("dist.all_gather_coalesced([[...]], [...])", lambda at: [[x, x * 2] for x in at.all_x()])
def all_gather_coalesced(x, size):
    out = [[torch.empty_like(x), torch.empty_like(x)] for _ in range(size)]
    dist.all_gather_coalesced(out, [x, x * 2])
    return x + 1, out


# --- functional ---------------------------------------------------------------------------------------------


@row("funcol.all_reduce(x, op, group)", lambda at: sum(at.all_x()))
def functional_all_reduce(x, group):
    return x + 1, funcol.all_reduce(x, "sum", group) * 1


@row("funcol.all_reduce over a mesh's dimension", inductor=False)
def functional_all_reduce_mesh(x, mesh):
    return funcol.all_reduce(x, "avg", (mesh, 0)) * 1, funcol.all_reduce(x, "max", mesh) * 1


@row("funcol.all_gather_tensor(x, dim, group)", lambda at: torch.cat(at.all_x()), inductor=False)
def functional_all_gather(x, group):
    return x + 1, funcol.all_gather_tensor(x, 0, group) * 1


@row(
    "funcol.reduce_scatter_tensor(x, op, dim, group)",
    lambda at: sum(at.all_x()).chunk(at.size)[at.rank],
    inductor=False,
)
def functional_reduce_scatter(x, group):
    return x + 1, funcol.reduce_scatter_tensor(x, "sum", 0, group) * 1


@row("funcol.all_to_all_single(x, None, None, group)")
def functional_all_to_all(x, group):
    return x + 1, funcol.all_to_all_single(x, None, None, group) * 1


@row("funcol.broadcast(x, src, group)", lambda at: at.x(0))
def functional_broadcast(x, group):
    return x + 1, funcol.broadcast(x, 0, group) * 1


@row("funcol.permute_tensor(x, [dst], group)", lambda at: at.x(at.previous))
def functional_permute(x, group, ring):
    return x + 1, funcol.permute_tensor(x, ring, group) * 1


@row("funcol.all_reduce_coalesced([...])")
def functional_all_reduce_coalesced(x, group):
    a, b = funcol.all_reduce_coalesced([x, x * 2], "sum", group)
    return a + b


@row("funcol.all_gather_into_tensor_coalesced([...])")
def functional_all_gather_coalesced(x, group):
    a, b = funcol.all_gather_into_tensor_coalesced([x, x * 2], group)
    return a + b


@row("funcol.reduce_scatter_tensor_coalesced([...])")
def functional_reduce_scatter_coalesced(x, group):
    a, b = funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group)
    return a + b


@row("funcol.wait_tensor(x)", inductor=False)
def functional_wait(x, group):
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", group)) + 1
