"""The versions of torch that this package works with. It is imported first, because other files need names of torch's.

Some of those names are private, and a version of torch may come without them. What is there is used, and what is
missing is noticed when the package is imported, or when the compiler is (``_torch``, ``tracing/installation.py``).
"""

from __future__ import annotations

import re
import warnings

import torch

OLDEST = (2, 13)
"""Older releases lack names that everything here needs. It is the bound in ``pyproject.toml``."""
NEWEST_TESTED = (2, 15)
"""The newest release that the tests have run with; ``docs/versions.md`` has the figures."""


def _words(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


_TESTED = f"torch {_words(OLDEST)}" + (f" to {_words(NEWEST_TESTED)}" if NEWEST_TESTED > OLDEST else "")


def _check() -> None:
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    # A build with a name of its own is taken for what it says it can do.
    release = (int(numbers[1]), int(numbers[2])) if numbers else NEWEST_TESTED
    if release < OLDEST:
        raise ImportError(
            f"paceline needs torch {_words(OLDEST)} or newer, and this is torch {torch.__version__}: "
            f"pip install 'torch>={_words(OLDEST)}'."
        )
    if release > NEWEST_TESTED:
        warnings.warn(
            f"paceline was tested with {_TESTED}, and nobody has tested it with torch {torch.__version__}. "
            "If something is off, compare with a tested version.",
            stacklevel=2,
        )
    try:
        # It is imported here to learn whether torch has all names that are needed at import.
        from paceline import _torch  # noqa: F401
    except (AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ImportError(
            f"paceline does not fit torch {torch.__version__} ({type(error).__name__}: {reason}). It was tested with "
            f"{_TESTED}: install one of these, or a newer paceline."
        ) from error


_check()
