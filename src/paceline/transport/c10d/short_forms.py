"""The short forms of c10d's methods: ``group.allreduce(tensor, op)`` beside ``group.allreduce([tensor], options)``.

torch's own process group takes both. This module makes the options for the short ones.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d as c10d

ALLGATHER = c10d.AllgatherOptions()
ALLREDUCE = c10d.AllreduceOptions()
ALLREDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
ALL_TO_ALL = c10d.AllToAllOptions()
BARRIER = c10d.BarrierOptions()
BROADCAST = c10d.BroadcastOptions()
GATHER = c10d.GatherOptions()
REDUCE = c10d.ReduceOptions()
REDUCE_SCATTER = c10d.ReduceScatterOptions()
SCATTER = c10d.ScatterOptions()


def options(
    kind: type,
    given: Any,
    *,
    default: Any,
    timeout: timedelta | None = None,
    op: Any = None,
    root: int | None = None,
) -> Any:
    """``given`` if it is an options object already; else an options object with what was given instead."""
    if isinstance(given, kind):
        return given
    if isinstance(given, timedelta):
        given, timeout = None, given
    if kind in (c10d.BroadcastOptions, c10d.GatherOptions, c10d.ScatterOptions, c10d.ReduceOptions):
        root = given if root is None else root
    else:
        op = given if op is None else op
    if timeout is None and op is None and root is None:
        return default
    made = kind()
    if timeout is not None:
        made.timeout = timeout
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    return made
