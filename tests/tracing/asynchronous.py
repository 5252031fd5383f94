"""Point 4: collectives with ``async_op=True``, and their handles."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.tracing.row import Rows

row = Rows(4, inductor=True)


@row("dist.all_reduce(async_op=True), work.wait()", lambda at: sum(at.all_x()))
def all_reduce_async(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1, x.clone()


@row("compute between a launch and its wait()", lambda at: sum(at.all_x()))
def all_reduce_overlapped(x, y):
    work = dist.all_reduce(x, async_op=True)
    z = y * 2
    work.wait()
    return x + z, x.clone()


@row("work.is_completed() after wait()", lambda at: True, fake=False)
def is_completed(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + 1, work.is_completed()


@row("work.is_completed() before wait()", lambda at: sum(at.all_x()))
def poll(x):
    work = dist.all_reduce(x, async_op=True)
    if not work.is_completed():
        work.wait()
    return x + 1, x.clone()


@row("while not work.is_completed()", lambda at: sum(at.all_x()), fake=False)  # never completed, on a fake group
def poll_until(x):
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    return x + 1, x.clone()


@row("the value of work.wait()", lambda at: True, inductor=False)
def value_of_wait(x):
    work = dist.all_reduce(x, async_op=True)
    return x.shape[0], work.wait()


@row("several handles, waited for in another order", lambda at: [sum(at.all_x()), at.x(at.size - 1) * 2])
def several_handles(x):
    a, b = x.clone(), x * 2
    first = dist.all_reduce(a, async_op=True)
    second = dist.all_reduce(b, op=dist.ReduceOp.MAX, async_op=True)
    second.wait()
    first.wait()
    return x + 1, [a, b]


@row("a list of handles", lambda at: sum(at.all_x()), inductor=False)
def list_of_handles(x):
    parts = list(x.clone().chunk(2))
    works = [dist.all_reduce(part, async_op=True) for part in parts]
    for work in works:
        work.wait()
    return x + 1, torch.cat(parts)


@row("handle = None or a handle", lambda at: sum(at.all_x()), inductor=False)
def optional_handle(x):
    handle = None
    if x.shape[0] > 1:
        handle = dist.all_reduce(x, async_op=True)
    if handle is not None:
        handle.wait()
    return x + 1, x.clone()


@row("dist.all_gather(async_op=True)", lambda at: at.all_x())
def all_gather_async(x, size):
    out = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(out, x, async_op=True).wait()
    return x + 1, out


@row("dist.all_gather_into_tensor(async_op=True)", lambda at: torch.cat(at.all_x()), inductor=False)
def all_gather_into_async(x, size):
    out = x.new_empty(size * x.shape[0])
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    work.wait()
    return x + 1, out


@row("dist.reduce_scatter_tensor(async_op=True)")
def reduce_scatter_tensor_async(x, size):
    out = x.new_empty(x.shape[0] // size)
    work = dist.reduce_scatter_tensor(out, x, async_op=True)
    work.wait()
    return x + 1, out


@row("dist.broadcast(async_op=True)", lambda at: at.x(0))
def broadcast_async(x):
    dist.broadcast(x, src=0, async_op=True).wait()
    return x + 1, x.clone()


@row("dist.all_to_all_single(async_op=True)")
def all_to_all_single_async(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, async_op=True).wait()
    return x + 1, out


@row("dist.barrier(async_op=True)")
def barrier_async(x):
    work = dist.barrier(async_op=True)
    work.wait()
    return x + 1


@row("dist.reduce(async_op=True)", lambda at: sum(at.all_x()) if at.rank == 0 else None, deterministic_input=False)
def reduce_async(x):
    dist.reduce(x, dst=0, async_op=True).wait()
    return (x.shape, x.clone()) if dist.get_rank() == 0 else (x.shape, None)


@row("dist.gather(async_op=True)", lambda at: at.all_x() if at.rank == 0 else None, inductor=False)
def gather_async(x, size):
    out = [torch.empty_like(x) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(x, out, dst=0, async_op=True).wait()
    return x + 1, out


@row("dist.scatter(async_op=True)", lambda at: at.x(0) * (at.rank + 1), inductor=False)
def scatter_async(x, size):
    out = torch.empty_like(x)
    parts = [x * (r + 1) for r in range(size)] if dist.get_rank() == 0 else None
    work = dist.scatter(out, parts, src=0, async_op=True)
    work.wait()
    return x + 1, out


@row("dist.reduce_scatter(async_op=True)", lambda at: sum(at.all_x()).chunk(at.size)[at.rank], inductor=False)
def reduce_scatter_async(x, size):
    parts = list(x.clone().chunk(size))
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, async_op=True).wait()
    return x + 1, out


@row("dist.all_to_all(async_op=True)", lambda at: [x.chunk(at.size)[at.rank] for x in at.all_x()], inductor=False)
def all_to_all_async(x, size):
    parts = list(x.clone().chunk(size))
    out = [torch.empty_like(part) for part in parts]
    dist.all_to_all(out, parts, async_op=True).wait()
    return x + 1, out


@row("handles in a dictionary, passed on, tested", lambda at: [sum(at.all_x()), True, True], inductor=False)
def handles_about(x):
    def finish(work):
        if work is not None and work:
            work.wait()

    works = {"x": dist.all_reduce(x, async_op=True)}
    for work in works.values():
        finish(work)
    return x + 1, [x.clone(), isinstance(works["x"], dist.Work), works["x"] is not None]
