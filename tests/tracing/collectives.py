"""Collectives in place, as people write them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.tracing.row import Rows

row = Rows(4, inductor=True)
asynchronous = Rows(4)


def both(name, asynchronous_name, answer=None, **more):
    """Two rows for a function of ``later``: one that blocks, and one with ``async_op=True``."""

    def add(function):
        row.add(name, answer, function, given={"later": False}, **more)
        more.pop("inductor", None)
        asynchronous.add(asynchronous_name, answer, function, given={"later": True}, **more)

    return add


def finish(work):
    if work is not None:
        work.wait()


# --- all_reduce: every op -----------------------------------------------------------------------------------


@row("dist.all_reduce(x)", lambda at: sum(at.all_x()))
def all_reduce(x):
    dist.all_reduce(x)
    return x + 1, x.clone()


ALL_REDUCED = {
    "SUM": lambda at: sum(at.all_x()),
    "AVG": lambda at: sum(at.all_x()) / at.size,
    "PRODUCT": lambda at: torch.stack(at.all_x()).prod(0),
    "MIN": lambda at: at.x(0),
    "MAX": lambda at: at.x(at.size - 1),
    "BAND": lambda at: at.x(0).int() & at.x(1).int(),
    "BOR": lambda at: at.x(0).int() | at.x(1).int(),
    "BXOR": lambda at: at.x(0).int() ^ at.x(1).int(),
}


def all_reduce_op(x, op):
    y = x.int() if op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR) else x * 1
    dist.all_reduce(y, op=op)
    return x + 1, y


for _name, _answer in ALL_REDUCED.items():
    _given = {"op": getattr(dist.ReduceOp, _name)}
    row.add(f"dist.all_reduce(op={_name})", _answer, all_reduce_op, inductor=False, given=_given)


@row("dist.all_reduce with an op from outside", lambda at: at.x(at.size - 1), inductor=False)
def all_reduce_op_from_outside(x, max_op):
    dist.all_reduce(x, op=max_op)
    return x + 1, x.clone()


@row("dist.all_reduce(group=subgroup)", lambda at: at.x())
def all_reduce_subgroup(x, solo):
    dist.all_reduce(x, group=solo)
    return x + 1, x.clone()


@row("dist.all_reduce of a view", lambda at: torch.cat([sum(at.all_x())[:2], at.x()[2:]]))
def all_reduce_view(x):
    dist.all_reduce(x[:2])
    return x + 1, x.clone()


@row("dist.all_reduce in a loop over parameters", lambda at: sum(at.all_x()) / at.size, inductor=False)
def all_reduce_loop(x):
    parts = list(x.clone().chunk(2))
    for part in parts:
        dist.all_reduce(part)
        part.div_(dist.get_world_size())
    return x + 1, torch.cat(parts)


@row("dist.all_reduce of a group this rank is not in", lambda at: at.x(), inductor=False)
def all_reduce_outside(x, solo_of_first):
    if solo_of_first is not None:
        dist.all_reduce(x, group=solo_of_first)
    return x + 1, x.clone()


@row("dist.all_reduce of a transposed tensor", lambda at: sum(at.all_x()), inductor=False)
def all_reduce_transposed(x):
    y = x.clone()
    dist.all_reduce(y.view(2, -1).t())
    return x + 1, y


@row(
    "dist.all_reduce of complex numbers", lambda at: torch.complex(sum(at.all_x()), 2 * sum(at.all_x())), inductor=False
)
def all_reduce_complex(x):
    y = torch.complex(x, 2 * x)
    dist.all_reduce(y)
    return x + 1, y


@row("dist.all_reduce under torch.no_grad()", grad=True)
def all_reduce_no_grad(x):
    y = x * 2
    with torch.no_grad():
        z = y * 3
        dist.all_reduce(z)
        work = dist.all_reduce(z, op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
    return y * z


@row("dist.broadcast of a parameter under torch.no_grad()", builds=True, grad=True)
def broadcast_parameter(rank):
    weight = torch.nn.Parameter(torch.full((1,), 2.0 + rank))

    def function(x):
        with torch.no_grad():
            dist.broadcast(weight, 0)
            dist.all_reduce(weight)
        return x * weight

    return function, lambda: weight.detach().clone()


# --- all_gather, reduce_scatter, all_to_all -----------------------------------------------------------------


@both("dist.all_gather(list, x)", "dist.all_gather(async_op=True)", lambda at: at.all_x())
def all_gather(x, size, later):
    out = [torch.empty_like(x) for _ in range(size)]
    finish(dist.all_gather(out, x, async_op=later))
    return x + 1, out


@row("dist.all_gather(list, x, group=subgroup)", lambda at: [at.x()], inductor=False)
def all_gather_subgroup(x, solo):
    out = [torch.empty_like(x)]
    dist.all_gather(out, x, group=solo)
    return x + 1, out


@row("dist.all_gather into parts of one tensor", lambda at: torch.cat(at.all_x()))
def all_gather_parts(x, size):
    out = x.new_empty(size * x.shape[0])
    dist.all_gather(list(out.chunk(size)), x)
    return x + 1, out


@both(
    "dist.all_gather_into_tensor(out, x)",
    "dist.all_gather_into_tensor(async_op=True)",
    lambda at: torch.cat(at.all_x()),
    inductor=False,
)
def all_gather_into_tensor(x, group, later):
    out = x.new_empty(group.size() * x.shape[0])
    finish(dist.all_gather_into_tensor(out, x, group=group, async_op=later))
    return x + 1, out


@row("dist.all_gather_into_tensor, stacked", lambda at: torch.stack(at.all_x()), gloo=False, inductor=False)
def all_gather_into_stack(x, size):
    out = x.new_empty(size, x.shape[0])
    dist.all_gather_into_tensor(out, x)
    return x + 1, out


@row("dist.all_gather_single(out, x)", lambda at: torch.cat(at.all_x()))
def all_gather_single(x, size):
    out = x.new_empty(size * x.shape[0])
    dist.all_gather_single(out, x)
    return x + 1, out


@both(
    "dist.reduce_scatter(out, list)",
    "dist.reduce_scatter(async_op=True)",
    lambda at: sum(at.all_x()).chunk(at.size)[at.rank],
)
def reduce_scatter(x, size, later):
    parts = list(x.clone().chunk(size))
    out = torch.empty_like(parts[0])
    finish(dist.reduce_scatter(out, parts, async_op=later))
    return x + 1, out


@both(
    "dist.reduce_scatter_tensor(out, x)",
    "dist.reduce_scatter_tensor(async_op=True)",
    lambda at: sum(at.all_x()).chunk(at.size)[at.rank],
)
def reduce_scatter_tensor(x, size, later):
    out = x.new_empty(x.shape[0] // size)
    finish(dist.reduce_scatter_tensor(out, x, async_op=later))
    return x + 1, out


@row("dist.reduce_scatter_tensor(op=MAX)", lambda at: at.x(at.size - 1).chunk(at.size)[at.rank], inductor=False)
def reduce_scatter_tensor_max(x, size):
    out = x.new_empty(x.shape[0] // size)
    dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.MAX)
    return x + 1, out


@row("dist.reduce_scatter_single(out, x)", lambda at: sum(at.all_x()).chunk(at.size)[at.rank])
def reduce_scatter_single(x, size):
    out = x.new_empty(x.shape[0] // size)
    dist.reduce_scatter_single(out, x)
    return x + 1, out


@both(
    "dist.all_to_all(list, list)",
    "dist.all_to_all(async_op=True)",
    lambda at: [x.chunk(at.size)[at.rank] for x in at.all_x()],
)
def all_to_all(x, size, later):
    parts = list(x.clone().chunk(size))
    out = [torch.empty_like(part) for part in parts]
    finish(dist.all_to_all(out, parts, async_op=later))
    return x + 1, out


@both(
    "dist.all_to_all_single(out, x)",
    "dist.all_to_all_single(async_op=True)",
    lambda at: torch.cat([x.chunk(at.size)[at.rank] for x in at.all_x()]),
)
def all_to_all_single(x, later):
    out = torch.empty_like(x)
    finish(dist.all_to_all_single(out, x, async_op=later))
    return x + 1, out


@row(
    "dist.all_to_all_single with split sizes",
    lambda at: torch.cat([x[:1] for x in at.all_x()]) if at.rank == 0 else torch.cat([x[1:] for x in at.all_x()]),
    fake=False,
)
def all_to_all_single_splits(x):
    # Rank 0 is sent one element by each, rank 1 the other three; 2 ranks only.
    each = 1 if dist.get_rank() == 0 else 3
    out = x.new_empty(2 * each)
    dist.all_to_all_single(out, x, output_split_sizes=[each, each], input_split_sizes=[1, 3])
    return x + 1, out


# --- rooted -------------------------------------------------------------------------------------------------


@both("dist.broadcast(x, src)", "dist.broadcast(async_op=True)", lambda at: at.x(0))
def broadcast(x, later):
    finish(dist.broadcast(x, 0, async_op=later))
    return x + 1, x.clone()


@row("dist.broadcast(x, group_src=...)", lambda at: at.x(at.size - 1), inductor=False)
def broadcast_group_src(x, reverse):
    dist.broadcast(x, group=reverse, group_src=0)
    return x + 1, x.clone()


@both(
    "dist.reduce(x, dst)",
    "dist.reduce(async_op=True)",
    lambda at: sum(at.all_x()) if at.rank == 0 else None,
    deterministic_input=False,
)
def reduce(x, later):
    finish(dist.reduce(x, dst=0, async_op=later))
    return (x.shape, x.clone()) if dist.get_rank() == 0 else (x.shape, None)


@row("dist.reduce(op=MAX)", lambda at: at.x(1) if at.rank == 1 else None, deterministic_input=False, inductor=False)
def reduce_max(x):
    dist.reduce(x, 1, op=dist.ReduceOp.MAX)
    return (x.shape, x.clone()) if dist.get_rank() == 1 else (x.shape, None)


@both("dist.gather(x, list, dst)", "dist.gather(async_op=True)", lambda at: at.all_x() if at.rank == 0 else None)
def gather(x, size, later):
    out = [torch.empty_like(x) for _ in range(size)] if dist.get_rank() == 0 else None
    finish(dist.gather(x, out, dst=0, async_op=later))
    return x + 1, out


@both("dist.scatter(out, list, src)", "dist.scatter(async_op=True)", lambda at: at.x(0) * (at.rank + 1))
def scatter(x, size, later):
    out = torch.empty_like(x)
    parts = [x * (r + 1) for r in range(size)] if dist.get_rank() == 0 else None
    finish(dist.scatter(out, parts, src=0, async_op=later))
    return x + 1, out


@both("dist.barrier()", "dist.barrier(async_op=True)")
def barrier(x, later):
    y = x * 2
    finish(dist.barrier(async_op=later))
    return y + 1


@row("dist.barrier(group)", inductor=False)
def barrier_of_group(x, other):
    dist.barrier(group=other)
    return x + 1


@row("dist.monitored_barrier()", fake=False)
def monitored_barrier(x):
    dist.monitored_barrier()
    return x + 1
