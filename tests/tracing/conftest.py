"""Runs that several test files look at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tracing.graphs import Outcomes
from tests.tracing.runner import LIMIT_S


@pytest.fixture
def ranks(rank_pool) -> Callable[..., list[Any]]:
    """As everywhere, with time for the compiler on a busy machine."""
    return functools.partial(rank_pool.run, timeout=LIMIT_S)


@pytest.fixture(scope="session")
def _both() -> Iterator[tuple[Outcomes, Outcomes]]:
    # Started together: each has a core of its own.
    both = (Outcomes("--paceline"), Outcomes())
    yield both
    for outcomes in both:
        outcomes.close()


@pytest.fixture(scope="session")
def fake_outcomes(_both) -> Outcomes:
    """Every expression on a fake group of 8, compiled with the eager backend: its graphs, and what is wrong."""
    return _both[0]


@pytest.fixture(scope="session")
def plain_outcomes(_both) -> Outcomes:
    """The same without Paceline."""
    return _both[1]
