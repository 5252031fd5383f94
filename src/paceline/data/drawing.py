"""One pass over the samples of a ``Sampler``: how many this rank has drawn, and how many its training loop has taken.

They differ if somebody draws ahead of the loop, as a DataLoader with workers does. A pass looks at who draws from it,
so that nobody takes what was drawn for what was trained on.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from paceline import _torch
from paceline.errors import StateError

# The sampler is a few calls away from the loader that draws.
_DEPTH = 16


@dataclass
class Drawing:
    """A pass over the samples that begins at ``start``, of which this rank's share is so many."""

    epoch: int
    start: int
    share: int
    is_counted: bool
    """Somebody counts what the training loop takes. Otherwise it takes what is drawn."""
    drawn: int = 0
    counted: int = 0
    counted_is_all: bool = False
    """The training loop has taken the last batch."""
    runs_ahead: str = ""
    """Who draws ahead of the training loop, for a message."""

    @property
    def taken(self) -> int:
        """How many samples the training loop has taken, as far as it is known."""
        return self.counted if self.is_counted else self.drawn

    @property
    def is_over(self) -> bool:
        return self.counted_is_all if self.is_counted else self.drawn >= self.share

    def count(self, n_batches: int, *, batch_size: int, drop_last: bool) -> None:
        """The training loop has taken so many batches."""
        self.counted = min(n_batches * batch_size, self.share)
        left = self.share - self.counted
        self.counted_is_all = left < batch_size if drop_last else left == 0

    def look_at_caller(self, n_ranks: int) -> None:
        """Find out whether what draws runs ahead of the training loop. Raises if it divides among ranks again."""
        frame = inspect.currentframe()
        for _ in range(_DEPTH):
            frame = frame and frame.f_back
            if frame is None:
                return
            caller = frame.f_locals.get("self")
            if _torch.draws_ahead(caller):
                self.runs_ahead = "A DataLoader with workers"
            elif getattr(caller, "num_processes", 1) != 1 and hasattr(caller, "batch_sampler"):
                # This is how Accelerate divides the batches of a loader among ranks. It also looks one batch ahead.
                self.runs_ahead = f"{type(caller).__name__} (Accelerate)"
                if n_ranks != 1:
                    raise StateError(
                        f"The samples are divided among the ranks twice: by paceline.data.Sampler, and then by "
                        f"{type(caller).__name__} (Accelerate's prepare). Most samples would never be seen. Use "
                        "paceline.data.Loader, which prepare() leaves as it is."
                    )
