"""The ``paceline`` command: what it starts, and what it says to a wrong flag."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.run import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """What `launch` was called with; nothing is started."""
    calls: list[tuple[list[str], dict[str, Any]]] = []

    def record(command: list[str], **options: Any) -> int:
        calls.append((command, options))
        return 5

    monkeypatch.setattr(cli, "launch", record)
    return calls


def test_train_starts_two_ranks_of_the_example(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The example is found beside the package, and not only in the current directory.
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train"]) == 5
    assert launched == [([sys.executable, str(EXAMPLE)], {"nproc": 2})]


def test_flags_that_are_not_the_launchers_go_to_the_script_in_order(launched: list[Any], tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.touch()
    cli.main(["train", "--steps", "3", "--nproc", "4", "--nprocs", "9", "--script", str(script), "--resume"])
    assert launched == [
        ([sys.executable, str(script), "--steps", "3", "--nprocs", "9", "--resume"], {"nproc": 4}),
    ]


def test_a_double_dash_hands_even_help_to_the_script(launched: list[Any]) -> None:
    cli.main(["train", "--", "--help"])
    assert launched[0][0][2:] == ["--help"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "command"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "--nproc", "0"], "--nproc: must be a whole number of at least 1, got '0'"),
        (["train", "--nproc", "two"], "--nproc: must be a whole number of at least 1, got 'two'"),
        (["train", "--nproc"], "--nproc: expected one argument"),
        (["train", "--script", "no/such.py"], "--script: there is no file 'no/such.py'"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    argv: list[str], said: str, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not launched


def test_the_example_of_the_current_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[Any]
) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "train_gpt.py").touch()
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lib" / "site-packages" / "paceline" / "run" / "cli.py"))
    monkeypatch.chdir(tmp_path)
    cli.main(["train"])
    assert launched[0][0][1] == str(tmp_path / "examples" / "train_gpt.py")


def test_without_a_checkout_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lib" / "site-packages" / "paceline" / "run" / "cli.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train"])
    assert ended.value.code == 2
    assert "--script PATH" in capsys.readouterr().err
    assert not launched


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "--nproc", "-1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("paceline train: argument --nproc")
    assert done.stdout == ""
