"""Files and functions are short, and tests do not sleep: checked in the source of the package and of the tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline

SRC = Path(paceline.__file__).parent
TESTS = Path(__file__).parent
MOST_LINES, MOST_LINES_OF_FUNCTION = 450, 60
# What sleeps on purpose: a rank ends at another moment each time, stacks are shown on the way to a failure, and a wait
# for the device of the tests blocks the host as the one of an accelerator does.
SLEEPING = {"run/ends.py", "transport/_hosts.py", "devices/simccl.py"}


def _too_long(text: str) -> list[str]:
    """The functions of a file that are too long, and the file itself if it is."""
    found = [f"{lines} lines"] if (lines := len(text.splitlines())) > MOST_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found += [f"{node.name}: {lines} lines"] if lines > MOST_LINES_OF_FUNCTION else []
    return found


def _sleeps(text: str) -> list[int]:
    """The lines on which a file sleeps. To sleep for 0 s is only to let other threads run."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if ast.unparse(call.func) in ("time.sleep", "sleep") and ast.unparse(call) != "time.sleep(0)"
    ]


@pytest.mark.parametrize("folder", [SRC, TESTS], ids=["src", "tests"])
def test_files_and_functions_are_short(folder: Path) -> None:
    found = {file: _too_long(file.read_text(encoding="utf-8")) for file in folder.rglob("*.py")}
    assert len(found) > 100
    assert {str(file): long for file, long in found.items() if long} == {}


def test_tests_do_not_sleep() -> None:
    files = {file.relative_to(TESTS).as_posix(): file for file in TESTS.rglob("*.py")}
    assert {name for name, file in files.items() if _sleeps(file.read_text(encoding="utf-8"))} == SLEEPING


def test_what_is_long_or_sleeps_would_be_found() -> None:
    assert _too_long("x\n" * MOST_LINES) == []
    assert _too_long("x\n" * (MOST_LINES + 1)) == ["451 lines"]
    assert _too_long("def f():\n" + "    x\n" * MOST_LINES_OF_FUNCTION) == ["f: 61 lines"]
    assert _sleeps("import time\ntime.sleep(0)\ntime.sleep(0.1)") == [3]
