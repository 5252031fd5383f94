"""Runs that several test files look at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.tracing.graphs import Outcomes
from tests.tracing.runner import LIMIT_S


@pytest.fixture
def ranks(rank_pool) -> Callable[..., list[Any]]:
    """As everywhere, with time for the compiler on a busy machine."""
    return functools.partial(rank_pool.run, timeout=LIMIT_S)


@pytest.fixture(scope="session")
def fake_outcomes() -> Iterator[Outcomes]:
    """Every expression on a fake group of 8, compiled with the eager backend: its graphs, and what is wrong."""
    with closing(Outcomes("--paceline")) as outcomes:
        yield outcomes


@pytest.fixture(scope="session")
def plain_outcomes() -> Iterator[Outcomes]:
    """The same without Paceline."""
    with closing(Outcomes()) as outcomes:
        yield outcomes
