"""Collectives through shared memory: the c10d backend ``shm``.

``import paceline`` registers it, so ``torch.distributed.init_process_group("cpu:shm")`` works for anybody::

    dist.init_process_group("cpu:shm")
    dist.all_reduce(tensor)

The layout, from the ground up:

- ``shm``: the C kernel with its Python binding, and the memory that the ranks of a host share
- ``c10d``: the process group that torch calls, over a *carrier* that moves its tensors
- ``hosts``: how ranks find out who shares memory, and the carrier of groups that span hosts
- ``plain_groups``: groups whose ranks share no memory
- ``creation``: chooses what carries a new group
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.transport import plain_groups

BACKEND = "shm"

__all__ = ["BACKEND", "Options", "allocate", "describe", "register"]


@dataclass(frozen=True)
class Options:
    """For ``init_process_group(..., pg_options=...)`` and ``new_group``."""

    between: str = "gloo"
    """The backend between the leaders of hosts: gloo, or one registered with ``Backend.register_backend``."""


def register() -> None:
    """Tell c10d about the backend. This is cheap, since nothing is loaded until a group is made."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _new_group, extended_api=True, devices=["cpu"])
    # ``import torch`` may have registered it already (``paceline_autoload``), which does no more than that.
    _torch.leave_unrecorded(BACKEND)


def allocate(
    nbytes: int, *, group: dist.ProcessGroup | None = None, wait: Callable[[dist.Work], None] | None = None
) -> Tensor | None:
    """Allocate bytes in shared memory, on which ``all_reduce`` copies nothing. This is a collective of ``group``.

    It returns None on all ranks if the group does not share memory or if there is no room. Callers who do not want to
    wait for the other ranks with ``work.wait()`` pass ``wait``, which is called with each work instead.

    Example::

        memory = paceline.transport.allocate(4 * 1024)
        bucket = torch.zeros(1024) if memory is None else memory.view(torch.float32)
    """
    found: Any = dist.group.WORLD if group is None else group
    allocate_shared = getattr(found, "allocate_shared", None)
    tensor: Tensor | None = None if allocate_shared is None else allocate_shared(nbytes, wait)
    return tensor


def describe(group: dist.ProcessGroup) -> str:
    """Say in words how a group with this backend carries collectives. The text is empty for other backends."""
    backend = plain_groups.backend_of(group)
    return getattr(group, "carried", "") if backend is None else f"{group.size()} ranks, collectives over {backend}"


def adds_sparse(group: dist.ProcessGroup) -> bool:
    """Whether ``all_reduce`` of the group, if it has this backend, takes sparse tensors, as gloo's does."""
    return plain_groups.backend_of(group) == dist.Backend.GLOO or checks_sparse(group)


def checks_sparse(group: dist.ProcessGroup) -> bool:
    """Whether the group looks at the indices of sparse tensors that it sums, which gloo does not."""
    return getattr(group, "adds_sparse", False)


def _new_group(backend_options: Any, group_options: Any) -> Any:
    from paceline.transport.creation import new_group

    return new_group(backend_options, group_options)
