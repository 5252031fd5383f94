"""Runs that several test files look at."""

from __future__ import annotations

import pytest

from tests.tracing.graphs import on_fake_group
from tests.tracing.runner import ALLOWED_WARNINGS


@pytest.fixture(scope="session")
def fake_outcomes(rank_pool):
    """Every expression on a fake group of 8, compiled with the eager backend: its graphs, and what is wrong."""
    (answers,) = rank_pool.run(on_fake_group, world_size=1, backend=None, timeout=170, allow_warnings=ALLOWED_WARNINGS)
    return answers
