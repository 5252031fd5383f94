"""Whose code a line is: it is told by where files lie, so each place must be there, and each file of ours be known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

import paceline
from paceline.control import user_code

PACKAGE = Path(paceline.__file__).parent


def test_every_file_of_the_package_is_known_to_be_ours() -> None:
    files = [str(file) for file in PACKAGE.rglob("*.py")]
    assert len(files) > 100
    assert [file for file in files if user_code.is_not_ours(file)] == []


@pytest.mark.parametrize("file", [torch.__file__, os.__file__, "<frozen runpy>"])
def test_files_of_libraries_are_not_the_users(file: str) -> None:
    assert not user_code.is_user_code(file)
    assert not user_code.is_not_ours(file)


def test_a_file_beside_the_package_is_the_users(tmp_path: Path) -> None:
    assert user_code.is_user_code(str(tmp_path / "train.py"))
    assert user_code.is_not_ours(f"{PACKAGE}_of_the_user/train.py")


def test_what_a_thread_does_is_told_by_files_that_there_are() -> None:
    starts = [start for start, _ in user_code._ACTIVITIES]
    assert distributed_c10d.__file__ in starts
    assert [start for start in starts if not os.path.exists(start)] == []
