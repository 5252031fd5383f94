"""What each rank says with its last bucket: a small vector that is summed without an exchange of its own.

[Note: the last bucket carries the status]
The last bucket does not leave before backward is over on this rank. So it can carry what is known only then: which
parameters were used, which contributions came late, how much this rank's gradients weigh, whether a contract was
broken, and which backward this is. The sums come back with the gradients, and all ranks decide alike from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The dtypes that can carry a status: these suffice for sums of flags and weights; a half could not hold a weight.
STATUS_DTYPES = (torch.float32, torch.float64)
# A float32 holds every integer up to here.
_EXACT = 1 << 24
_FIXED = 6
# More marks than this are of no use. They tell apart backwards that ranks may confuse, and there are few of those.
_MARKS = 64


@dataclass(frozen=True)
class Status:
    """Sums over the ranks; before the exchange, this rank's share of them."""

    weight: float
    weighing: float
    complaints: float
    late: Sequence[float]
    """For each bucket, how many ranks have a contribution that came after it had left."""
    used: Sequence[float]
    """For each parameter, how many ranks used it since the last synchronisation."""
    opinions: float = 0.0
    """How many ranks say which backward this is."""
    marks: float = 0.0
    """The sum of the marks of these ranks; `StatusCode.mark` says what a mark is."""
    squares: float = 0.0
    """The sum of the squares of these marks."""

    @property
    def is_one_backward(self) -> bool:
        """Whether all ranks that have an opinion brought the same mark: only then are these two products equal."""
        return self.opinions * self.squares == self.marks * self.marks


class StatusCode:
    """How a status is written as numbers. Several flags share one number, in a base in which their sums never carry."""

    def __init__(self, *, n_ranks: int, n_buckets: int, n_params: int, wrapper: int = 0) -> None:
        """``wrapper`` is the number of the wrapper among those of its group."""
        # The sum of the squares of all ranks' marks must be exact.
        self._n_marks = max(2, min(_MARKS, math.isqrt(_EXACT // n_ranks)))
        self._wrapper = wrapper
        self._n_buckets = n_buckets
        self._n_params = n_params
        self._base = n_ranks + 1
        self._digits = 1
        while self._base ** (self._digits + 1) <= _EXACT:
            self._digits += 1
        flags = n_buckets + n_params
        self.numel = _FIXED + -(-flags // self._digits)
        self._all_used = [0.0] * n_buckets + [1.0] * n_params
        self._usual = self._pack(self._all_used)
        # This is the status of nearly every step, so it is made once.
        self._usual_fixed = (1.0, 0.0, 0.0, *self.mark(of_module=False))
        self._usual_numbers = torch.tensor([*self._usual_fixed, *self._usual], dtype=torch.float64)
        self._usual_sum = [float(code * n_ranks) for code in self._usual]
        self._counts_of_usual = [float(n_ranks)] * n_params

    def mark(self, *, of_module: bool) -> tuple[float, float, float]:
        """What a rank adds to the opinions, the marks and the squares: 1, its mark, and the square of the mark.

        The mark is a number for a backward of this wrapper, or of its bare module (``of_module``).
        Backwards of different kinds have different marks, unless there are very many wrappers or ranks.
        """
        mark = float(1 + (2 * self._wrapper + of_module) % self._n_marks)
        return 1.0, mark, mark * mark

    def write(self, status: Status, target: Tensor) -> None:
        fixed = (
            status.weight,
            status.weighing,
            status.complaints,
            status.opinions,
            status.marks,
            status.squares,
        )
        flags = [*status.late, *status.used]
        if flags != self._all_used:
            codes = self._pack(flags)
        elif fixed == self._usual_fixed:
            target.copy_(self._usual_numbers)
            return
        else:
            codes = self._usual
        target.copy_(torch.tensor([*fixed, *codes], dtype=torch.float64))

    def read(self, source: Tensor) -> Status:
        weight, weighing, complaints, opinions, marks, squares, *codes = source.tolist()
        late: Sequence[float] = [0.0] * self._n_buckets
        used: Sequence[float] = self._counts_of_usual
        if codes != self._usual_sum:
            flags = self._unpack(codes)
            late, used = flags[: self._n_buckets], flags[self._n_buckets :]
        return Status(weight, weighing, complaints, late, used, opinions, marks, squares)

    def is_usual(self, status: Status) -> bool:
        """Whether every parameter was used on every rank and nothing came late."""
        return status.used is self._counts_of_usual

    def _pack(self, flags: Sequence[float]) -> list[float]:
        codes = []
        for start in range(0, len(flags), self._digits):
            code = 0
            for flag in reversed(flags[start : start + self._digits]):
                code = code * self._base + int(flag)
            codes.append(float(code))
        return codes

    def _unpack(self, codes: Sequence[float]) -> list[float]:
        flags = []
        for value in codes:
            code = round(value)
            for _ in range(self._digits):
                code, digit = divmod(code, self._base)
                flags.append(float(digit))
        return flags[: self._n_buckets + self._n_params]
