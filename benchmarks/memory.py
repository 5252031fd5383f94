"""Gradient memory of one replica, in bytes.

[Note: what is counted] The profiler receives every allocation and release of torch's CPU allocator made on
the training thread, whether Python or C++ asked for it, so torch's C++ reducer and ours are seen alike;
summing them gives the bytes alive at each moment. The count starts just before the module is wrapped and no
optimizer runs, so at the end of backward what is alive is the gradients and the bucket storage (plus
bookkeeping, which is bytes). The peak also holds activations; they are the same in every mode, so

    gradient bytes at peak = gradient bytes of the model + (peak of the mode - peak of the local mode)

A block that another thread happens to release (a gloo thread that held the last reference to an old bucket)
still counts as alive: seen as 135 MB by the events where the process had grown by 70. That can only add, and
only sometimes, so the least of all trials and ranks, which are alike, is the figure.

Memory that other threads or other allocators take (a transport's buffers, a mapped segment) is not in these
events. The growth of the process's resident-set high-water mark is measured in runs of their own as a check: it
sees everything, but is coarse.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)
from torch.autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch.profiler import record_function

from .modes import Replica

STEPS = 4
"""Backwards that are run; the last is read (torch settles its buckets in the second)."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    held_bytes: int
    """Alive at the end of backward: gradients and buckets."""
    idle_bytes: int
    """Alive after zero_grad(set_to_none=True): what the buckets keep."""
    peak_bytes: int
    """The most that was alive between forward and the end of backward, activations included."""


def footprint(wrap: Callable[[], Replica]) -> Footprint:
    """Wrap, run a few backwards, and report what was alive."""
    gc.collect()
    with _allocations() as events:
        replica = wrap()
        for index in range(STEPS):
            with record_function(f"bench::step{index}"):
                replica.forward(index).backward()
            with record_function(f"bench::held{index}"):
                pass
            replica.module.zero_grad(set_to_none=True)
            with record_function(f"bench::idle{index}"):
                pass
    live = _Live(events)
    last = STEPS - 1
    return Footprint(
        held_bytes=live.at(live.marks[f"bench::held{last}"][0]),
        idle_bytes=live.at(live.marks[f"bench::idle{last}"][0]),
        peak_bytes=live.peak(*live.marks[f"bench::step{last}"]),
    )


def resident_growth(wrap: Callable[[], Replica]) -> int | None:
    """By how much the resident-set high-water mark rises over the same steps; None where it can't be reset."""
    gc.collect()
    before = _reset_high_water()
    replica = wrap()
    for index in range(STEPS):
        replica.forward(index).backward()
        replica.module.zero_grad(set_to_none=True)
    after = _high_water()
    return None if before is None or after is None else after - before


@contextlib.contextmanager
def _allocations() -> Iterator[list[Any]]:
    """Collect the allocator's events and our own marks; the list is filled when the block ends.

    `torch.profiler.profile` would give the same after seconds of turning each operator into an event of its
    own, and folds allocations into them; asking for marks alone leaves the operators out.
    """
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    events: list[Any] = []
    _prepare_profiler(config, {ProfilerActivity.CPU})
    _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
    try:
        yield events
    finally:
        events += _disable_profiler().events()


class _Live:
    """Bytes alive against time, from the allocator's events."""

    def __init__(self, events: list[Any]) -> None:
        self.marks = {
            event.name(): (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if event.name().startswith("bench::")
        }
        changes = sorted(
            ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
            key=lambda change: change[0],
        )
        self._times = [time for time, _ in changes]
        self._bytes = [0, *itertools.accumulate(change for _, change in changes)]

    def at(self, time_ns: int) -> int:
        return self._bytes[bisect.bisect_right(self._times, time_ns)]

    def peak(self, start_ns: int, end_ns: int) -> int:
        first, last = (bisect.bisect_right(self._times, time) for time in (start_ns, end_ns))
        return max(self._bytes[first : last + 1])


def _reset_high_water() -> int | None:
    """Give free memory back, set the high-water mark to what is resident now, and return it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _high_water()


def _high_water() -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def gradient_bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
