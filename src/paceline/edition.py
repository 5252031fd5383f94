"""Which edition of our code a compiled graph was made by.

torch keeps compiled graphs on disk under a key that has the names of a graph's operators and their arguments, and
nothing of what the operators mean: code that an older Paceline compiled would run with this one. So an edition is part
of the names, or of the arguments.
"""

from __future__ import annotations

import hashlib
import pkgutil
from importlib import metadata


def edition(*files: str) -> str:
    """Six digits that are others whenever one of these files of the package changes."""
    try:
        parts = [pkgutil.get_data("paceline", name) or b"" for name in files]
    except OSError:  # installed without its source
        parts = [metadata.version("paceline").encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:6]
