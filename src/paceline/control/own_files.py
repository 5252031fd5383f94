"""The files of this process: it takes them away when it ends well, and leaves them when an exception ends it."""

from __future__ import annotations

import contextlib
from pathlib import Path

keep = False
"""An exception ends this program: what its files say is wanted."""


def remove(path: Path) -> None:
    """Take a file of a job away, and the job's directory if it was the last."""
    if keep:
        return
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
