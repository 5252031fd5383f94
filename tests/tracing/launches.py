"""Which collectives a function really launches, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

# torch's dispatcher has several operators for one collective, and compiled code may use another than eager.
FAMILIES = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "barrier", "send", "recv")


def launches(function: Callable[[], Any]) -> list[str]:
    """The collectives that ``function()`` launches on any group, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        function()
    events = sorted(record.events(), key=lambda event: event.time_range.start)
    return [_family(event.name.removeprefix("c10d::")) for event in events if event.name.startswith("c10d::")]


def _family(name: str) -> str:
    name = name.strip("_")
    return next((family for family in FAMILIES if name.startswith(family)), name)
