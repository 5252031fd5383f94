"""How a case is trained: each mode builds a replica that knows how to take one step.

A mode is free in what its step does. It may compile, use another process group (`Job.group` makes one of
any backend), leave all but one rank idle, or train on the whole batch of all ranks (`Job.batch(index,
rank=...)`): the suites only call `Replica.step`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .models import Batch, Case

BATCHES = 8
"""Distinct batches of a rank; steps cycle through them."""


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
    requires: str | None = None
    """A module without which the mode is left out, loudly."""

    @property
    def synchronised(self) -> bool:
        """Whether its weights must equal those of torch's modes."""
        return self.family != "local"

    def build(self, job: Job) -> Replica:
        return self.trainer(job, self.wrap(job, job.module()))

    def missing(self) -> str | None:
        """Why it can't run here, or None."""
        if self.requires is None:
            return None
        try:
            importlib.import_module(self.requires)
        except ImportError as error:
            return f"{type(error).__name__}: {error}"
        return None


MODES: dict[str, Mode] = {}


def register(mode: Mode) -> Mode:
    if mode.name in MODES:
        raise ValueError(f"the mode {mode.name!r} is registered twice")
    MODES[mode.name] = mode
    return mode


def _local(job: Job, module: nn.Module) -> nn.Module:
    return module


def _torch_ddp(job: Job, module: nn.Module, *, views: bool) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=job.group(), gradient_as_bucket_view=views)


def _paceline(job: Job, module: nn.Module, *, views: bool) -> nn.Module:
    import paceline

    return paceline.DistributedDataParallel(module, process_group=job.group(), gradient_as_bucket_view=views)


register(Mode(name="local", title="local, no communication", family="local", wrap=_local))
register(
    Mode(
        name="torch",
        title="torch DDP",
        family="torch",
        wrap=functools.partial(_torch_ddp, views=False),
    )
)
register(
    Mode(
        name="torch-views",
        title="torch DDP, views",
        family="torch",
        wrap=functools.partial(_torch_ddp, views=True),
    )
)
register(
    Mode(
        name="paceline",
        title="Paceline",
        family="paceline",
        wrap=functools.partial(_paceline, views=False),
        requires="paceline",
    )
)
register(
    Mode(
        name="paceline-views",
        title="Paceline, views",
        family="paceline",
        wrap=functools.partial(_paceline, views=True),
        requires="paceline",
    )
)
