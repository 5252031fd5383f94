"""Collectives with ``async_op=True``, and their handles."""

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


@row("handles in a dictionary, passed on, tested", lambda at: [sum(at.all_x()), True, True], inductor=False)
def handles_about(x):
    def finish(work):
        if work is not None and work:
            work.wait()

    works = {"x": dist.all_reduce(x, async_op=True)}
    for work in works.values():
        finish(work)
    return x + 1, [x.clone(), isinstance(works["x"], dist.Work), works["x"] is not None]
