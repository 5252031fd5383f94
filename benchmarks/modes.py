"""How a case is trained: each mode builds a replica that knows how to take one step.

A mode is free in what its step does. It may compile, use another process group (`Job.group` makes one of
any backend), leave all but one rank idle, or train on the whole batch of all ranks (`Job.batch(index,
rank=...)`): the suites only call `Replica.step`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline

from .models import Batch, Case

BATCHES = 8
"""Distinct batches of a rank; steps cycle through them."""
SHM = "cpu:shm"
"""Paceline's backend for the ranks of one host."""


@dataclasses.dataclass
class Job:
    """One case on this rank: everything a mode may ask for."""

    case: Case
    rank: int
    world_size: int
    process_group: dist.ProcessGroup
    """The group to train in: all ranks, or this one alone in the world-size-1 suite."""
    new_group: Callable[[str], dist.ProcessGroup]
    """backend name -> a group of the same ranks; made once for each name."""
    seed: int = 0

    def module(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.case.build()

    def batch(self, index: int, *, rank: int | None = None) -> Batch:
        return self._batches(self.rank if rank is None else rank)[index % BATCHES]

    def group(self, backend: str | None = None) -> dist.ProcessGroup:
        return self.process_group if backend is None else self.new_group(backend)

    @functools.cached_property
    def _drawn(self) -> dict[int, list[Batch]]:
        return {}

    def _batches(self, rank: int) -> list[Batch]:
        if rank not in self._drawn:
            generator = torch.Generator().manual_seed(1000 * self.seed + rank + 1)
            self._drawn[rank] = [self.case.batch(generator) for _ in range(BATCHES)]
        return self._drawn[rank]


class Replica(Protocol):
    """What the suites drive."""

    module: nn.Module

    def forward(self, index: int) -> Tensor: ...

    def step(self, index: int) -> None: ...


class Trainer:
    """The plain replica: forward, backward, optimizer step, gradients dropped."""

    def __init__(self, job: Job, module: nn.Module) -> None:
        self.job = job
        self.module = module
        self.optimizer = job.case.optimizer([p for p in module.parameters() if p.requires_grad])

    def forward(self, index: int) -> Tensor:
        return self.job.case.loss(self.module, self.job.batch(index))

    def step(self, index: int) -> None:
        self.forward(index).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclasses.dataclass(frozen=True)
class Mode:
    name: str
    title: str
    family: str
    """local: does not communicate. torch: a baseline, the better of which is 1.0. Others are judged."""
    wrap: Callable[[Job, nn.Module], nn.Module]
    """Makes a module that has just been built ready for data-parallel training."""
    trainer: Callable[[Job, nn.Module], Replica] = Trainer
    """Gives the wrapped module its optimizer and its step."""

    @property
    def synchronised(self) -> bool:
        """Whether its weights must equal those of torch's modes."""
        return self.family != "local"

    def build(self, job: Job) -> Replica:
        return self.trainer(job, self.wrap(job, job.module()))


def _local(job: Job, module: nn.Module) -> nn.Module:
    return module


def _torch_ddp(job: Job, module: nn.Module, *, views: bool, backend: str | None = None) -> nn.Module:
    group = job.group(backend)
    return nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=views)


def _paceline(job: Job, module: nn.Module, *, views: bool, backend: str | None = None) -> nn.Module:
    group = job.group(backend)
    return paceline.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=views)


def _on_shm(wrap: Callable[..., nn.Module], job: Job, module: nn.Module) -> nn.Module:
    carried = paceline.transport.describe(job.group(SHM))
    if "shared memory" not in carried:
        # Figures of gloo under another name would mislead.
        raise RuntimeError(f"the ranks of this run share no memory ({carried}); leave the modes on {SHM} out")
    return wrap(job, module, views=True, backend=SHM)


def _compiled(wrap: Callable[[Job, nn.Module], nn.Module], job: Job, module: nn.Module) -> nn.Module:
    return torch.compile(wrap(job, module))


class Threaded(Trainer):
    """The first rank trains on the batches of all ranks, with as many threads; the others have nothing to do."""

    def forward(self, index: int) -> Tensor:
        batches = [self.job.batch(index, rank=rank) for rank in range(self.job.world_size)]
        return self.job.case.loss(self.module, tuple(map(torch.cat, zip(*batches, strict=True))))

    def step(self, index: int) -> None:
        if self.job.rank:
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(threads * self.job.world_size)
        try:
            super().step(index)
        finally:
            torch.set_num_threads(threads)


_TORCH_VIEWS = functools.partial(_torch_ddp, views=True)
_PACELINE_VIEWS = functools.partial(_paceline, views=True)
_PACELINE_SHM = functools.partial(_on_shm, _paceline)

_USUAL = [
    Mode("local", "local, no communication", "local", _local),
    Mode("torch", "torch DDP", "torch", functools.partial(_torch_ddp, views=False)),
    Mode("torch-views", "torch DDP, views", "torch", _TORCH_VIEWS),
    Mode("paceline", "Paceline", "paceline", functools.partial(_paceline, views=False)),
    Mode("paceline-views", "Paceline, views", "paceline", _PACELINE_VIEWS),
]
_ON_SHM = [
    Mode("torch-shm", "torch DDP, views, shm", "torch on shm", functools.partial(_on_shm, _torch_ddp)),
    Mode("paceline-shm", "Paceline, views, shm", "paceline", _PACELINE_SHM),
    # Its weights differ from those of the ranks in the last bits: one mean over all is not the mean of means.
    Mode("two-threads", "one process, two threads", "local", _local, Threaded),
]
_COMPILED = [
    Mode(name, title, family, functools.partial(_compiled, wrap))
    for name, title, family, wrap in (
        ("local-compiled", "torch.compile, no communication", "local", _local),
        ("torch-compiled", "torch.compile(torch DDP, views)", "torch", _TORCH_VIEWS),
        ("paceline-compiled", "torch.compile(Paceline, views)", "paceline", _PACELINE_VIEWS),
        ("paceline-compiled-shm", "torch.compile(Paceline, views), shm", "paceline", _PACELINE_SHM),
    )
]
MODES = {mode.name: mode for mode in (*_USUAL, *_ON_SHM, *_COMPILED)}
USUAL = tuple(mode.name for mode in _USUAL)
"""What a suite compares unless it says otherwise."""
COMPILED = tuple(mode.name for mode in _COMPILED)
