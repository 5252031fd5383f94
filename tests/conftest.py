"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.testing import RankPool
from tests.lanes import Scheduler, fast_lane


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the tests of `make test` only: see tests/lanes.py")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what it runs in the background like that. Programs that a test starts would inherit it, but
        # they do not inherit a handler.
        signal.signal(signal.SIGINT, lambda *_: None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        kept = fast_lane(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def job_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ranks that are killed leave files for the doctor: let them leave them where pytest clears up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_JOB_DIR", str(tmp_path_factory.mktemp("jobs")))
        yield


@pytest.fixture(scope="session")
def rank_pool(job_directory: None) -> Iterator[RankPool]:
    with RankPool(preload=("tests.preloaded",)) as pool:
        yield pool


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Run a module-level function on live ranks: ``ranks(_body, *args, world_size=2)``."""
    return rank_pool.run
