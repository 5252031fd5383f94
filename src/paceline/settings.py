"""Settings that come from the environment. Only this file and ``run``, which starts ranks, take any from there."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import BadArgumentError, BadTypeError


def environment(name: str) -> str | None:
    return os.environ.get(name)


def job_directory() -> Path:
    """Where ranks keep files about themselves while they run: ``PACELINE_JOB_DIR``, or a temporary directory."""
    return Path(environment("PACELINE_JOB_DIR") or Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}")


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
