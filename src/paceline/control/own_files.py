"""The files of this process: it takes them away when it ends well, and leaves them when an exception ends it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.control import private_files

keep = False
"""Whether an exception ends this program, so that its files are kept."""


def remove(path: Path) -> None:
    """Remove a file of a job, and the job's directory if that was its last file."""
    if keep:
        return
    with contextlib.suppress(OSError):
        private_files.remove(path)
        path.parent.rmdir()
