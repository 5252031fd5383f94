"""The examples in docstrings run, all in one process."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest
import torch.distributed as dist

import paceline

FOUND = [info.name for info in pkgutil.walk_packages(paceline.__path__, "paceline.")]
# The C kernel has a name that Python could import, but it is loaded as a plain library.
MODULES = ["paceline", *(name for name in FOUND if not name.endswith(("__main__", "._kernel")))]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples begin and end without a process group, and not under a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not dist.is_initialized()
    module = importlib.import_module(name)
    try:
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert not dist.is_initialized(), "an example left a process group behind"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert result.failed == 0, capsys.readouterr().out
    written = re.search(r">>> (?!.*\+SKIP)", inspect.getsource(module))
    assert bool(result.attempted) == bool(written), "an example is not found"
