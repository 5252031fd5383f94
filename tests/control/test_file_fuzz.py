"""Progress files that were changed at random: ``file_fuzz.py`` has them, and the soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.control.file_fuzz import run


@pytest.mark.parametrize("files", [500, pytest.param(20_000, marks=pytest.mark.full)])
def test_changed_files_are_left_out_or_shown_escaped(files: int, tmp_path: Path) -> None:
    were_read, wrong = run(range(files), tmp_path)
    assert wrong == []
    # Otherwise the texts of changed files would never have been shown.
    assert were_read > files // 4
