"""A torch that does not fit is named when the package is imported."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from paceline import torch_version


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0+cpu", "3.13.0", "2.1"])
def test_another_torch_is_refused_in_one_line(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", version)
    with pytest.raises(ImportError, match=r"paceline needs torch 2\.13, and this is torch ") as caught:
        importlib.reload(torch_version)
    assert f"torch {version}:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_is_looked_at_before_names_of_torchs_are_needed() -> None:
    code = "import torch; torch.__version__ = '2.9.0'; del torch.distributed.Store; import paceline"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].startswith("ImportError: paceline needs torch 2.13, and this is torch 2.9.0:")


def test_the_package_asks_for_the_same_torch() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = [text for text in project["dependencies"] if text.startswith("torch")]
    assert needed == f"torch>={torch_version.NEEDED},<2.14"
