"""``GroupFacts``: what c10d asks about a process group, besides its collectives."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import Store

from paceline import _torch
from paceline.errors import StateError


class GroupFacts(_torch.PythonProcessGroup):  # type: ignore[misc]
    """The names, numbers and options of a group; ``ShmProcessGroup`` adds what it does."""

    adds_sparse = True
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._name = ""
        self._description = ""
        self._sequence = 0
        self._timeout_s = timeout.total_seconds()

    def getBackendName(self) -> str:
        return "shm"

    name = _get_backend_name = getBackendName

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank
    getSize = size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """What serves tensors on ``device``: this group itself, for CPU tensors only."""
        if torch.device(device).type != "cpu":
            raise StateError(f"No backend type associated with device type {device}: shm carries CPU tensors")
        return self

    @property
    def options(self) -> SimpleNamespace:
        """The part of a backend's options that torch reads."""
        return SimpleNamespace(_timeout=timedelta(seconds=self._timeout_s), backend="shm", group_name=self._name)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of collectives from now on."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _has_hooks(self) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        raise StateError("Backend shm does not implement startCoalescing: leave `device` out of the coalescing manager")

    _end_coalescing = _start_coalescing
