"""The ``paceline`` command: what it starts, and what it says to a wrong flag."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import spawn
from paceline.run import bench, cli, report
from paceline.transport.shm import kernel

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
        (["train", "mine.py", "--lr", "1"], "To run a script of yours: paceline run mine.py --lr 1 (see"),
        (["run"], "the following arguments are required: training_script"),
        (["run", "no/such.py"], "paceline run: there is no file 'no/such.py' (see paceline run --help)"),
        (["run", "--bind", "some", "mine.py"], "argument --bind: invalid choice: 'some'"),
        (["env", "now"], "unrecognized arguments: now"),
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


def test_the_version_is_that_of_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"paceline \S+ \(torch 2\.13\S*, Python 3\.\d+\.\d+\)\n", capsys.readouterr().out)


def test_env_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "s" * 40)
    monkeypatch.setenv("PACELINE_SWAP", "1")
    assert cli.main(["env"]) == 0
    told = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert paceline.__version__ in told["paceline"]
    assert torch.__version__ in told["torch"]
    assert "gloo" in told["torch"]
    assert "shm" in told["torch"]
    assert told["shm kernel"].strip() == "compiled" or "not usable: " in told["shm kernel"]
    assert "MB are free" in told["/dev/shm"]
    assert "PACELINE_SWAP=1" in told["environment"]
    assert "PACELINE_SECRET=(set)" in told["environment"]


def test_env_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.kernel, "reason_unavailable", lambda: "there was no compiler")
    monkeypatch.setattr(report, "_MEMORY", Path("/no/such/directory"))
    facts = report.facts()
    assert facts["shm kernel"] == "not usable: there was no compiler"
    assert facts["/dev/shm"].startswith("not usable: ")


def test_bench_without_the_kernel_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.kernel, "reason_unavailable", lambda: "there was no compiler")
    assert cli.main(["bench"]) == 1
    assert "nothing" not in (said := capsys.readouterr().out)
    assert "there was no compiler" in said


@pytest.mark.skipif(kernel.reason_unavailable() is not None, reason="needs the kernel")
def test_bench_compares_both(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "spawn", lambda fn, nproc: spawn(fn, nproc, (4096, 1 << 20), 0.01))
    assert cli.main(["bench"]) == 0
    title, head, *rows = capfd.readouterr().out.splitlines()
    assert "on 2 ranks" in title
    assert head.split() == ["size", "gloo", "shm", "gloo", "/", "shm"]
    assert [row.split()[:2] for row in rows] == [["4", "KB"], ["1", "MB"]]
    assert all(float(row.split()[-1]) > 0 for row in rows)
