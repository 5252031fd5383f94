"""``paceline run``: what the ranks find, and what it says when they fail."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.run import bound, cores, torchrun

COMMAND = [sys.executable, "-m", "paceline", "run"]
PLAIN = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PACELINE_SECRET")}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[argparse.Namespace, dict[str, str]]]:
    """What torch's launcher was called with, and in which environment; nothing is started."""
    calls: list[tuple[argparse.Namespace, dict[str, str]]] = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    for name in [*os.environ]:
        if name.startswith(("PACELINE_", "OMP_", "TORCH", "PET_")):
            monkeypatch.delenv(name)
    environ = dict(os.environ)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(cores, "usable_cores", lambda: [(0, 4), (1, 5), (2, 6), (3, 7)])
    monkeypatch.setattr(cores, "quota", lambda: 100.0)
    monkeypatch.setattr(torchrun, "run", lambda flags: calls.append((flags, dict(environ))))
    return calls


def _run(started: list[Any], *argv: str) -> tuple[argparse.Namespace, dict[str, str]]:
    assert torchrun.run_script(argv) == 0
    return started[-1]


def test_two_ranks_with_half_of_the_cores_each(started: list[Any]) -> None:
    flags, environ = _run(started, "mine.py", "--swap", "--lr", "1")
    assert flags.nproc_per_node == "2"
    assert environ["OMP_NUM_THREADS"] == "2"
    assert environ["PACELINE_CPU_BACKEND"] == "shm"
    assert environ[bound.CPUS_OF_RANKS] == "0,4,1,5;2,6,3,7"
    assert len(environ["PACELINE_SECRET"]) == 64
    # What stands behind the script is the script's.
    assert "PACELINE_SWAP" not in environ
    command = [flags.training_script, *flags.training_script_args]
    assert command == [sys.executable, bound.__file__, sys.executable, "-u", "mine.py", "--swap", "--lr", "1"]
    assert flags.no_python
    assert flags.tee == "3"


def test_what_the_user_has_chosen_stays(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ.update(OMP_NUM_THREADS="3", PACELINE_CPU_BACKEND="gloo", PACELINE_SECRET="s" * 40)
    flags, environ = _run(started, "--nproc", "3", "--swap", "--bind", "none", "--redirects", "1", "mine.py")
    assert (environ["OMP_NUM_THREADS"], environ["PACELINE_CPU_BACKEND"]) == ("3", "gloo")
    assert environ["PACELINE_SECRET"] == "s" * 40
    assert environ["PACELINE_SWAP"] == "1"
    assert (flags.nproc_per_node, flags.tee, flags.redirects) == ("3", "0", "1")
    assert (flags.training_script, flags.no_python) == ("mine.py", False)
    assert bound.CPUS_OF_RANKS not in environ


def test_several_hosts_share_no_secret_that_one_of_them_has_made_up(started: list[Any]) -> None:
    flags, environ = _run(started, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1", "mine.py")
    assert "PACELINE_SECRET" not in environ
    assert (flags.nnodes, flags.rdzv_endpoint) == ("2", "a:1")


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["-m", "json.tool", "x"], [sys.executable, "-u", "-m", "json.tool", "x"]),
        (["--no-python", "ls", "-l"], ["ls", "-l"]),
    ],
)
def test_modules_and_programs_run_as_under_torchrun(started: list[Any], argv: list[str], command: list[str]) -> None:
    flags, _ = _run(started, *argv)
    assert flags.training_script_args == [bound.__file__, *command]
    assert not flags.module


@pytest.mark.parametrize(
    "argv", [["--nproc", "5", "mine.py"], ["--nproc", "1", "mine.py"], ["--nproc", "auto", "mine.py"]]
)
def test_ranks_are_bound_only_if_there_is_a_core_for_each(started: list[Any], argv: list[str]) -> None:
    flags, environ = _run(started, *argv)
    assert flags.training_script == "mine.py"
    assert bound.CPUS_OF_RANKS not in environ


def test_with_accelerators_there_is_a_rank_for_each_and_none_is_bound(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    flags, environ = _run(started, "mine.py")
    assert flags.nproc_per_node == "4"
    assert bound.CPUS_OF_RANKS not in environ


def test_a_swap_that_torch_would_not_hear_of_is_refused(started: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    with pytest.raises(SystemExit) as ended:
        torchrun.run_script(["--swap", "mine.py"])
    assert ended.value.code == 2
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from asking" in capsys.readouterr().err
    assert started == []


def test_help_has_torchruns_flags_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torchrun.run_script(["--help"])
    told = capsys.readouterr().out
    for flag in ("--swap", "--bind", "--nproc-per-node", "--rdzv-endpoint", "--max-restarts"):
        assert flag in told


# -- real ranks ----------------------------------------------------------------------------------------

# It knows nothing of paceline.
STOCK = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group()
rank = dist.get_rank()
ddp = DDP(torch.nn.Linear(4, 2))
ddp(torch.ones(1, 4)).sum().backward()
print(type(ddp).__module__, dist.get_backend_config(), sorted(os.sched_getaffinity(0)), flush=True)
dist.barrier()
if sys.argv[1] == "fail" and rank == 1:
    raise ValueError("no such file")
ddp(torch.ones(1, 4)).sum().backward()
dist.destroy_process_group()
"""


def _start(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(STOCK, encoding="utf-8")
    return subprocess.run(
        [*COMMAND, "--swap", str(script), how], env=PLAIN, capture_output=True, text=True, timeout=170
    )


def test_a_script_that_knows_nothing_of_us_trains_with_us(tmp_path: Path) -> None:
    done = _start(tmp_path, "well")
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("[rank "))
    shares = cores.share(cores.usable_cores(), 2)
    places = [sorted(cpu for core in share for cpu in core) for share in shares] or [
        sorted(os.sched_getaffinity(0))
    ] * 2
    assert told == [f"[rank {rank}] paceline.ddp.module cpu:shm {places[rank]}" for rank in (0, 1)]


def test_the_end_of_a_failed_job_is_explained(tmp_path: Path) -> None:
    done = _start(tmp_path, "fail")
    assert done.returncode == 1
    assert "[rank 1] [rank1]: ValueError: no such file" in done.stderr
    assert "paceline: first cause: rank 1 raised in its program: ValueError" in done.stderr
    assert "paceline: for more: paceline doctor /" in done.stderr
    # torch's summary, and no traceback of the launcher.
    assert "train.py FAILED" in done.stderr
    assert "Traceback" not in done.stderr.rpartition("FAILED")[2].partition("traceback :")[0]


WAITING = """
import os, signal, time, torch, paceline
world = paceline.init(hang_after_s=0.5)
ddp = paceline.DDP(torch.nn.Linear(4, 2))
ddp(torch.ones(1, 4)).sum().backward()
if world.rank == 1:
    open(os.environ["PACELINE_TEST_PIPE"]).read()
ddp(torch.ones(1, 4)).sum().backward()
"""


@pytest.mark.full
def test_a_hang_that_is_interrupted_is_explained(tmp_path: Path) -> None:
    script, pipe = tmp_path / "train.py", tmp_path / "pipe"
    script.write_text(WAITING, encoding="utf-8")
    os.mkfifo(pipe)
    environ = PLAIN | {"PACELINE_TEST_PIPE": str(pipe), "PACELINE_JOB_DIR": str(tmp_path / "jobs")}
    process = subprocess.Popen([*COMMAND, str(script)], env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        # The pipe ends, and this with it, if the launcher does.
        assert any("Rank 1 has not started" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert "paceline: last report" in rest
