"""The files of a job, in a directory that its ranks on one host share, and that outlives them if they die.

A rank that ends well removes its files, and the last rank also removes the directory. What remains was left by ranks
that were killed or raised; ``python -m paceline doctor`` reads it. When there are many directories, the oldest are
removed. A directory is never touched if one of its processes still runs, or if it has a file that is not ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from pathlib import Path

from paceline.control.processes import birth, process_state
from paceline.control.progress import Record, read_file
from paceline.settings import job_directory

KEPT_JOBS = 32
_log = logging.getLogger("paceline.control")

# What ranks make in a job's directory.
_OURS = re.compile(r"(?:[0-9a-f]{32}\.)?wrapper\d+\.rank\d+|stacks\.(\d+)")


def make_directory(job: str) -> Path | None:
    """This job's directory; None if it cannot be made, in which case only the doctor has less to say."""
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
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in base.iterdir():
            # Each path is looked at by itself, because another rank may be removing one.
            with contextlib.suppress(OSError):
                info = path.lstat()
                if re.fullmatch(r"[0-9a-f]{32}", path.name) and stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o022:
                    found.append((info.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def records(path: Path) -> dict[Path, Record]:
    """What the files of a job say."""
    found = {file: read_file(file) for file in sorted(path.glob("*wrapper*.rank*"))}
    return {file: record for file, record in found.items() if record is not None}


def _prune(base: Path) -> None:
    """Make room for one more."""
    for path in all_jobs(base)[KEPT_JOBS - 1 :]:
        with contextlib.suppress(OSError):
            files = list(path.iterdir())
            if path.lstat().st_uid == os.getuid() and all(_is_left(file) for file in files):
                for file in files:
                    file.unlink()
                path.rmdir()


def _is_left(path: Path) -> bool:
    """Whether ``path`` is a file of ours whose process is gone. It is False for processes of other hosts."""
    named = _OURS.fullmatch(path.name)
    if named is None or not stat.S_ISREG(path.lstat().st_mode):
        return False
    if named[1]:
        return birth(int(named[1])) == 0
    record = read_file(path)
    return record is not None and process_state(record.process) == "gone"
