"""Asynchronous forms: what a Work and its Future promise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..conformance import case
from ..inputs import every, reduced, same, values

COUNT = 1023


def _mine(rank: int, seed: int = 0, count: int = COUNT) -> torch.Tensor:
    return values(count, torch.float32, rank=rank, seed=seed)


def _forms(rank: int, world_size: int) -> dict[str, tuple[Callable[[], dist.Work], list[torch.Tensor], list]]:
    """Each collective's asynchronous call, its outputs, and what is to be in them."""
    everybody = every(COUNT, torch.float32, world_size)
    total, joined = reduced("SUM", everybody), torch.cat(everybody)
    summed, copied, rooted = _mine(rank), _mine(rank), _mine(rank)
    pieces = [_mine(rank) for _ in range(world_size)]
    part, single_part, scattered = (torch.zeros(COUNT) for _ in range(3))
    gathered, collected, moved = ([torch.zeros(COUNT) for _ in range(world_size)] for _ in range(3))
    flat, moved_flat = (torch.zeros(COUNT * world_size) for _ in range(2))
    is_root = rank == 0
    table: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], tuple[Any, ...]]] = {
        "all_reduce": ([summed], [total], (summed,)),
        "broadcast": ([copied], [everybody[1]], (copied, 1)),
        "reduce": ([rooted][rank:1], [total][rank:1], (rooted, 0)),
        "all_gather": (gathered, everybody, (gathered, _mine(rank))),
        "all_gather_single": ([flat], [joined], (flat, _mine(rank))),
        "gather": (
            collected if is_root else [],
            everybody if is_root else [],
            (_mine(rank), collected if is_root else None),
        ),
        "scatter": ([scattered], [_mine(rank)], (scattered, everybody if is_root else None)),
        "reduce_scatter": ([part], [total], (part, pieces)),
        "reduce_scatter_single": ([single_part], [total], (single_part, torch.cat(pieces))),
        "all_to_all": (moved, everybody, (moved, pieces)),
        "all_to_all_single": ([moved_flat], [joined], (moved_flat, torch.cat(pieces))),
        "barrier": ([], [], ()),
    }
    return {
        name: (partial(getattr(dist, name), *args, async_op=True), outputs, wanted)
        for name, (outputs, wanted, args) in table.items()
    }


@case(2, 4)
def every_collective(rank, world_size):
    """Started one after the other, waited for afterwards, in another order."""
    forms = _forms(rank, world_size)
    works = {name: start() for name, (start, _, _) in forms.items()}
    for name in reversed(list(works)):
        assert works[name].wait() is True, name
        _, outputs, wanted = forms[name]
        for got, want in zip(outputs, wanted, strict=True):
            same(got, want, name)


@case()
def wait_with_a_limit(rank, world_size):
    for name, (start, outputs, wanted) in _forms(rank, world_size).items():
        assert start().wait(timedelta(seconds=20)) is True, name
        for got, want in zip(outputs, wanted, strict=True):
            same(got, want, name)


# gloo's Work of a reduce_scatter has neither a future nor a state.
WITH_FUTURE = ("all_reduce", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_to_all_single")


@case(2, 4)
def futures(rank, world_size):
    forms = _forms(rank, world_size)
    for name in WITH_FUTURE:
        start, outputs, wanted = forms[name]
        work = start()
        future = work.get_future()
        got = future.wait()
        assert future.done(), name
        assert isinstance(got, list), name
        assert len(got) == len(outputs), name
        for one, want in zip(got, wanted, strict=True):
            same(one, want, name)
        # Whoever waited for the future need not wait for the work as well, but may.
        assert work.wait() is True, name
        assert work.is_completed(), name


@case()
def chained_futures(rank, world_size):
    """What a communication hook does: divide in a callback, and chain another collective to the first."""
    mine = _mine(rank)
    halved = dist.all_reduce(mine, async_op=True).get_future().then(lambda future: future.value()[0] / world_size)
    same(halved.wait(), reduced("AVG", every(COUNT, torch.float32, world_size)), "then")

    first = _mine(rank)

    def again(future: torch.futures.Future) -> torch.Tensor:
        tensor = future.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    twice = dist.all_reduce(first, async_op=True).get_future().then(again)
    same(
        twice.wait(), reduced("SUM", every(COUNT, torch.float32, world_size)) * world_size, "a collective in a callback"
    )


@case()
def callbacks_run_once(rank, world_size):
    called: list[int] = []
    done = threading.Event()
    future = dist.all_reduce(_mine(rank), async_op=True).get_future()

    def callback(value: torch.futures.Future) -> None:
        called.append(len(value.value()))
        done.set()

    future.add_done_callback(callback)
    future.wait()
    assert done.wait(10)
    assert called == [1]


@case()
def state(rank, world_size):
    """Before the other ranks come a collective is not done; after wait() it is, and stays so."""
    store = dist.PrefixStore("state-case", dist.distributed_c10d._get_default_store())
    if rank == 1:
        # Hold back until rank 0 has looked.
        store.wait(["looked"])
    work = dist.all_reduce(mine := _mine(rank), async_op=True)
    if rank == 0:
        assert not work.is_completed()
        assert not work.get_future().done()
        store.set("looked", "yes")
    work.wait()
    assert work.is_completed()
    assert work.wait() is True
    assert work.is_success()
    assert work.exception() is None
    work.synchronize()
    same(work.result()[0], mine, "result")


@case(2, 4)
def many_in_flight(rank, world_size):
    tensors = [_mine(rank, seed % 5, 1 + 37 * seed) for seed in range(100)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for seed in reversed(range(100)):
        works[seed].wait()
        want = reduced("SUM", every(1 + 37 * seed, torch.float32, world_size, seed=seed % 5))
        same(tensors[seed], want, "number", seed)


@case()
def sync_after_async(rank, world_size):
    """A synchronous call comes after the asynchronous ones that were made before it."""
    early = [_mine(rank, seed, 50_001) for seed in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in early]
    late = _mine(rank, 9)
    dist.all_reduce(late)
    same(late, reduced("SUM", every(COUNT, torch.float32, world_size, seed=9)), "synchronous")
    for seed, work in enumerate(works):
        work.wait()
        same(early[seed], reduced("SUM", every(50_001, torch.float32, world_size, seed=seed)), "number", seed)


@case()
def inputs_outlive_the_caller(rank, world_size):
    """A work keeps its tensors alive, though the caller drops them."""
    outs = [torch.zeros(300_007) for _ in range(world_size)]
    works = [dist.all_gather(outs, _mine(rank, 0, 300_007), async_op=True)]
    works += [dist.all_reduce(torch.ones(300_007), async_op=True) for _ in range(4)]
    clutter = [torch.full((300_007,), -1.0) for _ in range(8)]
    for work in works:
        work.wait()
    del clutter
    for got, want in zip(outs, every(300_007, torch.float32, world_size), strict=True):
        same(got, want, "all_gather")


@case()
def works_dropped_unwaited(rank, world_size):
    for seed in range(10):
        dist.all_reduce(_mine(rank, seed), async_op=True)
    dist.barrier()
