"""Groups with backend ``shm`` whose ranks do not share memory: another backend carries their collectives alone."""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import Store

from paceline import _torch

_backends: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()
"""What carries each of these groups."""


def new_plain_group(store: Store, *, rank: int, size: int, timeout: timedelta, backend: str) -> dist.ProcessGroup:
    """Make a group that ``backend`` carries.

    It is an instance of torch's own class, and not of a subclass in Python. torch calls the backend of a subclass with
    the GIL held. A thread of gloo's that drops a tensor needs the GIL while it holds gloo's lock, so that the two would
    wait for each other.
    """
    made = _torch.new_backend(backend, dist.PrefixStore(f"{backend}/", store), rank=rank, size=size, timeout=timeout)
    group = dist.ProcessGroup(store, rank, size)
    _torch.adopt_backend(group, made)
    _backends[group] = backend
    return group


def backend_of(group: dist.ProcessGroup) -> str | None:
    """The name of the backend that carries a group of this kind; None for other groups."""
    return _backends.get(group)
