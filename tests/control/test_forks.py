"""A process that a rank forks is not the rank: it neither speaks for it, nor trains, nor changes its gradients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import DDP, transport
from paceline.control import hang
from paceline.control.wire import MessageKind
from paceline.errors import StateError
from paceline.transport.shm import segment
from tests.control._common import BUSY_S
from tests.on_ranks import on_ranks

Ranks = Callable[..., list[Any]]
CHILD_S = 60
"""A child that hangs gets a signal after this time."""

both_backends = pytest.mark.parametrize("backend", ["gloo", "shm"])


def _in_a_fork(what: Callable[[], object]) -> str:
    """What ``what()`` returns or raises in a fork of this process."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        # Later versions of Python warn of a fork of a process that has threads. That is what is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        try:
            try:
                said = f"returned {what()}"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as answer:
        said = answer.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"the child ended after it had said {said!r}"
    return said


def _in_a_fork_of_a_fork(what: Callable[[], object]) -> str:
    return _in_a_fork(lambda: _in_a_fork(what)).removeprefix("returned ")


def _wrapper() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def _step(ddp: DDP, rank: int, *, value: float = 1.0) -> torch.Tensor:
    """Train for one step; returns the first gradient."""
    ddp.zero_grad()
    ddp.module[0](torch.full((2, 3), value * (rank + 1))).sum().backward()
    return ddp.module[0].weight.grad


# -- a fork does not speak for its rank ------------------------------------------------------------------


class ForkError(RuntimeError):
    pass


def _end_with_an_exception() -> None:
    """What the interpreter does with an exception that nobody catches."""
    error = ForkError("the child cannot go on")
    sys.excepthook(type(error), error, None)


def _raise_in_children(rank: int, world_size: int) -> None:
    ddp = _wrapper()
    _step(ddp, rank)
    if rank == 0:
        assert _in_a_fork(_end_with_an_exception) == "returned None"
        assert _in_a_fork_of_a_fork(_end_with_an_exception) == "returned None"
        # What a child raises that is forked inside forward comes by the wrapper.
        assert _in_a_fork(lambda: ddp.channel.report("forward", ForkError("inside forward"))) == "returned None"
        # A child writes to no file of its parent's, and says nothing at its end.
        before = ddp.channel.progress.path.read_bytes()
        assert _in_a_fork(lambda: (ddp.channel.progress.fail("x"), ddp.channel.finish())) == "returned (None, None)"
        assert ddp.channel.progress.path.read_bytes() == before
    dist.barrier()
    assert ddp.channel.news() is None
    torch.testing.assert_close(_step(ddp, rank), torch.full((3, 3), 3.0))


@both_backends
def test_the_others_hear_nothing_of_a_fork_that_raises(ranks: Ranks, backend: str) -> None:
    ranks(_raise_in_children, backend=backend)


def _tell_torchrun_in_a_child(rank: int, world_size: int, path: str) -> None:
    ddp = _wrapper()
    os.environ["TORCHELASTIC_ERROR_FILE"] = path
    if rank == 0:
        assert _in_a_fork(_end_with_an_exception) == "returned None"
    # The other rank is not done before this one.
    dist.barrier()
    assert ddp.channel.news() is None


def test_torchrun_is_not_told_of_a_fork_that_raises(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_tell_torchrun_in_a_child, str(tmp_path / "error.json"))
    assert list(tmp_path.iterdir()) == []


# -- a fork does not train -------------------------------------------------------------------------------


def _act_as_the_rank(rank: int, world_size: int) -> None:
    ddp = _wrapper()
    channel, x = ddp.channel, torch.ones(2, 3)
    acts = {
        "forward": lambda: ddp(x),
        "evaluation": lambda: ddp.eval()(x),
        "wrapper": lambda: DDP(nn.Linear(3, 3)),
        "agreement": lambda: channel.agree("something", 1),
        "inquiry": channel.inquiries.answer,
        "message": lambda: channel._board.put("news", MessageKind.WORD, ("something",)),
        "all-reduce": lambda: channel.start_all_reduce(x, "something"),
        "broadcast": lambda: channel.start_broadcast(x, "something", source=0),
        "backward": lambda: ddp.module[0](x).sum().backward(),
    }
    if rank == 0:
        for name, act in acts.items():
            for forked in (_in_a_fork, _in_a_fork_of_a_fork):
                said = forked(act)
                assert "is a fork of rank 0" in said or f"is a fork of process {os.getpid()}" in said, (name, said)
                assert said.startswith(f"{StateError.__name__}: "), (name, said)
        # What needs no other rank works.
        assert _in_a_fork(lambda: ddp.module.eval()(x).shape) == "returned torch.Size([2, 3])"
    dist.barrier()
    assert channel.news() is None
    torch.testing.assert_close(_step(ddp, rank), torch.full((3, 3), 3.0))


@both_backends
def test_a_fork_that_acts_as_its_rank_gets_an_error(ranks: Ranks, backend: str) -> None:
    ranks(_act_as_the_rank, backend=backend)


@on_ranks()
def test_the_watch_of_a_fork_answers_for_nobody(rank: int, world_size: int) -> None:
    ddp = _wrapper()
    assert ddp.channel in hang._watch._channels
    assert _in_a_fork(lambda: len(hang._watch._channels)) == "returned 0"


# -- a fork has gradients of its own ---------------------------------------------------------------------


def _write_in_children(rank: int, world_size: int) -> None:
    ddp = _wrapper()
    # Buckets move into shared memory in the second step, and out of it if somebody keeps a gradient of the step before.
    for _ in range(3):
        _step(ddp, rank)
    grad = ddp.module[0].weight.grad
    shared = [at <= grad.data_ptr() < at + nbytes for at, (nbytes, _) in segment._copied.items()]
    assert any(shared) == (dist.get_backend() == "shm"), "nothing is tested unless the gradient is in shared memory"
    expected = torch.full((3, 3), 3.0)
    torch.testing.assert_close(grad, expected)

    def zero() -> object:
        torch.testing.assert_close(grad, expected)
        grad.zero_()
        return grad.sum().item()

    def zero_in_both() -> object:
        grad.fill_(5)
        said = _in_a_fork(lambda: (grad.sum().item(), grad.zero_().sum().item()))
        return said, grad.sum().item()

    for _ in range(2):
        assert _in_a_fork(zero) == "returned 0.0"
        torch.testing.assert_close(grad, expected)
    assert _in_a_fork(zero_in_both) == "returned ('returned (45.0, 0.0)', 45.0)"
    torch.testing.assert_close(grad, expected)
    # The ranks still share the memory that they reduce in.
    dist.barrier()
    torch.testing.assert_close(_step(ddp, rank, value=2.0), 2 * expected)


@both_backends
def test_what_a_fork_writes_to_gradients_stays_in_the_fork(ranks: Ranks, backend: str) -> None:
    ranks(_write_in_children, backend=backend)


def _outlive(rank: int, world_size: int) -> None:
    memory = transport.allocate(4096)
    (file,) = [fd for at, (_, fd) in segment._copied.items() if at == memory.data_ptr()]
    memory.fill_(7)
    dist.barrier()
    # The child lets go of the file, too.
    assert _in_a_fork(lambda: (memory.fill_(1), os.fstat(file))).startswith("OSError: [Errno 9]")
    dist.destroy_process_group()
    assert _in_a_fork(lambda: memory.zero_().sum().item()) == "returned 0"
    assert memory.sum().item() == 7 * 4096
    memory = None
    assert file not in [fd for _, fd in segment._copied.values()]


def test_shared_memory_that_outlives_its_group_is_not_shared_with_forks(ranks: Ranks) -> None:
    ranks(_outlive, backend="shm")


# -- whole programs --------------------------------------------------------------------------------------

PROGRAM = """
import multiprocessing, os, subprocess, sys, torch, paceline
from torch.utils.data import DataLoader

world = paceline.init(backend=sys.argv[1])
ddp = paceline.DDP(torch.nn.Linear(3, 3))

def step():
    ddp.zero_grad()
    ddp(torch.full((2, 3), world.rank + 1.0)).sum().backward()

class WritesToGradients(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return grad.add_(index).sum()

def fail():
    grad.zero_()
    raise ValueError("a worker fails")

for _ in range(3):
    step()
grad = ddp.module.weight.grad
loaded = [x.item() for x in DataLoader(WritesToGradients(), num_workers=2, multiprocessing_context="fork")]
assert loaded == [27.0, 36.0, 45.0, 63.0], loaded
worker = multiprocessing.get_context("fork").Process(target=fail)
worker.start()
worker.join()
assert worker.exitcode == 1
assert subprocess.run(["true"], preexec_fn=grad.zero_).returncode == 0
child = os.fork()
if child == 0:
    try:
        fail()
    except ValueError:
        # The interpreter does this. To end as usual is not possible over gloo, which waits for threads of its own.
        sys.excepthook(*sys.exc_info())
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
for _ in range(2):
    assert torch.equal(ddp.module.weight.grad, torch.full((3, 3), 3.0)), ddp.module.weight.grad
    step()
paceline.shutdown()
print(f"rank {world.rank} is done", flush=True)
"""


@both_backends
def test_a_program_whose_children_fail_trains_on(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "train", "--nproc", "2", "--script", script, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUSY_S * 2)
    assert done.returncode == 0, done.stderr
    assert "rank 0 is done" in done.stdout
    assert done.stderr.count("ValueError: a worker fails") == 2
