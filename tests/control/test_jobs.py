"""The files of a job: made where there is room, read with caution, removed when nobody can want them any more."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from paceline.control import jobs, processes, progress, stacks
from paceline.control.progress import Progress, read_file
from paceline.control.whereabouts import of_record
from paceline.run.doctor import doctor


def _write_record(
    directory: Path, *, rank: int = 0, pid: int, born: int, stack_signal: int = stacks.SIGNAL, host: str = ""
) -> Path:
    """A progress file as the process ``pid`` would have written it."""
    memory = Progress(None, rank=rank, size=2, wrapper=1)._memory
    host = host or processes.this_host()
    numbers = pid, born, rank, 2, 1, stack_signal, 0.0
    progress._WHO.pack_into(memory, 0, progress.MAGIC, *numbers, host.encode()[:64], b"train.py")
    path = directory / f"wrapper1.rank{rank}"
    path.write_bytes(bytes(memory))
    return path


# -- room ----------------------------------------------------------------------------------------------


@contextmanager
def _no_file_may_grow() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_without_room_progress_is_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "stacks.1").touch()  # the directory is to stay
    with _no_file_may_grow():
        made = Progress(tmp_path, rank=0, size=2, wrapper=1)
    made.fail("something")
    assert made.path is None
    assert [path.name for path in tmp_path.iterdir()] == ["stacks.1"]


def test_a_directory_that_is_gone_costs_the_files_only(tmp_path: Path) -> None:
    made = Progress(tmp_path / "gone", rank=0, size=2, wrapper=1)
    made.begin_wait("something")
    assert made.path is None
    assert stacks.answer_requests(tmp_path / "gone") == 0


_IN_A_FULL_DIRECTORY = """
from pathlib import Path
from paceline.control.progress import Progress
full = Path("{full}")
try:
    (full / "filler").write_bytes(bytes(1 << 20))
except OSError:
    pass
made = Progress(full, rank=0, size=2, wrapper=1)
made.fail("x" * 399)
print("path", made.path)
"""


def test_a_full_temporary_directory_does_not_end_the_process(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    mount = f'mount -t tmpfs -o size=64k none "{full}"'
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("may not mount a file system of its own")
    run = [sys.executable, "-c", _IN_A_FULL_DIRECTORY.format(full=full)]
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *run], capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout) == (0, "path None\n"), found.stderr


# -- signals -------------------------------------------------------------------------------------------


def test_only_our_signal_is_sent_and_only_to_our_own_process(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_catches", lambda pid: True)
    born = processes.birth(process.pid)
    (tmp_path / f"stacks.{process.pid}").touch()
    for number in (signal.SIGTERM, signal.SIGKILL, stacks.SIGNAL + 1):
        path = _write_record(tmp_path, pid=process.pid, born=born, stack_signal=number)
        assert of_record(read_file(path), tmp_path).line == ""
    record = read_file(_write_record(tmp_path, pid=process.pid, born=born))
    # Another owner of the file; another process that has the number now; one that has not said when it began.
    for wrong in (replace(record, owner=os.getuid() + 1), replace(record, born=born + 1), replace(record, born=0)):
        assert stacks.ask(tmp_path, wrong) == ""
    # A doctor that only looks.
    assert doctor(tmp_path, out=io.StringIO()) == 0
    assert of_record(record, tmp_path, ask=False).line == ""
    assert process.poll() is None
    # With its own file this would reach it: what kept it alive are the checks.
    doctor(tmp_path, with_stacks=True, out=io.StringIO())
    assert process.wait(60) == -stacks.SIGNAL


_ANSWERS_THEN_BECOMES_ANOTHER_PROGRAM = """
import os, sys
from pathlib import Path
from paceline.control import stacks
assert stacks.answer_requests(Path(sys.argv[1]))
print("answers", flush=True)
sys.stdin.readline()
os.execvp("sh", ["sh", "-c", "echo began; exec sleep 600"])
"""


def test_a_process_that_has_begun_another_program_gets_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_WAIT_S", 20.0)
    command = [sys.executable, "-c", _ANSWERS_THEN_BECOMES_ANOTHER_PROGRAM, tmp_path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout.readline() == "answers\n"
            path = _write_record(tmp_path, pid=rank.pid, born=processes.birth(rank.pid))
            assert 'File "<string>"' in stacks.ask(tmp_path, read_file(path))
            # Where the kernel has no descriptors for processes, nobody is asked.
            with monkeypatch.context() as old_kernel:
                old_kernel.setattr(os, "pidfd_open", mock.Mock(side_effect=OSError(errno.ENOSYS, "no such call")))
                assert stacks.ask(tmp_path, read_file(path)) == ""
            rank.stdin.write("go on\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "began\n"
            # The number and the birth are the same as before, and the file is there.
            record = read_file(path)
            assert processes.process_state(record.process) == "running"
            assert of_record(record, tmp_path).line == ""
            assert doctor(tmp_path, with_stacks=True, out=io.StringIO()) == 0
            assert rank.poll() is None
        finally:
            rank.kill()


# -- how far a rank came ---------------------------------------------------------------------------------


def test_the_files_of_a_wrapper_stay_until_all_its_ranks_have_finished(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    first, second = (Progress(directory, rank=rank, size=2, wrapper=1) for rank in range(2))
    other = Progress(directory, rank=0, size=2, wrapper=11)
    for _ in range(3):
        first.begin_forward(trains=True)
    first.begin_forward(trains=False)
    first.begin_backward(3)
    path = first.path
    first.finish()
    del first
    record = read_file(path)
    assert (record.forwards, record.backwards, bool(record.finished)) == (3, 3, True)
    assert not read_file(second.path).finished
    del second
    assert [file.name for file in directory.iterdir()] == ["wrapper11.rank0"]
    del other
    assert not directory.exists()


# -- removal -------------------------------------------------------------------------------------------


def test_only_directories_of_the_dead_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_JOB_DIR", str(tmp_path))
    names = [f"{n:032x}" for n in range(7)]
    runs, stacks_of_running, foreign, elsewhere, writable, linked, dead = (tmp_path / name for name in names)
    for path in (runs, stacks_of_running, foreign, elsewhere, writable, dead, tmp_path / "target"):
        path.mkdir(mode=0o700)
    alive = Progress(runs, rank=0, size=2, wrapper=1)  # its file goes with it
    for path in (runs, foreign, elsewhere, writable, dead, tmp_path / "target"):
        _write_record(path, rank=1, pid=os.getpid(), born=1, host="elsewhere" if path == elsewhere else "")
    (stacks_of_running / f"stacks.{os.getpid()}").touch()
    (foreign / "thesis.txt").touch()
    (dead / "stacks.4194305").touch()  # a number that no process can have
    writable.chmod(0o777)
    linked.symlink_to(tmp_path / "target")
    for path in (runs, stacks_of_running, foreign, elsewhere, writable, dead):
        os.utime(path, (1, 1))
    newer = [tmp_path / f"{n:032x}" for n in range(100, 100 + jobs.KEPT_JOBS - 1)]
    for path in newer:
        path.mkdir(mode=0o700)

    made = jobs.make_directory("f" * 32)

    left = {path.name for path in tmp_path.iterdir()}
    expected = {runs, stacks_of_running, foreign, elsewhere, writable, linked, tmp_path / "target", made, *newer}
    assert left == {path.name for path in expected}
    assert {path.name for path in runs.iterdir()} == {alive.path.name, "wrapper1.rank1"}
