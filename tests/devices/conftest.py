"""Ranks that have the sim device. No other test gets them, because a process cannot lose a device again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import RankPool
from tests.devices import sim


@pytest.fixture(scope="session")
def device_library() -> Path:
    if not sim.can_be_built():
        pytest.skip("there is no g++ to build the sim device with")
    return sim.build()


@pytest.fixture(scope="session")
def device_pool(job_directory: None) -> Iterator[RankPool]:
    with RankPool(preload=("tests.preloaded",)) as pool:
        yield pool


@pytest.fixture
def ranks(device_library: Path, device_pool: RankPool) -> Callable[..., list[Any]]:
    """As everywhere; but the ranks have the device."""

    def run(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return device_pool.run(_with_device, device_library, fn, args, **options)

    return run


def _with_device(rank: int, world_size: int, library: Path, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    sim.load(library)
    return fn(rank, world_size, *args)
