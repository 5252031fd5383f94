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


def _torch_ddp(job: Job, module: nn.Module, *, views: bool, backend: str | None = None) -> nn.Module:
    group = job.group(backend)
    return nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=views)


def _paceline(job: Job, module: nn.Module, *, views: bool, backend: str | None = None) -> nn.Module:
    import paceline

    group = job.group(backend)
    return paceline.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=views)


def _on_shm(wrap: Callable[..., nn.Module], job: Job, module: nn.Module) -> nn.Module:
    from paceline import transport

    carried = transport.describe(job.group(SHM))
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
USUAL = tuple(MODES)
"""What a suite compares unless it says otherwise."""

register(
    Mode(
        name="torch-shm",
        title="torch DDP, views, shm",
        family="torch on shm",
        wrap=functools.partial(_on_shm, _torch_ddp),
        requires="paceline.transport",
    )
)
register(
    Mode(
        name="paceline-shm",
        title="Paceline, views, shm",
        family="paceline",
        wrap=functools.partial(_on_shm, _paceline),
        requires="paceline.transport",
    )
)
# Its weights differ from those of the ranks in the last bits: one mean over all is not the mean of means.
register(
    Mode(
        name="two-threads",
        title="one process, two threads",
        family="local",
        wrap=_local,
        trainer=Threaded,
    )
)

COMPILED = ("local-compiled", "torch-compiled", "paceline-compiled", "paceline-compiled-shm")
register(
    Mode(
        name="local-compiled",
        title="torch.compile, no communication",
        family="local",
        wrap=functools.partial(_compiled, _local),
    )
)
register(
    Mode(
        name="torch-compiled",
        title="torch.compile(torch DDP, views)",
        family="torch",
        wrap=functools.partial(_compiled, functools.partial(_torch_ddp, views=True)),
    )
)
register(
    Mode(
        name="paceline-compiled",
        title="torch.compile(Paceline, views)",
        family="paceline",
        wrap=functools.partial(_compiled, functools.partial(_paceline, views=True)),
        requires="paceline",
    )
)
register(
    Mode(
        name="paceline-compiled-shm",
        title="torch.compile(Paceline, views), shm",
        family="paceline",
        wrap=functools.partial(_compiled, functools.partial(_on_shm, _paceline)),
        requires="paceline.transport",
    )
)
