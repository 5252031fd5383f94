"""Put our classes where the suite looks for torch's."""

from __future__ import annotations

from types import ModuleType

import torch

from .devices import drop_device_ids


def use_stock() -> None:
    """First column: torch's class."""
    drop_device_ids(torch.nn.parallel.DistributedDataParallel)


def use_ours(suite: ModuleType) -> None:
    """Second column: `paceline.DistributedDataParallel` and `paceline.SyncBatchNorm` in place of torch's."""
    import paceline

    drop_device_ids(paceline.DistributedDataParallel)
    for holder in (suite, torch.nn.parallel, torch.nn.parallel.distributed):
        holder.DistributedDataParallel = paceline.DistributedDataParallel
    for holder in (torch.nn, torch.nn.modules, torch.nn.modules.batchnorm):
        holder.SyncBatchNorm = paceline.SyncBatchNorm
