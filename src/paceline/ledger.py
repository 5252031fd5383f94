"""What is known of the gradients: how often each comes in a backward, which were used, what was promised."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.messages import graph_changed_message
from paceline.plan import BucketPlan


class Ledger:
    """Counts for the trainable parameters of one plan, by their place in registration order."""

    def __init__(self, plan: BucketPlan, places: Sequence[int]) -> None:
        self.plan = plan
        self.indices = list(places)
        """Place among the trainable parameters -> index among all."""
        n = len(self.indices)
        self.place_of = {index: place for place, index in enumerate(self.indices)}
        self.expected = [1] * n
        """How often each gradient becomes ready in one backward, as far as has been seen."""
        self.used = [0.0] * n
        """1.0 for those that got a gradient on this rank since the last synchronisation."""
        self.counts: Sequence[float] = []
        """Ranks that used each, in the last synchronised backward."""
        self.graph_is_static = True
        self.ready_order: list[int] = []
        """Places in the order in which gradients were ready in the first synchronised backward."""
        self._promised: list[int] | None = None
        self._last_fired: list[bool] | None = None

    def unused_on_all(self) -> list[int]:
        """Indices of the parameters that no rank used in the last synchronised backward."""
        return [index for index, count in zip(self.indices, self.counts, strict=False) if not count]

    def unused_bytes(self) -> int:
        """The size of those parameters."""
        return sum(self.plan.specs[index].size_bytes for index in self.unused_on_all())

    def complaint(self, fires: Sequence[int], rank: int) -> str:
        """How this backward breaks the promise of a static graph; empty if it does not."""
        if self._promised is None:
            return ""
        pairs = list(zip(self.indices, self._promised, fires, strict=True))
        newly = [index for index, before, now in pairs if now and not before]
        missing = [index for index, before, now in pairs if before and not now]
        if not (newly or missing):
            return ""
        return graph_changed_message(self.plan, rank, newly=newly, missing=missing, place=self.place_of)

    def learn(
        self, fires: Sequence[int], counts: Sequence[float], *, first: bool, static_graph: bool, broken: bool
    ) -> None:
        """Take in what a synchronised backward has shown."""
        self.counts = counts
        fired = [n > 0 for n in fires]
        self.graph_is_static = self.graph_is_static and self._last_fired in (None, fired)
        self._last_fired = fired
        if static_graph and (self._promised is None or broken):
            # After a broken promise, what has just been seen is what the next backward is held to.
            self._promised = list(fires)
        if first:
            self.expected = list(fires)
        elif max(fires) > 1 or fires != self.expected:
            self.expected = [max(pair) for pair in zip(self.expected, fires, strict=True)]
        self.used = [0.0] * len(self.used)

    def observe(self, order: Sequence[int]) -> list[int]:
        """Indices in the order of ``order`` (places as they became ready), then those that never did."""
        # A gradient that came several times was ready with the last of them.
        seen = dict.fromkeys(reversed(order))
        self.ready_order = list(reversed(seen))
        rest = [index for index in self.plan.order if self.place_of[index] not in seen]
        return [self.indices[place] for place in self.ready_order] + rest
