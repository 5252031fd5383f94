"""When things happened in a step: a handful of stamps of the host's clock."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

now_ns = time.perf_counter_ns


@dataclass
class StepTimes:
    """Stamps of one step in nanoseconds of the host's monotonic clock. A stamp of 0 means that it did not happen."""

    forward_start_ns: int = 0
    forward_end_ns: int = 0
    backward_start_ns: int = 0
    backward_end_ns: int = 0
    """When the last gradient was ready."""
    comm_start_ns: int = 0
    comm_end_ns: int = 0
    launches_ns: list[int] = field(default_factory=list)
    """When each bucket left, in the order in which they did."""

    @property
    def forward_compute_ns(self) -> int:
        return max(0, self.forward_end_ns - self.forward_start_ns)

    @property
    def backward_compute_ns(self) -> int:
        return max(0, self.backward_end_ns - self.backward_start_ns)

    @property
    def comm_ns(self) -> int:
        return max(0, self.comm_end_ns - self.comm_start_ns)

    @property
    def overlap_ns(self) -> int:
        """How long communication and backward ran at the same time."""
        return max(0, min(self.backward_end_ns, self.comm_end_ns) - self.comm_start_ns)

    @property
    def exposed_ns(self) -> int:
        """How long backward waited for communication after its last gradient."""
        return max(0, self.comm_end_ns - max(self.backward_end_ns, self.comm_start_ns)) if self.comm_end_ns else 0


@dataclass
class Telemetry:
    """The step that runs, the last one that was finished, and sums over all."""

    current: StepTimes = field(default_factory=StepTimes)
    last: StepTimes = field(default_factory=StepTimes)
    steps: int = 0
    """How many synchronised backwards there were."""
    exposed_total_ns: int = 0
    sent_bytes: int = 0
    """How much the last step sent."""
    buckets_reduced: int = 0

    _sums: Counter[str] = field(default_factory=Counter)

    def finish_step(self) -> None:
        self.last, self.current = self.current, StepTimes()
        self.steps += 1
        self.exposed_total_ns += self.last.exposed_ns
        last = self.last
        self._sums["forward_compute_time"] += last.forward_compute_ns
        self._sums["backward_compute_time"] += last.backward_compute_ns
        self._sums["backward_comm_time"] += last.comm_ns
        self._sums["backward_compute_comm_overlap_time"] += last.overlap_ns

    def summary(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "bytes_per_step": self.sent_bytes,
            "exposed_s": self.last.exposed_ns / 1e9,
            "exposed_total_s": self.exposed_total_ns / 1e9,
        }

    def averages(self) -> dict[str, int]:
        """The nanoseconds of each part of a step, averaged over all steps."""
        return {name: total // max(1, self.steps) for name, total in self._sums.items()}
