"""The same inputs give the same bits, which are those of the sum in rank order.

They do so on every rank, for every size and place of a message, and in whatever order the ranks arrive. Who arrives
when is scripted through the store: a rank enters a collective only when the one before it has started.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from .conformance import SHM
from .requirements import needs_shm

COUNTS = (1, 1023, 8193, 70_001, 300_007)


def _floats(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, so that a sum in another order is another number."""
    return _made(rank, count).to(dtype, copy=True)


@functools.cache
def _made(rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    exponents = torch.randint(-12, 12, (count,), generator=generator)
    return torch.randn(count, generator=generator, dtype=torch.float64) * 2.0**exponents


def _in_rank_order(world_size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum as the transport defines it: rank 0 first; 16-bit types in float32, rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = _floats(0, count, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + _floats(rank, count, dtype).to(wide)
    return total.to(dtype)


def _orders(rank, world_size):
    everyone = tuple(range(world_size))
    store = dist.PrefixStore("orders", dist.distributed_c10d._get_default_store())
    for dtype, count in itertools.product((torch.float32, torch.bfloat16), COUNTS):
        want = _in_rank_order(world_size, count, dtype)
        for order in (everyone, everyone[::-1], (*everyone[1:], 0)):
            place, name = order.index(rank), f"{dtype}-{count}-{order}"
            if place:
                store.wait([f"{name}/{place - 1}"])
            tensor = _floats(rank, count, dtype)
            work = dist.all_reduce(tensor, async_op=True)
            store.set(f"{name}/{place}", "started")
            work.wait()
            assert torch.equal(tensor, want), name


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_order_of_arrival_does_not_matter(ranks, world_size):
    needs_shm()
    ranks(_orders, world_size=world_size, backend=SHM)


def _all_forms(rank, world_size):
    """Each way to the same sum: synchronous, asynchronous, in shared memory, by reduce and by reduce_scatter."""
    from paceline import transport

    for dtype, count in itertools.product((torch.float32, torch.float64, torch.float16, torch.bfloat16), COUNTS):
        want = _in_rank_order(world_size, count, dtype)

        def check(tensor: torch.Tensor, form: str, want: torch.Tensor = want, label=(dtype, count)) -> None:
            assert torch.equal(tensor, want), f"{form}, {label}: not the sum in rank order"

        tensor = _floats(rank, count, dtype)
        dist.all_reduce(tensor)
        check(tensor, "all_reduce")
        tensor = _floats(rank, count, dtype)
        dist.all_reduce(tensor, async_op=True).wait()
        check(tensor, "asynchronous all_reduce")
        shared = transport.allocate(count * dtype.itemsize).view(dtype)
        shared.copy_(_floats(rank, count, dtype))
        dist.all_reduce(shared)
        check(shared, "all_reduce in shared memory")
        part = torch.zeros(count + 5, dtype=dtype)[3:-2]
        part.copy_(_floats(rank, count, dtype))
        dist.all_reduce(part)
        check(part, "all_reduce of a slice")
        tensor = _floats(rank, count, dtype)
        dist.reduce(tensor, world_size - 1)
        if rank == world_size - 1:
            check(tensor, "reduce")
        out = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter(out, [_floats(rank, count, dtype) for _ in range(world_size)])
        check(out, "reduce_scatter")
        out = torch.zeros(count, dtype=dtype)
        dist.reduce_scatter_single(out, _floats(rank, count, dtype).repeat(world_size))
        check(out, "reduce_scatter_single")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_form_adds_in_rank_order(ranks, world_size):
    needs_shm()
    ranks(_all_forms, world_size=world_size, backend=SHM, timeout=90)


def test_inputs_can_tell():
    """The numbers above are ones whose sum depends on the order, or these tests would prove nothing."""
    forwards = _in_rank_order(4, 1023, torch.float32)
    backwards = sum((_floats(rank, 1023, torch.float32) for rank in (3, 2, 1)), _floats(0, 1023, torch.float32) * 0)
    assert not torch.equal(forwards, backwards + _floats(0, 1023, torch.float32))
