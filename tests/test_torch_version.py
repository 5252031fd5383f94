"""A torch that does not fit is named when the package is imported, and one that nobody has tested is too."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from paceline import torch_version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.mark.parametrize("version", ["2.12.1", "1.13.1+cpu", "2.1"])
def test_an_older_torch_is_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    with pytest.raises(ImportError, match=r"paceline needs torch 2\.13 or newer, and this is torch ") as caught:
        importlib.reload(torch_version)
    assert f"torch {version}:" in str(caught.value)
    assert "\n" not in str(caught.value)


NEWEST = ".".join(map(str, torch_version.NEWEST_TESTED))


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cpu", f"{NEWEST}.1", f"{NEWEST}.0a0+gitabc", "custom"])
def test_a_tested_torch_is_taken_without_a_word(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(torch_version)


@pytest.mark.parametrize("version", ["2.99.0", "3.0.1"])
def test_a_newer_torch_gets_one_warning(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    with pytest.warns(UserWarning, match=f"nobody has tested it with torch {re.escape(version)}") as caught:
        importlib.reload(torch_version)
    assert len(caught) == 1


def _import(before: str) -> list[str]:
    """The last line that an import of the package writes, after ``before`` was run."""
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; {before}; import paceline"], capture_output=True, text=True, timeout=120
    )
    return done.stderr.splitlines()


def test_it_is_looked_at_before_names_of_torchs_are_needed() -> None:
    said = _import("torch.__version__ = '2.9.0'; del torch.distributed.Store")
    assert said[-1].startswith("ImportError: paceline needs torch 2.13 or newer, and this is torch 2.9.0:")


def test_a_newer_torch_without_a_name_that_is_needed_is_refused_in_one_line() -> None:
    said = _import("torch.__version__ = '2.99.0'; del torch.distributed.distributed_c10d._resolve_process_group")
    assert re.match(
        r"ImportError: paceline does not fit torch 2\.99\.0 \(AttributeError: .*_resolve_process_group.*\)\. "
        r"It was tested with torch 2\.13.*: install one of these",
        said[-1],
    )


def test_the_package_asks_for_the_same_torch_and_has_no_upper_bound() -> None:
    (needed,) = re.findall(r'^dependencies = \["(torch[^"]*)"', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    assert needed == "torch>=" + ".".join(map(str, torch_version.OLDEST))
