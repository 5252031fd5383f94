"""The same inputs give the same bits: on every rank, in every run, in whatever order the ranks arrive.

Who arrives when is scripted through the store: a rank enters a collective only when the one before it is inside (seen
by what it wrote before it went in), or has had the time that a chunk takes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from functools import partial

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


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _in_rank_order(world_size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum as the transport defines it: rank 0 first; 16-bit types in float32, rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = _floats(0, count, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + _floats(rank, count, dtype).to(wide)
    return total.to(dtype)


class _Turns:
    """Lets ranks into a collective one after the other."""

    def __init__(self, order: tuple[int, ...], name: str) -> None:
        self._order = order
        self._store = dist.PrefixStore(f"turns/{name}", dist.distributed_c10d._get_default_store())

    def enter(self, rank: int, collective: Callable[[], dist.Work]) -> dist.Work:
        """Start ``collective`` when all that come before ``rank`` have started theirs."""
        place = self._order.index(rank)
        if place:
            self._store.wait([f"in{self._order[place - 1]}"])
        work = collective()
        self._store.set(f"in{rank}", "yes")
        return work


def _orders(rank, world_size, orders, dtypes):
    digests: dict[tuple, set[str]] = {}
    for dtype, count in itertools.product(dtypes, COUNTS):
        for order in orders:
            tensor = _floats(rank, count, dtype)
            turns = _Turns(order, f"{dtype}-{count}-{order}")
            turns.enter(rank, partial(dist.all_reduce, tensor, async_op=True)).wait()
            digests.setdefault((str(dtype), count), set()).add(_digest(tensor))
    return digests


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_order_of_arrival_does_not_matter(ranks, world_size):
    needs_shm()
    everyone = tuple(range(world_size))
    orders = [everyone, everyone[::-1], (*everyone[1:], 0)]
    by_rank = ranks(_orders, orders, (torch.float32, torch.bfloat16), world_size=world_size, backend=SHM)
    for (dtype, count), digests in by_rank[0].items():
        assert len(digests) == 1, f"{dtype}, {count}: another order, other bits"
        for rank in range(1, world_size):
            assert by_rank[rank][dtype, count] == digests, f"{dtype}, {count}: rank {rank} has other bits"


def _all_forms(rank, world_size):
    """Each way to the same sum: synchronous, asynchronous, in shared memory, by reduce and by reduce_scatter."""
    from paceline import transport

    found = {}
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
        found[str(dtype), count] = _digest(want)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_form_adds_in_rank_order(ranks, world_size):
    needs_shm()
    results = ranks(_all_forms, world_size=world_size, backend=SHM, timeout=90)
    assert all(result == results[0] for result in results)


def _position(rank, world_size):
    """An element's sum does not depend on where it lies: in which chunk, whose share, at which address."""
    whole = _floats(rank, 300_007, torch.float32)
    dist.all_reduce(whole)
    for start, count in ((0, 1), (1, 1), (4097, 31), (99_999, 200_001), (3, 8192)):
        tensor = _floats(rank, 300_007, torch.float32)[start : start + count].clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_do_not_depend_on_the_size_of_the_message(ranks, world_size):
    needs_shm()
    ranks(_position, world_size=world_size, backend=SHM)


def _digests_of_a_run(rank, world_size):
    digests = []
    for count in COUNTS:
        tensor = _floats(rank, count, torch.float32)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        digests.append(_digest(tensor))
    return digests


def test_runs_are_alike(ranks):
    needs_shm()
    runs = [ranks(_digests_of_a_run, world_size=4, backend=SHM) for _ in range(3)]
    assert all(digests == runs[0][0] for run in runs for digests in run)


def test_inputs_can_tell():
    """The numbers above are ones whose sum depends on the order, or these tests would prove nothing."""
    forwards = _in_rank_order(4, 1023, torch.float32)
    backwards = sum((_floats(rank, 1023, torch.float32) for rank in (3, 2, 1)), _floats(0, 1023, torch.float32) * 0)
    assert not torch.equal(forwards, backwards + _floats(0, 1023, torch.float32))
