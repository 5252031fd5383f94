"""``paceline.init``: one rank without variables, the described group with them, an error in between."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.errors import BadArgumentError, BadTypeError, RankLostError, StateError
from paceline.run import meeting
from paceline.run.init import World, default_backend, init, shutdown
from paceline.transport.shm import kernel

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OF_SCHEDULERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_")
FULL = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    scheduled = [name for name in os.environ if name.startswith(OF_SCHEDULERS)]
    for name in (*VARIABLES, *scheduled, "TORCHELASTIC_USE_AGENT_STORE", "PACELINE_LAUNCHER_PID"):
        monkeypatch.delenv(name, raising=False)
    yield
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_single_rank_needs_no_variables() -> None:
    world = init(device="cpu")
    assert world == World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(FrozenInstanceError):
        world.rank = 1  # type: ignore[misc]
    value = torch.tensor([3.0])
    dist.all_reduce(value)
    assert value.item() == 3.0
    dist.barrier()
    assert dist.get_world_size(dist.new_group([0])) == 1


def test_the_variables_are_used_when_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a world of one the store is our own; port 0 lets the system choose.
    for name, value in (FULL | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0", "LOCAL_RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    world = init(device="cpu")
    assert (world.rank, world.local_rank, world.world_size) == (0, 3, 1)


def test_calling_it_twice_gives_the_same_world() -> None:
    first = init(device="cpu", timeout=60)
    assert init() is first
    assert init(backend="gloo", device=torch.device("cpu"), timeout=timedelta(minutes=1)) is first


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rank": 1, "world_size": 2}, "rank 1 (it has 0), world_size 2 (it has 1)"),
        ({"timeout": 61}, "timeout 0:01:01 (it has 0:01:00)"),
        ({"backend": "nccl"}, "backend nccl (it has gloo)"),
    ],
)
def test_a_second_call_that_asks_for_something_else_raises(asked: dict[str, object], said: str) -> None:
    init(device="cpu", timeout=60)
    with pytest.raises(StateError) as raised:
        init(**asked)  # type: ignore[arg-type]
    assert said in str(raised.value)
    assert "shutdown()" in str(raised.value)
    assert init().world_size == 1


def test_shutdown_ends_it_and_may_be_repeated() -> None:
    shutdown()
    init(device="cpu")
    shutdown()
    assert not dist.is_initialized()
    shutdown()
    assert init(device="cpu", timeout=5).world_size == 1


def test_a_group_of_somebody_else_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = init()
    assert (world.rank, world.world_size, world.device.type) == (0, 1, "cpu")
    assert init(backend="gloo") == world
    with pytest.raises(StateError, match="timeout"):
        init(timeout=5)
    shutdown()
    assert dist.is_initialized()


def test_shutdown_does_not_end_a_group_that_replaced_ours() -> None:
    init(device="cpu")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shutdown()
    assert dist.is_initialized()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_variables_are_an_error_that_names_them(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FULL.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(BadArgumentError, match=f"{missing} not\\..*torchrun") as raised:
        init(device="cpu")
    assert all(name in str(raised.value) for name in FULL)
    assert not dist.is_initialized()


def _meet_as(rank: int, world_size: int, port: int, **environ: str) -> str:
    """What one more rank of a group is told."""
    code = "import paceline; paceline.init(backend='gloo', timeout=60)"
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | place | environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.full
def test_ranks_with_different_world_sizes_are_told_so_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        told = list(pool.map(_meet_as, (0, 1), (3, 2), (port, port)))
    for line in told:
        assert "DisagreementError: Ranks were started with different world sizes: rank " in line
        assert "rank 0 has WORLD_SIZE 3" in line
        assert "rank 1 has WORLD_SIZE 2" in line


def test_a_port_that_is_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        told = _meet_as(0, 2, port)
    assert told.startswith(f"paceline.errors.StateError: Port {port} of this host is in use")
    assert "choose another MASTER_PORT" in told


def test_ranks_that_do_not_come_are_counted() -> None:
    with pytest.raises(RankLostError, match=r"Only 1 of 2 ranks came within 0 s\."):
        meeting._gather(dist.HashStore(), 0, 2, timeout_s=0.0)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"backend": "carrier-pigeon"}, BadArgumentError, "'carrier-pigeon'"),
        ({"backend": "cpu:gloo,cuda:"}, BadArgumentError, "not part of this torch"),
        ({"backend": 3}, BadTypeError, "backend must be a string"),
        ({"device": "toaster"}, BadArgumentError, "'toaster'"),
        ({"timeout": 0}, BadArgumentError, "must be positive"),
        ({"timeout": timedelta(seconds=-1)}, BadArgumentError, "must be positive"),
        ({"timeout": "5"}, BadTypeError, "timeout must be seconds"),
        ({"timeout": True}, BadTypeError, "timeout must be seconds"),
        ({"rank": 0}, BadArgumentError, "given rank without world_size"),
        ({"world_size": 2}, BadArgumentError, "given world_size without rank"),
        ({"rank": "0", "world_size": 2}, BadTypeError, "rank must be a whole number, got str"),
        ({"rank": 0, "world_size": True}, BadTypeError, "world_size must be a whole number, got bool"),
        ({"rank": -1, "world_size": 2}, BadArgumentError, "rank must be at least 0, got -1"),
        ({"rank": 2, "world_size": 2}, BadArgumentError, "rank is 2 but world_size is 2"),
        ({"rank": 0, "world_size": 2}, BadArgumentError, "MASTER_ADDR and MASTER_PORT not set.*paceline.spawn"),
    ],
)
def test_bad_arguments_start_nothing(options: dict[str, object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        init(**{"device": "cpu", **options})  # type: ignore[arg-type]
    assert not dist.is_initialized()
    assert init(device="cpu").world_size == 1


def _have_accelerators(monkeypatch: pytest.MonkeyPatch, *, vendor: str, available: bool = True) -> None:
    """Have two devices of a kind, as `paceline.init` sees it; nothing is run on them."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: vendor)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo" or available)


def test_an_accelerator_is_chosen_by_local_rank_with_gloo_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _have_accelerators(monkeypatch, vendor="xccl")
    choose = importlib.import_module("paceline.run.init")._device
    assert choose(None, local_rank=1) == torch.device("xpu", 1)
    assert choose("xpu:0", local_rank=1) == torch.device("xpu", 0)
    assert choose("cpu", local_rank=1) == torch.device("cpu")
    assert default_backend(torch.device("xpu", 1)) == "cpu:gloo,xpu:xccl"
    with pytest.raises(BadArgumentError, match="local rank 2 needs xpu:2, but this host shows 2"):
        choose(None, local_rank=2)
    with pytest.raises(BadArgumentError, match="finds only xpu"):
        choose("cuda", local_rank=0)


def test_ranks_on_the_cpu_get_shared_memory_and_a_single_one_does_not() -> None:
    assert default_backend(torch.device("cpu"), world_size=2) == "cpu:shm"
    assert default_backend(torch.device("cpu")) == "gloo"


def _init_with(rank: int, world_size: int, port: int, backend: str | None) -> tuple[str, str]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        world = init(device="cpu", backend=backend)
        assert init() is world
    value = torch.ones(3)
    dist.all_reduce(value)
    assert value.tolist() == [world_size] * 3
    shutdown()
    return world.backend, said.getvalue()


@pytest.mark.parametrize(
    ("asked", "backend", "said"),
    [
        (None, "cpu:shm", "paceline: 2 ranks on one host, collectives through shared memory\n"),
        ("gloo", "gloo", ""),
        ("cpu:shm", "cpu:shm", ""),
    ],
)
def test_what_carries_collectives_is_chosen_and_said_once(
    ranks: Callable[..., list[tuple[str, str]]], asked: str | None, backend: str, said: str
) -> None:
    if kernel.reason_unavailable() is not None:
        pytest.skip("the kernel of the shared-memory transport is not built here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert ranks(_init_with, port, asked, backend=None) == [(backend, said), (backend, "")]


def _init_as(rank: int, world_size: int, variables: dict[str, str], names: list[str]) -> tuple[int, int, int, int]:
    os.environ.update(variables, **dict.fromkeys(names, str(rank)))
    world = init(device="cpu", backend="gloo")
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    shutdown()
    return world.rank, world.local_rank, world.world_size, int(total)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        (
            {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "0"},
            ["SLURM_PROCID", "SLURM_LOCALID"],
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"],
        ),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, ["PMI_RANK", "MPI_LOCALRANKID"]),
    ],
    ids=["slurm", "open-mpi", "pmi"],
)
def test_ranks_that_a_scheduler_has_started_meet(
    ranks: Callable[..., list[tuple[int, ...]]], variables: dict[str, str], names: list[str], tmp_path: Path
) -> None:
    # The name of the job, from which the port follows, is this test's own.
    job = {"SLURM_JOB_ID": str(tmp_path), "PMIX_NAMESPACE": str(tmp_path), "PMI_JOBID": str(tmp_path)}
    assert ranks(_init_as, variables | job, names, backend=None) == [(0, 0, 2, 3), (1, 1, 2, 3)]


def _init_by_rank(rank: int, world_size: int, port: int) -> tuple[World, int]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="7", RANK="7")
    world = init(device="cpu", backend="gloo", rank=rank, world_size=world_size)
    assert init(rank=rank, world_size=world_size) is world
    total = torch.tensor(world.rank + 1)
    dist.all_reduce(total)
    shutdown()
    return world, int(total)


def test_a_program_may_say_itself_which_rank_it_is(ranks: Callable[..., list[tuple[World, int]]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = ranks(_init_by_rank, port, backend=None)
    assert [(world.rank, world.local_rank, world.world_size, total) for world, total in told] == [
        (0, 0, 2, 3),
        (1, 1, 2, 3),
    ]


def test_one_rank_needs_no_place_to_meet() -> None:
    assert init(device="cpu", rank=0, world_size=1).world_size == 1


def test_a_shell_of_an_allocation_is_one_rank_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert init(device="cpu").world_size == 1
    assert "paceline: this is one rank. The Slurm allocation has 4 tasks" in capsys.readouterr().err


def test_a_node_whose_name_has_no_address_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"SLURM_STEP_NODELIST": "no-such.invalid,b", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadArgumentError, match=r"'no-such\.invalid', and no address.*Set MASTER_ADDR"):
        init(device="cpu")
    assert not dist.is_initialized()


def test_gloo_stands_in_for_a_vendor_backend_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    _have_accelerators(monkeypatch, vendor="xccl", available=False)
    assert default_backend(torch.device("xpu", 0)) == "gloo"


def test_an_accelerator_without_a_backend_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    _have_accelerators(monkeypatch, vendor="gloo")
    choose = importlib.import_module("paceline.run.init")._device
    assert choose(None, local_rank=0) == torch.device("cpu")
