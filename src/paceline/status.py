"""What each rank says with its last bucket: one small vector of sums, no exchange of its own.

[Note: the last bucket carries the status]
The last bucket leaves when backward is over on this rank, not before. So it can carry what is known only then:
which parameters were used, whose contributions came late, how much this rank's gradients weigh, whether a
contract was broken. The sums come back with the gradients, and all ranks decide alike from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Sums of flags and weights need no more, and a half would not hold a weight.
CARRIERS = (torch.float32, torch.float64)
_FIXED = 3


@dataclass(frozen=True)
class Status:
    """Sums over the ranks (or, before the exchange, this rank's share)."""

    weight: float
    weighing: float
    complaints: float
    late: list[float]
    """Per bucket: ranks that have a contribution for it which came after it had left."""
    used: list[float]
    """Per parameter: ranks that used it since the last synchronisation."""

    @staticmethod
    def numel(n_buckets: int, n_params: int) -> int:
        return _FIXED + n_buckets + n_params

    def write(self, target: Tensor) -> None:
        values = [self.weight, self.weighing, self.complaints, *self.late, *self.used]
        target.copy_(torch.tensor(values, dtype=target.dtype))

    @staticmethod
    def read(source: Tensor, n_buckets: int) -> Status:
        values = source.tolist()
        weight, weighing, complaints = values[:_FIXED]
        return Status(weight, weighing, complaints, values[_FIXED : _FIXED + n_buckets], values[_FIXED + n_buckets :])
