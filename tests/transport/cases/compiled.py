"""Collectives in compiled code, in place and functional."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ..conformance import case
from ..inputs import every, reduced, same, values

COUNT = 1023
# What torch itself says while it compiles is not the transport's doing.
ALLOW = ((".*", DeprecationWarning), (".*", FutureWarning), (".*", UserWarning))


def _mine(rank: int) -> torch.Tensor:
    return values(COUNT, torch.float32, rank=rank)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    dist.all_reduce(x)
    return x + 1


def _gathered(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(2 * COUNT)
    dist.all_gather_into_tensor(whole, x)
    part = x.new_empty(COUNT)
    dist.reduce_scatter_tensor(part, whole)
    return part


def _functional(x: torch.Tensor) -> torch.Tensor:
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    whole = functional.all_gather_tensor(total, 0, dist.group.WORLD)
    return functional.reduce_scatter_tensor(whole, "avg", 0, dist.group.WORLD) + x


def _moved(x: torch.Tensor) -> torch.Tensor:
    return functional.all_to_all_single(x.repeat(2), None, None, dist.group.WORLD) * 2


def _check(rank: int, world_size: int, backend: str) -> None:
    torch._dynamo.reset()
    everybody = every(COUNT, torch.float32, world_size)
    total = reduced("SUM", everybody)
    pieces = torch.cat(everybody).chunk(2)
    wanted = {
        _in_place: total + 1,
        _gathered: pieces[rank] * 2,
        _functional: total + _mine(rank),
        _moved: torch.cat(everybody) * 2,
    }
    for body, want in wanted.items():
        compiled = torch.compile(body, fullgraph=True, backend=backend)
        for _ in range(2):
            same(compiled(_mine(rank)), want, body.__name__, backend)


@case(allow_warnings=ALLOW, timeout_s=120)
def whole_graph(rank, world_size):
    _check(rank, world_size, "aot_eager")


@case(allow_warnings=ALLOW, timeout_s=120)
def inductor(rank, world_size):
    torch._dynamo.reset()
    compiled = torch.compile(_functional, fullgraph=True)
    want = reduced("SUM", every(COUNT, torch.float32, world_size)) + _mine(rank)
    same(compiled(_mine(rank)), want, "inductor")


@case(allow_warnings=ALLOW, timeout_s=120)
def broken_graph(rank, world_size):
    """Calls that torch does not trace run outside the graphs, in order."""
    torch._dynamo.reset()

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        dist.broadcast(y, 0)
        return y + 1

    compiled = torch.compile(body, backend="eager")
    same(compiled(_mine(rank)), reduced("SUM", every(COUNT, torch.float32, world_size)) * 2 + 1, "broken graph")
