"""Segments: who may map them, and that nothing of them is left behind."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import re
import signal
import stat
import threading
import weakref
from multiprocessing.connection import Connection

import pytest
import torch

from paceline.errors import BadArgumentError, NoRoomError, StateError
from paceline.transport.shm import segment
from paceline.transport.shm.segment import Segment

NBYTES = 8192


def _path(name: str) -> str:
    return os.path.join(segment.DIRECTORY, name)


def _descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_two_mappings_are_the_same_memory() -> None:
    with Segment.create(NBYTES) as mine, Segment.open(mine.name, nbytes=NBYTES) as theirs:
        assert mine.memory[:NBYTES] == bytes(NBYTES)
        theirs.memory[5] = 7
        assert mine.memory[5] == 7
        assert mine.address != theirs.address


def test_names_are_random_and_files_are_private() -> None:
    with Segment.create(NBYTES) as one, Segment.create(NBYTES) as other:
        assert re.fullmatch(r"paceline-[0-9a-f]{32}", one.name)
        assert one.name != other.name
        found = os.stat(_path(one.name))
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_uid == os.geteuid()
        assert os.get_inheritable(one.fd) is False
        # Room is reserved, not promised.
        assert found.st_blocks * 512 >= NBYTES


@pytest.mark.parametrize("nameless", [True, False], ids=["O_TMPFILE", "without O_TMPFILE"])
def test_nothing_is_left_when_it_ends(nameless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nameless:
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    before = _descriptors()
    mine = Segment.create(NBYTES)
    theirs = Segment.open(mine.name, nbytes=NBYTES)
    name = mine.name
    mine.unlink()
    theirs.unlink()
    assert not os.path.lexists(_path(name))
    theirs.memory[0] = 1
    assert mine.memory[0] == 1
    mine.close()
    theirs.close()
    mine.close()
    assert _descriptors() == before
    with open("/proc/self/maps") as maps:
        assert name not in maps.read()


def test_memory_lives_as_long_as_a_tensor_on_it() -> None:
    with Segment.create(NBYTES) as mine:
        tensor = torch.frombuffer(mine.memory, dtype=torch.uint8)
        memory = weakref.ref(mine.memory)
    part = tensor[10:20]
    del tensor
    part.fill_(3)
    assert memory() is not None
    del part
    gc.collect()
    assert memory() is None


def test_too_little_room_is_said_before_anything_has_a_name() -> None:
    before = _descriptors()
    needed = segment.room() + (1 << 30)
    with pytest.raises(NoRoomError, match=rf"no room for {needed:,} bytes .* are free"):
        Segment.create(needed)
    assert _descriptors() == before


def _wrong_mode(path: str) -> None:
    os.chmod(path, 0o640)


def _wrong_size(path: str) -> None:
    os.truncate(path, NBYTES // 2)


def _wrong_owner(path: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_wrong_mode, "mode is 640, not 600"),
        (_wrong_size, f"has {NBYTES // 2} bytes, not {NBYTES}"),
        (_wrong_owner, "belongs to user 12345"),
    ],
    ids=["mode", "size", "owner"],
)
def test_a_segment_that_is_not_as_we_make_them_is_refused(spoil, said: str) -> None:
    with Segment.create(NBYTES) as mine:
        before = _descriptors()
        spoil(_path(mine.name))
        with pytest.raises(StateError, match=said):
            Segment.open(mine.name, nbytes=NBYTES)
        assert _descriptors() == before


@pytest.mark.parametrize("name", ["", "x", "paceline-", "paceline-../passwd", "paceline-" + "g" * 32, "../" + "0" * 32])
def test_names_that_are_not_ours_are_not_opened(name: str) -> None:
    with pytest.raises(BadArgumentError, match="not the name of a segment"):
        Segment.open(name, nbytes=1)


def test_a_link_is_not_followed(tmp_path) -> None:
    target = tmp_path / "file"
    target.write_bytes(bytes(NBYTES))
    target.chmod(0o600)
    name = segment.PREFIX + "0" * 32
    os.symlink(target, _path(name))
    try:
        with pytest.raises(OSError, match="symbolic links"):
            Segment.open(name, nbytes=NBYTES)
    finally:
        segment.remove(name)


def test_an_empty_segment_is_an_error() -> None:
    with pytest.raises(BadArgumentError, match="at least one byte"):
        Segment.create(0)


def _is_killed(answer: Connection) -> None:
    """As a rank before the others have mapped its segment."""
    answer.send(Segment.create(4096).name)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_segment_of_a_killed_process_is_removed_by_the_next() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.testing._preloaded"])
    ours, theirs = context.Pipe()
    dead = context.Process(target=_is_killed, args=(theirs,), daemon=True)
    dead.start()
    dead.join()
    assert dead.exitcode == -signal.SIGKILL
    stale = ours.recv()
    assert stale.startswith(segment.PREFIX)
    with Segment.create(NBYTES) as living:
        assert not os.path.lexists(_path(stale))
        segment.remove_stale()
        assert os.path.lexists(_path(living.name))


class _Lock:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_looking_for_stale_ones_is_not_in_the_way_of_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look ends with closing the file, and that would drop locks taken in between: so nothing opens in between."""
    looking, looked, opened = threading.Event(), threading.Event(), threading.Event()
    lock = _Lock()
    monkeypatch.setattr(segment, "_open_lock", lock)
    names: list[str] = []

    def look(name: str) -> None:
        names.append(name)
        looking.set()
        looked.wait(60)

    def open_and_close() -> None:
        with Segment.open(mine.name, nbytes=NBYTES):
            opened.set()

    with Segment.create(NBYTES) as mine:
        monkeypatch.setattr(segment, "_remove_if_stale", look)
        # It is now as if another process had made it.
        segment._open_here.discard(mine.name)
        looks = threading.Thread(target=segment.remove_stale)
        looks.start()
        assert looking.wait(60)
        opens = threading.Thread(target=open_and_close)
        opens.start()
        assert lock.is_waited_for.wait(60)
        assert not opened.is_set()
        looked.set()
        for thread in (looks, opens):
            thread.join(60)
        assert opened.is_set()
        assert mine.name in names
        names.clear()
        # A name is in the list before its file is opened.
        segment._note_open(mine.name)
        segment.remove_stale()
        assert mine.name not in names


def _lock_is_held(path: str) -> bool:
    """Asked in a child: a process does not see its own record locks."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fd = os.open(path, os.O_RDWR)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            status = 0
        except OSError:
            status = 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_looking_for_stale_ones_does_not_drop_the_locks_of_our_own() -> None:
    with Segment.create(NBYTES) as mine:
        fcntl.lockf(mine.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        assert _lock_is_held(_path(mine.name))
        segment.remove_stale()
        assert _lock_is_held(_path(mine.name))
