"""The files of a job, in a directory that its ranks on one host share, and that outlives them if they die.

A rank that ends well removes its files, and the last rank also removes the directory. What remains was left by ranks
that were killed or raised; ``python -m paceline doctor`` reads it. When there are many directories, the oldest are
removed. A directory is never touched if one of its processes still runs, or if it has a file that is not ours.

The directories of jobs are in one directory, the base. Anybody can foretell its name, and may have made it first. If it
is refused for such a reason, the directory of a job is made beside it. Its name is the base's with the job's behind it,
which is random, and which all ranks of the job know.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Collection
from functools import cache
from pathlib import Path

from paceline.control import private_files
from paceline.control.processes import birth, process_state
from paceline.control.progress import Record, read_file
from paceline.settings import job_directory, job_directory_is_chosen

KEPT_JOBS = 32
_log = logging.getLogger("paceline.control")

_NAME = "[0-9a-f]{32}"
# What ranks make in a job's directory.
_PROGRESS = re.compile(rf"(?:{_NAME}\.)?wrapper\d+\.rank\d+")
_STACKS = re.compile(r"stacks\.(\d+)")


def is_name(job: str) -> bool:
    """Whether a job can have this name. Names come from the store, and become parts of paths."""
    return re.fullmatch(_NAME, job) is not None


def make_directory(job: str) -> Path | None:
    """This job's directory; None if it cannot be made, in which case only the doctor has less to say."""
    base = job_directory()
    try:
        try:
            with contextlib.suppress(FileExistsError):
                base.mkdir(mode=0o700, parents=True)
            with private_files.directory(base, may_be_link=job_directory_is_chosen()) as opened:
                return _make(base / job, below=opened)
        except PermissionError as refused:
            path = _make(base.parent / f"{base.name}-{job}")
            _warn_once(f"The files for `paceline doctor` are in {path}: {refused}.")
            return path
    except PermissionError as error:
        _warn_once(f"There will be no files for `paceline doctor`: {error}.")
    except OSError as error:
        _log.info("There will be no files for `paceline doctor`: %s.", error)
    return None


def base_refusal() -> str:
    """Why jobs do not have their directories in the base; empty if they do."""
    return private_files.refusal(job_directory(), may_be_link=job_directory_is_chosen())


def all_jobs() -> list[Path]:
    """The directories of this user's jobs, the newest first."""
    base = job_directory()
    places = [(base.parent, f"{base.name}-")]
    if not base_refusal():
        places.append((base, ""))
    found: list[tuple[float, Path]] = []
    for place, prefix in places:
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                if name.startswith(prefix) and is_name(name.removeprefix(prefix)):
                    # Each path is looked at by itself, because another rank may be removing one.
                    with contextlib.suppress(OSError), private_files.directory(place / name) as opened:
                        found.append((os.fstat(opened).st_mtime, place / name))
    return [path for _, path in sorted(found, reverse=True)]


def records(path: Path) -> dict[Path, Record]:
    """What the files of a job say."""
    with contextlib.suppress(OSError):
        files = [path / name for name in private_files.names(path) if _PROGRESS.fullmatch(name)]
        return {file: record for file in files if (record := read_file(file)) is not None}
    return {}


def job_of_processes(pids: Collection[int]) -> Path | None:
    """The newest job in which one of these processes was a rank."""
    for path in all_jobs():
        if any(record.pid in pids for record in records(path).values()):
            return path
    return None


def _make(path: Path, *, below: int | None = None) -> Path:
    """Make a directory, if there is none, and look at it; ``below`` is a descriptor of the one that it is in."""
    if not path.exists():
        _prune()
    with contextlib.suppress(FileExistsError):
        os.mkdir(path if below is None else path.name, 0o700, dir_fd=below)
    with private_files.directory(path):
        return path


@cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _prune() -> None:
    """Make room for one more."""
    for path in all_jobs()[KEPT_JOBS - 1 :]:
        with contextlib.suppress(OSError):
            files = [path / name for name in private_files.names(path)]
            if all(_is_left(file) for file in files):
                for file in files:
                    private_files.remove(file)
                path.rmdir()


def _is_left(path: Path) -> bool:
    """Whether ``path`` is a file of ours whose process is gone. It is False for processes of other hosts."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    if named := _STACKS.fullmatch(path.name):
        return birth(int(named[1])) == 0
    record = read_file(path) if _PROGRESS.fullmatch(path.name) else None
    return record is not None and process_state(record.process) == "gone"
