"""What several tests of the control plane use."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

BUSY_S = 60.0
"""How much longer than promised something may take, because the machine may be busy with other things."""


def group_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
