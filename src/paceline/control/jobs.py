"""The files of a job: a directory that its ranks of one host share, and that outlives them if they die.

A rank that ends well takes its files away, and the directory with the last of them. What is left was left by ranks that
were killed or raised, for ``python -m paceline doctor``; the oldest go when there are many.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from paceline.options import job_directory

_KEPT_JOBS = 32
_log = logging.getLogger("paceline.control")

keep_files = False
"""An exception ends this program: what its files say is wanted."""


def make_directory(job: str) -> Path | None:
    """This job's directory; None if there cannot be one, which costs only what the doctor could say."""
    base = job_directory()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if base.stat().st_uid != os.getuid():
            raise PermissionError(f"{base} belongs to somebody else")
        path = base / job
        if not path.exists():
            _prune(base)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        _log.info("There will be no files for `paceline doctor`: %s.", error)
        return None
    return path


def all_jobs(base: Path) -> list[Path]:
    """The directories of jobs, the newest first."""
    try:
        found = [path for path in base.iterdir() if re.fullmatch(r"[0-9a-f]{32}", path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return []


def remove(path: Path) -> None:
    """Take a file of this job away, and the directory if it was the last."""
    if keep_files:
        return
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


def _prune(base: Path) -> None:
    for path in all_jobs(base)[_KEPT_JOBS:]:
        shutil.rmtree(path, ignore_errors=True)
