"""Settings: arguments come before the environment, and both are checked."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import BadArgumentError, BadTypeError
from paceline.settings import HangWatch


@pytest.mark.parametrize(
    ("mode", "after_s", "error"),
    [("maybe", 1, BadArgumentError), ("off", 0, BadArgumentError), ("off", "30", BadTypeError)],
)
def test_settings_are_checked(mode: str, after_s: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        HangWatch(mode, after_s)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HangWatch.from_arguments() == HangWatch("observe", 30.0)
    monkeypatch.setenv("PACELINE_HANG_WATCH", "enforce")
    monkeypatch.setenv("PACELINE_HANG_AFTER_S", "90")
    assert HangWatch.from_arguments() == HangWatch("enforce", 90.0)
    assert HangWatch.from_arguments("off", 5) == HangWatch("off", 5)
    monkeypatch.setenv("PACELINE_HANG_AFTER_S", "soon")
    with pytest.raises(BadArgumentError, match="PACELINE_HANG_AFTER_S"):
        HangWatch.from_arguments()
