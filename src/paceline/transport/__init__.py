"""Collectives through shared memory: the c10d backend ``shm``.

``import paceline`` registers it, so ``torch.distributed.init_process_group("cpu:shm")`` works for anybody::

    dist.init_process_group("cpu:shm")
    dist.all_reduce(tensor)

The layout, from the ground up:

- ``csrc/``, ``library``, ``kernel``: the C kernel and its Python binding; knows addresses, nothing of tensors
- ``codes``: numbers that both have in common
- ``segment``: files of the shared-memory file system, mapped by several ranks
- ``rendezvous``: which ranks share memory, found by trying
- ``arena``: memory for buckets that all ranks have mapped
- ``packing``, ``checks``, ``forms``: tensors to addresses; what is refused; the short forms of calls
- ``work``, ``launcher``: what a call gets back, and how it is started
- ``reductions`` (with ``sparse``), ``exchanges``, ``process_group``: what c10d sees
- ``conductor``, ``host``, ``leaders``, ``lines``, ``messages``, ``parcels``: the parts of a group that spans hosts
- ``stages``, ``spanning_reductions``, ``spanning_exchanges``, ``hosts``: what c10d sees of one
- ``creation``: which of them a new group is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

BACKEND = "shm"

__all__ = ["BACKEND", "Options", "allocate", "describe", "register"]


@dataclass(frozen=True)
class Options:
    """For ``init_process_group(..., pg_options=...)`` and ``new_group``."""

    between: str = "gloo"
    """The backend between the leaders of hosts: gloo, or one registered with ``Backend.register_backend``."""


def register() -> None:
    """Tell c10d about the backend. Cheap: nothing is loaded until a group is made."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _new_group, extended_api=True, devices=["cpu"])


def allocate(
    nbytes: int, *, group: dist.ProcessGroup | None = None, wait: Callable[[dist.Work], None] | None = None
) -> Tensor | None:
    """Bytes in shared memory, on which ``all_reduce`` copies nothing; a collective of ``group``.

    None, on all ranks alike, where the group does not share memory or there is no room. ``wait`` is called with each
    work that waits for the other ranks, for who does not want to do that with ``work.wait()``.

    Example::

        memory = paceline.transport.allocate(4 * 1024)
        bucket = torch.zeros(1024) if memory is None else memory.view(torch.float32)
    """
    found: Any = dist.group.WORLD if group is None else group
    arenas = getattr(found, "arenas", None)
    if arenas is None:
        return None
    tensor: Tensor | None = arenas.allocate(nbytes, timeout_s=found.options._timeout.total_seconds(), wait=wait)
    return tensor


def describe(group: dist.ProcessGroup) -> str:
    """How a group with this backend carries collectives, in words; empty for groups of other backends."""
    return getattr(group, "carried", "")


def adds_sparse(group: dist.ProcessGroup) -> bool:
    """Whether ``all_reduce`` of the group, if it has this backend, takes sparse tensors, as gloo's does."""
    return bool(getattr(group, "adds_sparse", False))


def _new_group(backend_options: Any, group_options: Any) -> Any:
    from paceline.transport.creation import new_group

    return new_group(backend_options, group_options)
