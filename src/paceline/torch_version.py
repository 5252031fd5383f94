"""The versions of torch that this package works with. It is imported first, because other files need names of torch's.

Some of those names are private. With another version of torch, some import would fail, with words that do not tell why.
"""

from __future__ import annotations

import torch

NEEDED = "2.13"
"""The release, with all its patches. It is that of ``pyproject.toml``."""

if torch.__version__.split(".")[:2] != NEEDED.split("."):
    raise ImportError(
        f"paceline needs torch {NEEDED}, and this is torch {torch.__version__}: pip install 'torch=={NEEDED}.*'."
    )
