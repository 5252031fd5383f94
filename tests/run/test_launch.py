"""``paceline.run.launch``: ranks are started, told of signals, and never left behind.

No test sleeps. A rank reports through a named pipe that it keeps open: reading a line waits for a report,
and reading to the end waits until the last rank is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from paceline.errors import BadArgumentError
from paceline.run import launch as launch_module
from paceline.run import output
from paceline.run.launch import launch, rank_variables

PREAMBLE = """
import os, signal, sys
RANK = int(os.environ["RANK"])
pipe = open(sys.argv[1], "w", buffering=1) if len(sys.argv) > 1 else None
def report(what):
    pipe.write(f"{what} {os.getpid()}\\n")
"""

LAUNCHER = """
import sys
from paceline.run import launch
launch._STARTING_S = float(sys.argv[1])
sys.exit(launch.launch([sys.executable, *sys.argv[2:]], nproc=2))
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(body: str) -> str:
        path = tmp_path / "rank.py"
        path.write_text(PREAMBLE + body)
        return str(path)

    return write


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "reports"
    os.mkfifo(path)
    return path


@contextmanager
def launcher(script: str, pipe: Path, *, starting_s: float = 0.0) -> Iterator[tuple[subprocess.Popen[str], TextIO]]:
    """A launcher of two ranks in a process of its own, and what its ranks report."""
    command = [sys.executable, "-c", LAUNCHER, str(starting_s), script, str(pipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            with pipe.open() as reports:
                yield process, reports
        finally:
            process.kill()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def read_pids(reports: TextIO, what: str) -> list[int]:
    """Wait for both ranks to report ``what``; return their process ids."""
    pids = []
    for _ in range(2):
        word, pid = reports.readline().split()
        assert word == what
        pids.append(int(pid))
    return pids


def test_ranks_get_the_variables_of_torchrun(script: Any, tmp_path: Path) -> None:
    body = f"import json; json.dump(dict(os.environ), open(f'{tmp_path}/{{RANK}}.json', 'w'))"
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    assert launch([sys.executable, script(body)], nproc=3, environ=environ | {"RANK": "77"}) == 0
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, variables in enumerate(seen):
        port = int(seen[0]["MASTER_PORT"])
        expected = rank_variables(rank=rank, nproc=3, port=port, run_id=seen[0]["TORCHELASTIC_RUN_ID"])
        assert variables.items() >= expected.items()
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["OMP_NUM_THREADS"]) == (str(rank), "3", "1")


def test_threads_already_chosen_stay(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    body = "print(os.environ['OMP_NUM_THREADS'])"
    assert launch([sys.executable, script(body)], nproc=1, environ=os.environ | {"OMP_NUM_THREADS": "3"}) == 0
    assert capfd.readouterr().out == "3\n"


@pytest.mark.full
def test_ranks_meet_each_other(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
import torch, torch.distributed as dist
from paceline.run.init import init, shutdown
world = init(device="cpu")
assert (world.rank, world.local_rank, world.world_size) == (RANK, RANK, 2)
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
print("total", total.item())
shutdown()
"""
    assert launch([sys.executable, script(body)], nproc=2) == 0
    out, err = capfd.readouterr()
    assert out == "total 3\n", "rank 0 alone writes to the terminal"
    assert err == "paceline: 2 ranks on one host, collectives through shared memory\n"


def test_the_failing_rank_is_shown_and_the_others_are_ended(
    script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pipe: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch_module, "_SETTLE_S", 0.05)
    body = f"""
if RANK == 1:
    open({str(pipe)!r}).close()  # waits for rank 0
    print("no data on this disk", file=sys.stderr)
    sys.exit(7)
with open("{tmp_path}/pid", "w") as file:
    file.write(str(os.getpid()))
open({str(pipe)!r}, "w").close()  # waits for rank 1
while True:
    signal.pause()
"""
    assert launch([sys.executable, script(body)], nproc=2) == 7
    err = capfd.readouterr().err
    assert err.splitlines() == [
        "paceline: rank 1 failed with exit code 7",
        "  [rank 1] no data on this disk",
    ]
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_rank_that_prints_without_end_fills_no_disk(
    script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "temporary"
    kept.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(kept))
    body = f"""
from pathlib import Path
if RANK == 1:
    for _ in range(1000):
        os.write(1, b"x" * 65536)
    print()
    for number in range(100):
        print("line", number)
    print("on disk:", sum(file.stat().st_size for file in Path({str(kept)!r}).rglob("*")))
    sys.exit(7)
"""
    assert launch([sys.executable, script(body)], nproc=2) == 7
    told = capfd.readouterr().err.splitlines()
    lines = [f"  [rank 1] line {number}" for number in range(61, 100)]
    assert told == ["paceline: rank 1 failed with exit code 7", *lines, "  [rank 1] on disk: 0"]


def test_who_holds_the_output_of_a_rank_is_not_waited_for(
    script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pipe: Path
) -> None:
    monkeypatch.setattr(output, "_END_S", 1e6)  # a launcher that waits does not get away with giving up
    # A process that the rank leaves behind. It ends when the test lets go of the pipe, or by an alarm if it comes to
    # open the pipe only after that.
    body = f"""
import subprocess
if RANK == 1:
    left = "import signal, sys; signal.alarm(60); open(sys.argv[1]).read()"
    subprocess.Popen([sys.executable, "-c", left, {str(pipe)!r}], start_new_session=True)
    print("the last words")
    sys.exit(7)
"""
    held = os.open(pipe, os.O_RDWR)
    try:
        assert launch([sys.executable, script(body)], nproc=2) == 7
    finally:
        os.close(held)
    assert capfd.readouterr().err.splitlines() == [
        "paceline: rank 1 failed with exit code 7",
        "  [rank 1] the last words",
    ]


def test_a_rank_that_ignores_sigterm_is_killed(
    script: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pipe: Path
) -> None:
    monkeypatch.setattr(launch_module, "_SETTLE_S", 0.05)
    monkeypatch.setattr(launch_module, "_TERMINATE_S", 0.05)
    body = """
if RANK == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").close()  # waits for rank 1
    while True:
        signal.pause()
open(sys.argv[1]).close()  # waits for rank 0
os.kill(os.getpid(), signal.SIGSEGV)
"""
    path = script(body.replace("sys.argv[1]", f"{str(pipe)!r}"))
    assert launch([sys.executable, path], nproc=2) == 128 + signal.SIGSEGV
    assert "paceline: rank 1 was killed by SIGSEGV" in capfd.readouterr().err


def test_ranks_that_fail_of_themselves_are_all_told(script: Any, pipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # This is like noticing the death of a peer: rank 0 reads the end of the pipe when rank 1 is gone, and fails too.
    body = f"""
if RANK == 1:
    pipe = open({str(pipe)!r}, "w")
    print("the cause", flush=True)
    os._exit(3)
open({str(pipe)!r}).read()
os._exit(4)
"""
    code = launch([sys.executable, script(body)], nproc=2)
    told = capfd.readouterr().err.splitlines()
    headings = [line for line in told if line.startswith("paceline:")]
    assert sorted(headings) == [
        "paceline: rank 0 failed with exit code 4",
        "paceline: rank 1 failed with exit code 3",
    ]
    assert headings[0].endswith(f" {code}")
    assert "  [rank 1] the cause" in told


def test_a_usage_error_is_left_to_rank_0(script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    body = "if RANK == 0: print('wrong flag', file=sys.stderr)\nsys.exit(2)"
    assert launch([sys.executable, script(body)], nproc=2) == 2
    assert capfd.readouterr().err == "wrong flag\n"


# Ranks of these tests block a signal and take it with sigwait(): a handler could run just before pause().
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_and_leaves_none(signum: int, script: Any, pipe: Path) -> None:
    body = f"""
signal.pthread_sigmask(signal.SIG_BLOCK, [{int(signum)}])
report("ready" if os.getsid(0) == os.getpid() else "a terminal would signal me too")
report(f"heard{{int(signal.sigwait([{int(signum)}]))}}")
sys.exit(128 + {int(signum)})
"""
    with launcher(script(body), pipe) as (process, reports):
        pids = read_pids(reports, "ready")
        process.send_signal(signum)
        assert sorted(read_pids(reports, f"heard{int(signum)}")) == sorted(pids)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert err == f"paceline: {signal.Signals(signum).name} received; all ranks have ended\n"
    assert all(map(gone, pids))


def test_a_second_signal_kills_ranks_that_do_not_end(script: Any, pipe: Path) -> None:
    body = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
report("ready")
while True:
    signal.sigwait([signal.SIGINT])
    report("heard")
"""
    with launcher(script(body), pipe) as (process, reports):
        pids = read_pids(reports, "ready")
        process.send_signal(signal.SIGINT)
        read_pids(reports, "heard")
        process.send_signal(signal.SIGINT)
        assert reports.read() == ""
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert all(map(gone, pids))


def test_ranks_that_are_just_starting_are_ended_without_a_traceback(script: Any, pipe: Path) -> None:
    with launcher(script("report('ready')\nsignal.pause()"), pipe, starting_s=1e9) as (process, reports):
        pids = read_pids(reports, "ready")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, err) == ("", "paceline: SIGINT received; all ranks have ended\n")
    assert all(map(gone, pids))


@pytest.mark.full
def test_ranks_do_not_wait_out_their_grace_for_one_that_died_of_the_signal(script: Any, pipe: Path) -> None:
    body = """
if RANK == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
else:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
report("ready")
while True:
    signal.pause()
"""
    with launcher(script(body), pipe) as (process, reports):
        pids = read_pids(reports, "ready")
        process.send_signal(signal.SIGINT)
        # Less than the 30 s that rank 0 would have if rank 1 had ended in order.
        _, err = process.communicate(timeout=25)
    assert process.returncode == 130
    assert err == "paceline: SIGINT received; all ranks have ended\n"
    assert all(map(gone, pids))


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child of its parent's death")
def test_ranks_end_even_if_the_launcher_is_killed(script: Any, pipe: Path) -> None:
    body = """
from paceline.run.init import init
init(device="cpu")
report("ready")
while True:
    signal.pause()
"""
    with launcher(script(body), pipe) as (process, reports):
        read_pids(reports, "ready")
        process.kill()
        assert reports.read() == ""  # the end of the pipe: no rank holds it any more


@pytest.mark.parametrize("options", [{"nproc": 0}, {"nproc": -2}, {"nproc": 1, "threads": 0}])
def test_a_wrong_number_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(BadArgumentError, match="must be at least 1"):
        launch([sys.executable, "-c", ""], **options)


def test_a_program_that_is_not_there_leaves_nothing_running() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(FileNotFoundError):
        launch(["no-such-program-of-ours"], nproc=2)
    assert signal.getsignal(signal.SIGINT) is before
