"""Fixtures of the transport's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.testing import RankPool
from tests.transport.killing import segments
from tests.transport.requirements import needs_shm


@pytest.fixture(scope="package")
def _large_pool() -> Iterator[RankPool]:
    with RankPool(max_world_size=16) as pool:
        yield pool


@pytest.fixture
def many_ranks(_large_pool: RankPool) -> Callable[..., list[Any]]:
    """As ``ranks``, for up to 16: ranks that are started for these tests and ended after them."""
    return _large_pool.run


@pytest.fixture
def no_segment_left() -> Iterator[None]:
    """Whatever becomes of ranks, nothing of them stays in the shared-memory file system."""
    needs_shm()
    before = segments()
    yield
    assert segments() <= before
