"""Memory that all ranks have mapped: all_reduce on it copies nothing, and gives the same."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from ..conformance import case
from ..inputs import FLOATS, HUGE, defined, every, is_rounded, reduce_op, reduced, same, values

ONLY = "gloo has no shared memory"


def _allocate(nbytes: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    from paceline import transport

    memory = transport.allocate(nbytes, group=group)
    assert memory is not None
    assert memory.dtype == torch.uint8
    assert memory.numel() == nbytes
    return memory


@case(2, 3, shm_only=ONLY)
def sums(rank, world_size):
    for dtype, op in defined((*FLOATS, torch.int64)):
        for count in (1, 7, 1023, 40_001) if op == "SUM" else (1023,):
            memory = _allocate(count * dtype.itemsize).view(dtype)
            inputs = every(count, dtype, world_size, op=op)
            memory.copy_(inputs[rank])
            dist.all_reduce(memory, reduce_op(op))
            rounded = is_rounded(op, world_size)
            same(memory, reduced(op, inputs), "zero copy", dtype, op, count, rounded=rounded)


@case(2, 4, shm_only=ONLY)
def parts(rank, world_size):
    """Slices of the memory, at offsets that differ between ranks, and next to what must stay as it is."""
    for count in (5, 3001, 90_001, HUGE):
        memory = _allocate(4 * (count + 40)).view(torch.float32)
        memory.fill_(-9.0)
        start = 3 + 4 * rank
        part = memory[start : start + count]
        part.copy_(values(count, torch.float32, rank=rank))
        dist.all_reduce(part, async_op=True).wait()
        same(part, reduced("SUM", every(count, torch.float32, world_size)), "a part", count)
        assert memory[:start].eq(-9.0).all()
        assert memory[start + count :].eq(-9.0).all()


@case(2, 4, shm_only=ONLY)
def some_ranks_in_it(rank, world_size):
    """One rank's tensor lies in the memory, another's lies elsewhere, or in other such memory."""
    for count in (1023, 90_001):
        one, other = (_allocate(4 * count).view(torch.float32) for _ in range(2))
        for elsewhere in (torch.zeros(count), other):
            mine = one if rank == 0 else elsewhere
            mine.copy_(values(count, torch.float32, rank=rank))
            dist.all_reduce(mine)
            same(mine, reduced("SUM", every(count, torch.float32, world_size)), "mixed", count)


@case(2, shm_only=ONLY)
def other_collectives(rank, world_size):
    """Tensors in it go through every other collective as any tensor does."""
    memory = _allocate(4 * 1023).view(torch.float32)
    memory.copy_(values(1023, torch.float32, rank=rank))
    whole = torch.zeros(2 * 1023)
    dist.all_gather_single(whole, memory)
    same(whole, torch.cat(every(1023, torch.float32, world_size)), "all_gather_single")
    dist.broadcast(memory, 1)
    same(memory, values(1023, torch.float32, rank=1), "broadcast")
    memory.copy_(values(1023, torch.float32, rank=rank))
    dist.reduce(memory, 0)
    if rank == 0:
        same(memory, reduced("SUM", every(1023, torch.float32, world_size)), "reduce")


@case(2, shm_only=ONLY)
def many_and_short_lived(rank, world_size):
    """Arenas come and go, one inside the other's life; the ones that stay work on."""
    kept = _allocate(4 * 100).view(torch.float32)
    for turn in range(10):
        memory = _allocate(4 * (turn + 1)).view(torch.float32)
        memory.fill_(rank + 1.0)
        dist.all_reduce(memory)
        assert memory.eq(3.0).all()
        kept.fill_(1.0)
        dist.all_reduce(kept)
        assert kept.eq(2.0).all()
        del memory
        gc.collect()


@case(2, shm_only=ONLY)
def outlives_its_group(rank, world_size):
    group = dist.new_group([0, 1])
    memory = _allocate(4 * 100, group).view(torch.float32)
    memory.fill_(rank + 1.0)
    dist.all_reduce(memory, group=group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert memory.eq(3.0).all()
    memory.add_(1.0)
    # Other groups take it for ordinary memory.
    dist.all_reduce(memory)
    assert memory.eq(8.0).all()


@case(2, shm_only=ONLY)
def is_forgotten_before_it_is_unmapped(rank, world_size):
    """Afterwards its addresses may be those of other memory, which is not shared."""
    arenas = dist.group.WORLD.carrier.arenas
    memory = _allocate(1 << 20)
    where = f"{memory.data_ptr():x}-"
    forget, mapped = arenas.forget, []

    def look_and_forget(number: int) -> None:
        with open("/proc/self/maps", encoding="ascii") as maps:
            mapped.append(any(line.startswith(where) for line in maps))
        forget(number)

    arenas.forget = look_and_forget
    del memory
    gc.collect()
    assert mapped == [True]


@case(4, shm_only=ONLY)
def of_a_subgroup(rank, world_size):
    members = [1, 3] if rank % 2 else [0, 2]
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    memory = _allocate(4 * 1023, groups[rank % 2]).view(torch.float32)
    memory.copy_(values(1023, torch.float32, rank=rank))
    dist.all_reduce(memory, group=groups[rank % 2])
    same(memory, reduced("SUM", [values(1023, torch.float32, rank=m) for m in members]), members)


@case(2, shm_only=ONLY)
def nothing_and_much(rank, world_size):
    from paceline import transport

    empty = transport.allocate(0)
    assert empty is not None
    assert empty.numel() == 0
    dist.all_reduce(empty.view(torch.float32))
    # More than any machine has: no arena, on all ranks alike, and no harm done.
    assert transport.allocate(1 << 50) is None
    dist.barrier()
