"""The cores that ranks share, as Linux tells of them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.run import bound, cores


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets of two cores, each with two CPUs, of which this process may not use the last core."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 2}\n", encoding="ascii")
        (topology / "core_id").write_text(f"{cpu % 4 // 2}\n", encoding="ascii")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6}, raising=False)
    return tmp_path


def test_cores_of_a_socket_are_beside_each_other(system: Path) -> None:
    assert cores.usable_cores(system) == [(0, 4), (2, 6), (1, 5)]


def test_where_nothing_is_said_of_cores_each_cpu_is_one(system: Path, tmp_path: Path) -> None:
    assert sorted(cores.usable_cores(tmp_path / "none")) == [(0,), (1,), (2,), (4,), (5,), (6,)]


@pytest.mark.parametrize(
    ("count", "ranks", "shares"),
    [(4, 2, [[0, 1], [2, 3]]), (5, 2, [[0, 1], [2, 3]]), (2, 2, [[0], [1]]), (1, 2, []), (3, 1, [[0, 1, 2]])],
)
def test_ranks_get_equally_many(count: int, ranks: int, shares: list[list[int]]) -> None:
    found = cores.share([(cpu,) for cpu in range(count)], ranks)
    assert found == [[(cpu,) for cpu in share] for share in shares]


def test_threads_are_as_many_as_cores_and_as_the_container_may_use() -> None:
    found = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert cores.threads_each(found, 2) == 2
    assert cores.threads_each(found, 3) == 1
    assert cores.threads_each(found, 8) == 1
    assert cores.threads_each(found, 2, limit=2.5) == 1
    assert cores.threads_each(found, 1, limit=2.5) == 2
    assert cores.threads_each(found, 1, limit=0.5) == 1


@pytest.mark.parametrize(
    ("text", "limit"), [("max 100000\n", math.inf), ("150000 100000\n", 1.5), ("", math.inf), (None, math.inf)]
)
def test_the_quota_of_a_container(text: str | None, limit: float, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text, encoding="ascii")
    assert cores.quota(tmp_path / "cpu.max") == limit


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_rank_runs_on_its_cores_and_is_otherwise_the_same_program() -> None:
    mine = str(max(os.sched_getaffinity(0)))
    code = "import os, sys; print(os.getpid(), os.sched_getaffinity(0), sys.argv)"
    command = [sys.executable, bound.__file__, sys.executable, "-c", code, "--a", "b c"]
    environ = os.environ | {bound.CPUS_OF_RANKS: f"77777;{mine}", "LOCAL_RANK": "1"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    told, _ = process.communicate(timeout=60)
    assert told == f"{process.pid} {{{mine}}} ['-c', '--a', 'b c']\n"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_rank_whose_cores_are_not_there_runs_all_the_same() -> None:
    command = [sys.executable, bound.__file__, sys.executable, "-c", "print('runs')"]
    environ = os.environ | {bound.CPUS_OF_RANKS: "77777", "LOCAL_RANK": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == "runs\n"
    assert done.stderr.startswith("paceline: rank 0 of this host is not bound to cores 77777: ")
