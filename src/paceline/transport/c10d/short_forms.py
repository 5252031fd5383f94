"""The short forms of c10d's methods: ``group.allreduce(tensor, op)`` beside ``group.allreduce([tensor], options)``.

torch's own process group takes both. This module makes the options for the short ones.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import distributed_c10d as c10d


@cache
def default(kind: type) -> Any:
    """The options of a call to which none were given. One object serves all of them, as nobody changes it."""
    return kind()


def options(
    kind: type, given: Any, *, timeout: timedelta | None = None, op: Any = None, root: int | None = None
) -> Any:
    """``given`` if it is an options object already; else an options object that is made of what was given."""
    if isinstance(given, kind):
        return given
    if isinstance(given, timedelta):
        given, timeout = None, given
    if kind in (c10d.BroadcastOptions, c10d.GatherOptions, c10d.ScatterOptions, c10d.ReduceOptions):
        root = given if root is None else root
    else:
        op = given if op is None else op
    if timeout is None and op is None and root is None:
        return default(kind)
    made = kind()
    if timeout is not None:
        made.timeout = timeout
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    return made
