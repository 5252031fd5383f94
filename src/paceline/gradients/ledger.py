"""What is known of the gradients: how often each comes in a backward, which were used, and what was promised.

It is kept from one backward to the next. What a static graph promises is that every backward uses the same parameters;
the ledger remembers the first one, and says how a later one differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.gradients.plan import BucketPlan

# Programs and test suites written for torch's class recognise its errors by these phrases, so they are part of the
# interface. The rest of each text is ours: which parameters, which rank, what to do.
UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."
_GRAPH_CHANGED = (
    "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
    "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
    "set to True."
)


class Ledger:
    """Counts for the parameters that one plan reduces, by their position in registration order."""

    def __init__(self, plan: BucketPlan, indices: Sequence[int]) -> None:
        self.plan = plan
        self.indices = list(indices)
        """The index among all parameters, by position."""
        n = len(self.indices)
        self.position_of = {index: position for position, index in enumerate(self.indices)}
        self.expected = [1] * n
        """How often each gradient becomes ready in one backward, going by what has been seen."""
        self.used = [0.0] * n
        """1.0 for each parameter that got a gradient on this rank since the last synchronisation."""
        self.counts: Sequence[float] = []
        """How many ranks used each parameter in the last synchronised backward."""
        self.graph_is_static = True
        self.ready_order: list[int] = []
        """Positions in the order in which gradients were ready in the first synchronised backward."""
        self._promised: list[int] | None = None
        self._last_fired: list[bool] | None = None

    def unused_on_all(self) -> list[int]:
        """Indices of the parameters that no rank used in the last synchronised backward."""
        return [index for index, count in zip(self.indices, self.counts, strict=False) if not count]

    def unused_bytes(self) -> int:
        """The size of the parameters that no rank used in the last synchronised backward."""
        return sum(self.plan.specs[index].size_bytes for index in self.unused_on_all())

    def complaint(self, arrivals: Sequence[int], rank: int) -> str:
        """How this backward breaks the promise of a static graph. The text is empty if it does not."""
        if self._promised is None:
            return ""
        pairs = list(zip(self.indices, self._promised, arrivals, strict=True))
        newly = [index for index, before, now in pairs if now and not before]
        missing = [index for index, before, now in pairs if before and not now]
        if not (newly or missing):
            return ""
        remedy = "Drop static_graph=True: parameters that are used only sometimes need no flag."
        if missing:
            positions = " ".join(str(self.position_of[index]) for index in missing)
            return (
                f"{UNFINISHED} {_GRAPH_CHANGED}\nParameter indices which did not receive grad for rank {rank}: "
                f"{positions} ({', '.join(self.plan.names(missing))}). {remedy}"
            )
        return (
            f"Your training graph has changed in this iteration, which static_graph=True rules out: on rank {rank} "
            f"{', '.join(self.plan.names(newly))} received a gradient, but did not in the first iteration. {remedy}"
        )

    def learn(
        self, arrivals: Sequence[int], counts: Sequence[float], *, first: bool, static_graph: bool, broken: bool
    ) -> None:
        """Take in what a synchronised backward has shown."""
        self.counts = counts
        fired = [n > 0 for n in arrivals]
        self.graph_is_static = self.graph_is_static and self._last_fired in (None, fired)
        self._last_fired = fired
        if static_graph and (self._promised is None or broken):
            # After a broken promise, the next backward is held to what has just been seen.
            self._promised = list(arrivals)
        if first:
            self.expected = list(arrivals)
        elif max(arrivals) > 1 or arrivals != self.expected:
            self.expected = [max(pair) for pair in zip(self.expected, arrivals, strict=True)]
        self.used = [0.0] * len(self.used)

    def observe(self, order: Sequence[int]) -> list[int]:
        """The indices of the parameters in the order in which they became ready, then of those that never did.

        ``order`` holds a position for each gradient that came.
        """
        # A gradient that came several times was ready when it came last.
        seen = dict.fromkeys(reversed(order))
        self.ready_order = list(reversed(seen))
        rest = [index for index in self.plan.order if self.position_of[index] not in seen]
        return [self.indices[position] for position in self.ready_order] + rest
