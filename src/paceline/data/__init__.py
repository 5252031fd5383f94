"""Which samples each rank gets, and numbers over all ranks.

- ``sampler``: :class:`Sampler`, which divides a dataset among the ranks; ``permutation`` shuffles it
- ``loader``: :class:`Loader`, torch's ``DataLoader``, which also knows what the training loop has taken
- ``drawing``: one pass over the samples of a sampler
- ``numbers``: :func:`mean` and :func:`total`
"""

from __future__ import annotations

from paceline.data.loader import Loader
from paceline.data.numbers import mean, total
from paceline.data.sampler import Sampler

__all__ = ["Loader", "Sampler", "mean", "total"]
