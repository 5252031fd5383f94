"""The cores that this process may use, and how the ranks of a host share them.

A core has one or more CPUs, as Linux counts: those of one core (hyperthreads) share its arithmetic, so that two ranks
should not have one each.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

Core = tuple[int, ...]
"""The CPUs of a core that this process may use."""

_SYSTEM = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(system: Path = _SYSTEM) -> list[Core]:
    """The cores that this process may use, those of one socket beside each other."""
    if not hasattr(os, "sched_getaffinity"):
        return [(cpu,) for cpu in range(os.cpu_count() or 1)]
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        socket, core = _number(system, cpu, "physical_package_id"), _number(system, cpu, "core_id")
        # A virtual machine may say nothing of cores. Each of its CPUs is taken for one.
        known = (socket, core) if socket is not None and core is not None else (0, -1 - cpu)
        cores.setdefault(known, []).append(cpu)
    return [tuple(cores[known]) for known in sorted(cores)]


def _number(system: Path, cpu: int, name: str) -> int | None:
    try:
        return int((system / f"cpu{cpu}" / "topology" / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def quota(path: Path = _QUOTA) -> float:
    """How many CPUs' time a container may use; infinite if nothing limits it. Kubernetes limits containers so."""
    with contextlib.suppress(OSError, ValueError):
        allowed, _, period = path.read_text(encoding="ascii").partition(" ")
        return int(allowed) / int(period)
    return math.inf


def share(cores: Sequence[Core], ranks: int) -> list[list[Core]]:
    """Divide ``cores`` between ``ranks``, each rank's beside each other; empty if there are fewer cores than ranks.

    All ranks get equally many, because the others would wait for one that has less.

    >>> share([(0, 4), (1, 5), (2, 6), (3, 7)], 2)
    [[(0, 4), (1, 5)], [(2, 6), (3, 7)]]
    """
    each = len(cores) // ranks
    return [list(cores[rank * each : (rank + 1) * each]) for rank in range(ranks)] if each else []


def threads_each(cores: Sequence[Core], ranks: int, *, limit: float = math.inf) -> int:
    """How many threads each rank should compute with, if ``limit`` CPUs' time is all that they may use together."""
    return max(1, int(min(len(cores), limit)) // ranks)
