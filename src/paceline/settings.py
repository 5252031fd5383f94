"""Settings that come from the environment. Only this file and ``run``, which starts ranks, take any from there."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import BadArgumentError, BadTypeError


def environment(name: str) -> str | None:
    return os.environ.get(name)


SECRET = "PACELINE_SECRET"
"""The variable with the secret of a job. The launcher hands a new one to its ranks."""
SECRET_CHARACTERS = 32
"""How many characters a secret has at least: whoever reads a sealed message can try out a shorter one."""


def secret() -> bytes:
    """What the ranks of this job know and nobody else does; empty if there is none. Nothing may print it."""
    return _checked_secret(environment(SECRET))


@functools.lru_cache(maxsize=1)
def _checked_secret(text: str | None) -> bytes:
    if text is None:
        return b""
    # A variable that is set but empty comes of a script that failed to make a secret, so it does not count as unset.
    if len(text) < SECRET_CHARACTERS or not (text.isascii() and text.isprintable()):
        raise BadArgumentError(
            f"The environment variable {SECRET} must have at least {SECRET_CHARACTERS} printable ASCII characters; it "
            f"has {len(text)}, which are not shown here. Set it to the same random text on all ranks, such as "
            "`openssl rand -hex 32` gives, or unset it on all of them."
        )
    return text.encode("ascii")


def job_directory() -> Path:
    """Where ranks keep files about themselves while they run: ``PACELINE_JOB_DIR``, or a temporary directory."""
    return Path(environment("PACELINE_JOB_DIR") or Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}")


def job_directory_is_chosen() -> bool:
    """Whether the user has chosen that directory. Everybody can foretell the name of the other one."""
    return bool(environment("PACELINE_JOB_DIR"))


@dataclass(frozen=True)
class HangWatch:
    """What happens when a rank waits for others and there is no progress."""

    mode: str = "observe"
    """``observe`` writes a report to stderr and waits on, ``enforce`` raises it as an error, ``off`` does neither."""
    after_s: float = 30.0
    """How long there must have been no progress."""

    def __post_init__(self) -> None:
        if self.mode not in ("off", "observe", "enforce"):
            raise BadArgumentError(f"hang_watch must be 'off', 'observe' or 'enforce', not {self.mode!r}.")
        if isinstance(self.after_s, bool) or not isinstance(self.after_s, (int, float)):
            raise BadTypeError(f"hang_after_s must be a number of seconds, not {self.after_s!r}.")
        if not 0 < self.after_s < math.inf:
            raise BadArgumentError(f"hang_after_s must be a finite number of seconds above 0, not {self.after_s!r}.")

    @staticmethod
    def from_arguments(mode: str | None = None, after_s: float | None = None) -> HangWatch:
        """Take what is given, else ``PACELINE_HANG_WATCH`` and ``PACELINE_HANG_AFTER_S``, else the defaults."""
        mode = mode or environment("PACELINE_HANG_WATCH") or HangWatch.mode
        text = environment("PACELINE_HANG_AFTER_S")
        if after_s is None and text:
            try:
                after_s = float(text)
            except ValueError:
                raise BadArgumentError(f"PACELINE_HANG_AFTER_S must be a number of seconds, not {text!r}.") from None
        return HangWatch(mode, HangWatch.after_s if after_s is None else after_s)
