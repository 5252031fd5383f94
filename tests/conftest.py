"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.testing import RankPool


@pytest.fixture(scope="session", autouse=True)
def job_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ranks that are killed leave files for the doctor: let them leave them where pytest clears up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_JOB_DIR", str(tmp_path_factory.mktemp("jobs")))
        yield


@pytest.fixture(scope="session")
def rank_pool(job_directory: None) -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Run a module-level function on live ranks: ``ranks(_body, *args, world_size=2)``."""
    return rank_pool.run
