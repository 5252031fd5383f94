"""torch's DataLoader: what it has no public name for."""

from __future__ import annotations

from torch.utils.data import dataloader


def draws_ahead(loader_iterator: object) -> bool:
    """Whether this is the iterator of a DataLoader that has workers.

    It draws from the sampler for batches that are fetched ahead, and keeps to itself which of them it has handed out.
    """
    return isinstance(loader_iterator, dataloader._MultiProcessingDataLoaderIter)
