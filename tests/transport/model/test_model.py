"""Runs spin over the models of the kernel's synchronisation, and over what must be found wrong with their mutants."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None, reason="needs spin (Debian: spin) and gcc"
)

RIGHT = [
    "rounds -DN=2 -DROUNDS=4",
    "rounds -DN=2 -DROUNDS=4 -DWRITE_BACK",
    "rounds -DN=2 -DROUNDS=4 -DZERO_COPY",
    "bells -DMESSAGES=4",
]
# Minutes on a busy machine: `make model` asks for them.
if os.environ.get("PACELINE_MODEL") == "full":
    RIGHT += [
        "rounds -DN=2 -DROUNDS=7",
        "rounds -DN=3 -DROUNDS=4",
        "rounds -DN=2 -DROUNDS=7 -DWRITE_BACK",
        "rounds -DN=2 -DROUNDS=6 -DZERO_COPY",
        "rounds -DN=3 -DROUNDS=2 -DZERO_COPY",
        "bells -DMESSAGES=7",
    ]
# What goes wrong without each of the orders that the code asks for.
SLEEPS_FOR_EVER = "invalid end state"
WRONG = {
    "rounds -DONE_HALF": "assertion violated",
    "rounds -DNO_RELEASE": "assertion violated",
    "rounds -DNO_RELEASE -DZERO_COPY": "assertion violated",
    # The assertion about inputs does not see these, only the one about results.
    "rounds -DWRITE_BACK -DEARLY_RESULT": "==((100+k)-1)) (at depth",
    "rounds -DWRITE_BACK -DLATE_RESULT": "==((100+k)-1)) (at depth",
    "rounds -DNO_ACQUIRE": "assertion violated",
    "rounds -DLATE_READS": "assertion violated",
    "rounds -DWEAK_SLEEPERS": SLEEPS_FOR_EVER,
    "rounds -DNO_RECHECK": SLEEPS_FOR_EVER,
    "bells -DNO_RELEASE": "assertion violated",
    "bells -DWEAK_LISTENING": SLEEPS_FOR_EVER,
    "bells -DNO_SECOND_LOOK": SLEEPS_FOR_EVER,
}


def _check(model: str, folder: Path) -> str:
    name, *flags = model.split()
    subprocess.run(["spin", "-a", *flags, HERE / f"{name}.pml"], cwd=folder, check=True, capture_output=True)
    subprocess.run(["gcc", "-O1", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], cwd=folder, check=True)
    found = subprocess.run(["./pan", "-m100000"], cwd=folder, check=False, capture_output=True, text=True)
    assert "max search depth too small" not in found.stdout
    return found.stdout


@pytest.mark.parametrize("model", RIGHT)
def test_no_interleaving_goes_wrong(model: str, tmp_path: Path) -> None:
    found = _check(model, tmp_path)
    assert "errors: 0" in found
    states = re.search(r"(\d+) states, stored", found)
    assert states is not None
    assert int(states.group(1)) > 1000


@pytest.mark.parametrize("model", WRONG)
def test_the_model_notices_when_an_order_is_missing(model: str, tmp_path: Path) -> None:
    found = _check(model, tmp_path)
    assert "errors: 1" in found
    assert WRONG[model] in found
