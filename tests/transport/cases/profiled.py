"""What a profile shows: each collective by name, with the shapes it moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ..conformance import case

ones, zeros = torch.ones, torch.zeros

# gloo makes these of other collectives, and shows those.
GLOO_SHOWS = {"reduce_scatter": "all_reduce"}


def _calls(rank: int, world_size: int) -> list[tuple[str, list[list[int]] | None, Callable[[], Any]]]:
    """Name, shapes of the tensors sent (None where a rank sends nothing), and the call."""
    outs = [zeros(3) for _ in range(world_size)]
    return [
        ("all_reduce", [[1000]], lambda: dist.all_reduce(ones(1000))),
        ("all_reduce", [[7, 3]], lambda: dist.all_reduce(ones(7, 3), async_op=True).wait()),
        ("broadcast", [[5]], lambda: dist.broadcast(ones(5), 0)),
        ("reduce", [[5]], lambda: dist.reduce(ones(5), 0)),
        ("all_gather", [[3]], lambda: dist.all_gather(outs, ones(3))),
        ("all_gather", [[3]], lambda: dist.all_gather_single(zeros(3 * world_size), ones(3))),
        ("reduce_scatter", None, lambda: dist.reduce_scatter_single(zeros(3), ones(3 * world_size))),
        ("all_to_all", [[4]], lambda: dist.all_to_all_single(zeros(4), ones(4))),
        ("all_to_all", [[3], [3]], lambda: dist.all_to_all(outs, [ones(3) for _ in range(world_size)])),
        ("gather", [[3]], lambda: dist.gather(ones(3), outs if rank == 0 else None)),
        ("scatter", [[3], [3]] if rank == 0 else None, lambda: dist.scatter(zeros(3), outs if rank == 0 else None)),
        (
            "recv" if rank else "send",
            [[6]],
            lambda: dist.recv(zeros(6), 0) if rank else dist.send(ones(6), 1),
        ),
        (
            "recvAnySource" if rank else "send",
            [[6]],
            lambda: dist.recv(zeros(6)) if rank else dist.send(ones(6), 1),
        ),
        ("barrier", None, lambda: dist.barrier()),
    ]


@case()
def names_and_shapes(rank, world_size):
    backend = dist.get_backend().removeprefix("cpu:")
    calls = _calls(rank, world_size)
    dist.all_reduce(ones(2))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for _, _, call in calls:
            call()
    # Works that end on another thread are in the order they were called in, once sorted by their start.
    events = sorted(
        (event for event in profiled.events() if event.name.startswith(f"{backend}:")),
        key=lambda event: event.time_range.start,
    )
    found = [(event.name.removeprefix(f"{backend}:"), event.input_shapes) for event in events]
    names = [name for name, _ in found]
    wanted = [GLOO_SHOWS.get(name, name) if backend == "gloo" else name for name, _, _ in calls]
    assert names == wanted, f"{names} instead of {wanted}"
    for (name, shapes), (_, expected, _) in zip(found, calls, strict=True):
        if expected is not None:
            shown = [shape for shape in shapes if shape]
            assert shown == expected, f"{name} shows {shapes} instead of {expected}"
