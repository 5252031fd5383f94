"""Checks what `make dist` has built: installs it into bare environments and runs the README's script there.

    python -m tests.release dist

A bare environment has torch and what the package asks for, and so no numpy. One gets the wheel, and its ranks share
memory. The other gets the sdist while there is no C compiler; its ranks use gloo, and say so once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
NOTICE = "ranks use gloo instead of shared memory"


def readme_script() -> str:
    """The whole script that the README shows."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (script,) = [block for block in blocks if "paceline.shutdown()" in block]
    return script


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command writes, on both streams."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def check(package: Path, folder: Path, *, with_compiler: bool) -> str:
    """Install ``package`` into a new environment in ``folder`` and run the script; returns what its ranks say."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    script = folder / "script.py"
    script.write_text(readme_script(), encoding="utf-8")
    compiler = {} if with_compiler else {"CC": "no-compiler", "PATH": str(python.parent)}
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    release = torch.__version__.partition("+")[0]
    _run(*pip, f"torch=={release}", package.resolve(), cwd=folder, **compiler)
    has_numpy = "import importlib.util as find; print(find.find_spec('numpy') is not None)"
    assert _run(python, "-c", has_numpy, cwd=folder).strip() == "False", "numpy is there, so this shows less"
    _run(python, script, cwd=folder)
    said = _run(python, "-m", "torch.distributed.run", "--nproc-per-node=2", script, cwd=folder)
    assert said.count(NOTICE) == (0 if with_compiler else 1), said
    return said


def main(dist: Path) -> None:
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    for package, with_compiler in ((wheel, True), (sdist, False)):
        with tempfile.TemporaryDirectory() as folder:
            said = check(package, Path(folder), with_compiler=with_compiler)
        (carried,) = {line for line in said.splitlines() if line.startswith("paceline:") and "2 ranks" in line}
        print(f"{package.name}{'' if with_compiler else ' without a compiler'}: {carried}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
