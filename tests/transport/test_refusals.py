"""Where shared memory cannot be had, gloo takes its place, on all ranks alike, with one notice that says why."""

from __future__ import annotations

import ctypes
import os
import re
import tempfile

import pytest
import torch
import torch.distributed as dist

from paceline.testing import RankPool
from paceline.transport.shm import kernel
from paceline.transport.shm.segment import DIRECTORY

from . import killing
from .notices import notices

NOBODY = 65534
CLONE_FS, CLONE_NEWNS = 0x00000200, 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")


pytestmark = pytest.mark.usefixtures("no_segment_left")


@pytest.fixture
def fresh_ranks():
    """Ranks that are ended after the test: what it does to them cannot be undone."""
    with RankPool() as pool:
        yield pool.run


def _fallen_back(rank: int, world_size: int, path: str) -> tuple[str, list[str], float]:
    """Start a group that cannot have shared memory; what it is, what was said, and whether it works."""
    with notices() as said:
        killing.start_group(path, rank=rank, world_size=world_size)
        second = dist.new_group(list(range(world_size)))
    tensor = torch.full((70_001,), rank + 1.0)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=second)
    dist.barrier()
    return type(dist.group.WORLD).__name__, said, tensor[-1].item()


def _check_fallen_back(results: list[tuple[str, list[str], float]], *patterns: str) -> None:
    kinds = {kind for kind, _, _ in results}
    assert len(kinds) == 1, f"not alike: {kinds}"
    assert kinds != {"ShmProcessGroup"}
    world_size = len(results)
    total = world_size * (world_size + 1) / 2
    assert [value for _, _, value in results] == [total * world_size] * world_size
    said = [notice for _, notices, _ in results for notice in notices]
    assert len(said) == 1, f"one notice was expected: {said}"
    for pattern in ("gloo", *patterns):
        assert re.search(pattern, said[0]), said[0]


def _as_another_user(rank, world_size, path):
    if rank == 1:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return _fallen_back(rank, world_size, path)


@needs_root
def test_ranks_of_two_users(fresh_ranks):
    """Not one segment is shared; both work, over gloo. (Ranks that share nothing are hosts: no notice is due.)"""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        path = os.path.join(directory, "store")
        with open(path, "w", encoding="utf-8"):
            os.chmod(path, 0o666)
        results = fresh_ranks(_as_another_user, path, backend=None)
    kinds = {kind for kind, _, _ in results}
    assert len(kinds) == 1, f"not alike: {kinds}"
    assert kinds != {"ShmProcessGroup"}
    assert [(said, value) for _, said, value in results] == [([], 6.0)] * 2


_libc = ctypes.CDLL(None, use_errno=True)


def _libc_call(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _enter_little_room(rank: int, world_size: int, path: str, kilobytes: int) -> str | None:
    """Rank 0 makes a small shared-memory file system that only it sees; the others join it there.

    Returns why not, if the machine does not allow it.
    """
    ready = f"{path}.ready"
    if rank == 0:
        try:
            _libc_call("unshare", CLONE_NEWNS)
            _libc_call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
            _libc_call("mount", b"tmpfs", DIRECTORY.encode(), b"tmpfs", 0, f"size={kilobytes}k".encode())
            said = f"{os.getpid()}"
        except OSError as error:
            said = f"not permitted: {error}"
        with open(f"{ready}.new", "w", encoding="utf-8") as file:
            file.write(said)
        os.rename(f"{ready}.new", ready)
    store = dist.FileStore(f"{path}.meeting", world_size)
    store.set(f"rank{rank}", "here") if rank == 0 else store.wait(["rank0"])
    with open(ready, encoding="utf-8") as file:
        said = file.read()
    if not said.isdigit():
        return said
    if rank != 0:
        # A mount namespace cannot be joined while the thread shares its file-system state with others.
        _libc_call("unshare", CLONE_FS)
        namespace = os.open(f"/proc/{said}/ns/mnt", os.O_RDONLY)
        _libc_call("setns", namespace, CLONE_NEWNS)
        os.close(namespace)
    assert os.statvfs(DIRECTORY).f_blocks * os.statvfs(DIRECTORY).f_frsize == kilobytes * 1024
    return None


def _little_room(rank, world_size, path, kilobytes):
    refused = _enter_little_room(rank, world_size, path, kilobytes)
    if refused is not None:
        return refused
    result = _fallen_back(rank, world_size, path)
    assert os.listdir(DIRECTORY) == []
    return result


@pytest.mark.parametrize("kilobytes", [4, 64], ids=["not even for a handshake", "not for the group"])
@needs_root
def test_too_little_room(fresh_ranks, tmp_path, kilobytes):
    results = fresh_ranks(_little_room, str(tmp_path / "store"), kilobytes, backend=None)
    if isinstance(results[0], str):
        pytest.skip(f"mounts are {results[0]}")
    _check_fallen_back(results, r"[\d,]{4,} bytes", r"free")


@needs_root
def test_room_for_the_group_but_not_for_buckets(fresh_ranks, tmp_path):
    """The group is there; memory for buckets is refused on all ranks alike, and reducing works without."""
    kilobytes = kernel.control_nbytes(2) // 1024 * 3
    results = fresh_ranks(_buckets_without_room, str(tmp_path / "store"), kilobytes, backend=None)
    if isinstance(results[0], str):
        pytest.skip(f"mounts are {results[0]}")
    assert results == [("ShmProcessGroup", True, 3.0)] * 2


def _buckets_without_room(rank, world_size, path, kilobytes):
    from paceline import transport

    refused = _enter_little_room(rank, world_size, path, kilobytes)
    if refused is not None:
        return refused
    killing.start_group(path, rank=rank, world_size=world_size)
    without = transport.allocate(kilobytes * 1024) is None
    tensor = torch.full((300_007,), rank + 1.0)
    dist.all_reduce(tensor)
    return type(dist.group.WORLD).__name__, without, tensor[-1].item()
