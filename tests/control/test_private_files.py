"""What others may have put where a job's files belong: none of it is used, followed, waited for or obeyed."""

from __future__ import annotations

import io
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.control import census, jobs, progress, stacks
from paceline.control.hang import Inquiries
from paceline.control.progress import Progress, read_file
from paceline.control.whereabouts import Whereabouts
from paceline.run.doctor import doctor, verdicts
from tests.control._common import control_characters, within

JOB = "0123456789abcdef" * 2
NOBODY = 65534

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to another user")


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A reader that waits for a FIFO would wait for ever."""
    with within(60):
        yield


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's jobs, before anybody has made it."""
    monkeypatch.delenv("PACELINE_JOB_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"paceline-{os.getuid()}"


def _doctor(path: Path | None = None, *, with_stacks: bool = False) -> str:
    told = io.StringIO()
    doctor(path, with_stacks=with_stacks, out=told)
    return told.getvalue()


# -- directories ---------------------------------------------------------------------------------------


def _link(path: Path) -> Path:
    target = path.with_name("target")
    target.mkdir(mode=0o700)
    path.symlink_to(target)
    return target


def _writable(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path


def _of_another(path: Path) -> Path:
    path.mkdir(mode=0o755)
    os.chown(path, NOBODY, NOBODY)
    return path


def _file(path: Path) -> Path:
    path.touch()
    return path


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


TRAPS = [
    pytest.param(_link, "is a link, or is not a directory"),
    pytest.param(_file, "is a link, or is not a directory"),
    pytest.param(_fifo, "is a link, or is not a directory"),
    pytest.param(_writable, "its mode is 777"),
    pytest.param(_of_another, f"belongs to another user ({NOBODY})", marks=as_root),
]


@pytest.mark.parametrize(("trap", "reason"), TRAPS)
def test_a_base_that_somebody_else_made_is_not_used(
    trap: Callable[[Path], Path], reason: str, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trap(base)
    found = [jobs.make_directory(JOB) for _ in range(3)]
    # All ranks find the same one, in which nobody else can write, and it is said once.
    assert found == [base.with_name(f"{base.name}-{JOB}")] * 3
    assert found[0].stat().st_mode & 0o777 == 0o700
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert reason in warning
    assert str(found[0]) in warning
    assert not made.is_dir() or list(made.iterdir()) == []
    # The doctor finds it, and says why it is there.
    kept = Progress(found[0], rank=0, size=2, wrapper=1)
    assert kept.path is not None
    told = _doctor()
    assert reason in told
    assert f"job {found[0]}: " in told
    assert jobs.job_of_processes({os.getpid()}) == found[0]


@pytest.mark.parametrize(("trap", "reason"), TRAPS)
def test_a_job_directory_that_somebody_else_made_is_not_used(
    trap: Callable[[Path], Path], reason: str, base: Path
) -> None:
    base.mkdir(mode=0o700)
    made = trap(base / JOB)
    assert jobs.make_directory(JOB) == base.with_name(f"{base.name}-{JOB}")
    assert Progress(base / JOB, rank=0, size=2, wrapper=1).path is None
    assert stacks.answer_requests(base / JOB) == 0
    assert not made.is_dir() or list(made.iterdir()) == []
    assert reason in _doctor(base / JOB)


def test_without_a_directory_that_is_ours_there_are_no_files(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    base.touch()
    base.with_name(f"{base.name}-{JOB}").touch()
    assert [jobs.make_directory(JOB) for _ in range(2)] == [None, None]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("There will be no files for `paceline doctor`: ")


def test_a_base_that_the_user_has_chosen_may_be_a_link_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "chosen"
    monkeypatch.setenv("PACELINE_JOB_DIR", str(base))
    target = _link(base)
    made = jobs.make_directory(JOB)
    assert made == base / JOB
    assert (target / JOB).is_dir()
    kept = Progress(made, rank=0, size=2, wrapper=1)
    assert kept.path == made / "wrapper1.rank0"
    assert f"job {made}: " in _doctor()


@as_root
def test_a_base_that_the_user_has_chosen_is_no_link_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "chosen"
    monkeypatch.setenv("PACELINE_JOB_DIR", str(base))
    target = _link(base)
    os.lchown(base, NOBODY, NOBODY)
    assert jobs.make_directory(JOB) == tmp_path / f"chosen-{JOB}"
    assert list(target.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "a/b", "A" * 32, "a" * 31, "a" * 32 + "\n", "\x1b[2J", "\udcff"])
def test_a_name_of_a_job_is_no_path(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = dist.HashStore()
    raw = name.encode(errors="surrogateescape")
    monkeypatch.setattr(census._torch, "group_store", lambda group: store)
    dist.PrefixStore("paceline", store).set("job", raw)
    # Whatever is there, the name is made from it with the job's secret.
    assert jobs.is_name(census.job_of(None))


# -- files ---------------------------------------------------------------------------------------------


def _directory(tmp_path: Path) -> tuple[Path, Progress]:
    """A job of two ranks, of which one has a file."""
    directory = tmp_path / JOB
    directory.mkdir(mode=0o700)
    return directory, Progress(directory, rank=0, size=2, wrapper=1, stack_signal=stacks.SIGNAL)


def _link_to_valid(path: Path) -> None:
    valid = path.parent.with_name("valid")
    valid.write_bytes((path.parent / "wrapper1.rank0").read_bytes())
    path.symlink_to(valid)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(progress.MAGIC)
        file.truncate(1 << 40)


def _file_of_another(path: Path) -> None:
    path.write_bytes((path.parent / "wrapper1.rank0").read_bytes())
    os.chown(path, NOBODY, NOBODY)


def _file_for_all(path: Path) -> None:
    path.write_bytes((path.parent / "wrapper1.rank0").read_bytes())
    path.chmod(0o666)


FILES = [_link_to_valid, _huge, _fifo, Path.mkdir, pytest.param(_file_of_another, marks=as_root), _file_for_all]


@pytest.mark.parametrize("make", FILES)
def test_a_file_that_no_rank_has_made_is_not_read(make: Callable[[Path], object], tmp_path: Path) -> None:
    directory, own = _directory(tmp_path)
    make(directory / "wrapper1.rank1")
    make(directory / "stacks.4194305")
    assert read_file(directory / "wrapper1.rank1") is None
    assert [file.name for file in jobs.records(directory)] == ["wrapper1.rank0"]
    assert "of which 1 have files here" in _doctor(directory)
    verdicts(directory)
    inquiries = Inquiries(None, own, None, rank=0, size=2, directory=directory)
    assert inquiries.read_files()[1] is None


@pytest.mark.parametrize("make", [_link_to_valid, _fifo])
def test_a_new_file_takes_the_place_of_what_was_there(make: Callable[[Path], None], tmp_path: Path) -> None:
    directory, own = _directory(tmp_path)
    make(directory / "wrapper1.rank1")
    before = own.path.read_bytes()
    made = Progress(directory, rank=1, size=2, wrapper=1)
    assert read_file(made.path).rank == 1
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert not directory.with_name("valid").exists() or directory.with_name("valid").read_bytes() == before


def test_stacks_are_not_read_from_a_fifo(tmp_path: Path) -> None:
    directory, own = _directory(tmp_path)
    os.mkfifo(directory / f"stacks.{os.getpid()}")
    assert stacks.ask(directory, read_file(own.path)) == ""
    assert "(it does not answer)" in _doctor(directory, with_stacks=True)


# -- what a file says ----------------------------------------------------------------------------------

_RANK, _SIZE, _PID, _MADE = 24, 32, 8, 56
IMPOSSIBLE = [
    *[(_SIZE, struct.pack("<q", size)) for size in (1 << 62, -1, 0, progress.RANKS_LIMIT + 1)],
    *[(_RANK, struct.pack("<q", rank)) for rank in (2, -1)],
    *[(_PID, struct.pack("<q", pid)) for pid in (0, -1, 1 << 40)],
    *[
        (at, struct.pack("<d", seconds))
        for at in (_MADE, progress._WAITING_AT - 16, progress._WAITING_AT - 8)
        for seconds in (float("nan"), float("inf"), -1.0, 1e18)
    ],
]


@pytest.mark.parametrize(("at", "raw"), IMPOSSIBLE)
def test_numbers_that_cannot_be_are_not_believed(at: int, raw: bytes, tmp_path: Path) -> None:
    directory, own = _directory(tmp_path)
    data = bytearray(own.path.read_bytes())
    assert read_file(own.path) is not None
    data[at : at + 8] = raw
    own.path.write_bytes(data)
    assert read_file(own.path) is None
    assert "holds no files of a job" in _doctor(directory)


def test_what_a_file_says_is_shown_with_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202e\r\x08"
    monkeypatch.setattr("sys.argv", [f"train{evil}\n.py"])
    directory, own = _directory(tmp_path)
    own._memory[64:128] = f"host\n{evil}".encode().ljust(64, b"\x00")
    own.begin_wait(f"waits\n{evil}")
    own.note_report(f"a report{evil}\n  rank 0: here{evil}")
    (told,) = verdicts(directory)
    own.fail(f"rank 0 raised{evil}: more\nand more")
    shown = _doctor(directory)
    for text in (told, shown):
        assert control_characters(text) == set()
        assert "\\x1b]0;owned\\x07\\x9b2J\\u202e\\r\\x08" in text
    # A line break is kept where there may be several lines, and nowhere else.
    assert told.splitlines()[1].startswith("  rank 0: here")
    assert "on host host\\n" in shown
    assert "train\\x1b" in shown.splitlines()[0]


def test_what_another_rank_says_is_shown_with_escapes_and_in_measure() -> None:
    evil = "\x1b[2J\n\u202e"
    told = tuple(f"{number} bucket{evil}" for number in (1, 2, "9" * 5000)) + ("3 bucket",) * 100_000
    found = Whereabouts.from_fields((1, 1, 1, evil, evil, evil * 10_000, evil, told))
    assert set(found.recent) == {1, 2, 3}
    assert control_characters("".join([found.where(), found.waiting, *found.recent.values()])) == set()
    assert len(found.line) < 20_000
    assert found.waiting == "\\x1b[2J\\n\\u202e"
