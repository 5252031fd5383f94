"""Eager and compiled training side by side on the same ranks, and what can be seen of the compiled one."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters

from paceline import DDP
from paceline.compiler.record import records_of

# float64 throughout: what differs then is the algorithm, not the rounding.
RTOL, ATOL = 1e-11, 1e-12

Step = Callable[[Any, int, int], Any]


def batch(rank: int, step: int = 0, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(*(shape or (3, 8)), generator=generator, dtype=torch.float64)


def stack(layers: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(7)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts).double()


def plain_step(model: Any, rank: int, step: int) -> None:
    model(batch(rank, step)).square().sum().backward()


eager = functools.partial(torch.compile, backend="eager")


def whole(backend: str, **options: Any) -> Callable[..., Any]:
    """Compiles as one graph."""
    return functools.partial(torch.compile, backend=backend, fullgraph=True, **options)


def fresh() -> None:
    """Have Dynamo forget what it has compiled, and how often."""
    torch._dynamo.reset()
    clear_compilation_metrics()


def new_salt() -> float:
    """A number that no cache has seen yet. Elsewhere one that differs from run to run would have no place in a test."""
    return 1 + time.time_ns() % 10**9 / 10**9


@contextlib.contextmanager
def messages(level: int) -> Iterator[list[str]]:
    """What the compiler's logger says meanwhile, at ``level`` or above."""
    told: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("paceline.compiler")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@dataclass
class Seen:
    """What was seen of the compiled one."""

    graphs: int = 0
    early: list[int] = field(default_factory=list)
    """Per synchronised backward: how many buckets left from inside a graph."""
    buckets: int = 0
    rounds: list[int] = field(default_factory=list)
    """Per synchronised backward: how many collectives of buckets there were."""
    taps: int = 0
    more: int = 0
    """Gradients that autograd brought together with stand-ins of early ones, or instead of them."""
    unknown: list[int] = field(default_factory=list)
    """Per synchronised backward: how many stand-ins autograd brought as copies."""


class Watch:
    """Counts the buckets that leave from inside a compiled backward."""

    def __init__(self, ddp: DDP) -> None:
        self.seen = Seen()
        reducer = ddp._reducer
        self._reducer = reducer
        self._inside = False
        self._count = self._sent = self._unknown = 0
        report, brings_more, finish = reducer.gradients_early, reducer.brings_more, reducer._finish
        is_one, start = reducer._stand_ins.is_one, reducer.exchange.start

        def gradients_early(pairs):
            self._inside = True
            try:
                return report(pairs)
            finally:
                self._inside = False

        def counted_more(slot):
            more = brings_more(slot)
            self.seen.more += more
            return more

        def checked(grad):
            known = is_one(grad)
            self._unknown += not known
            return known

        def counted(*args, **kwargs):
            self._count += self._inside
            self._sent += 1
            return start(*args, **kwargs)

        def counted_end(backward):
            finish(backward)
            if not backward.syncing:
                return
            self.seen.early.append(self._count)
            self.seen.rounds.append(self._sent)
            self.seen.unknown.append(self._unknown)
            self._count = self._sent = self._unknown = 0

        reducer._stand_ins.is_one = checked
        reducer.gradients_early, reducer.brings_more, reducer._finish = gradients_early, counted_more, counted_end
        reducer.exchange.start = counted

    def result(self) -> Seen:
        self.seen.graphs = counters["stats"]["unique_graphs"]
        self.seen.buckets = len(self._reducer.plan.buckets)
        records = records_of(self._reducer)
        self.seen.taps = sum(len(record.taps) for record in records)
        return self.seen


def same_grads(eager: nn.Module, other: nn.Module, what: str = "", *, rtol: float = RTOL, atol: float = ATOL) -> None:
    for (name, a), b in zip(eager.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"{what} {name}: {a.grad} {b.grad}"
        if a.grad is not None:
            torch.testing.assert_close(b.grad.to_dense(), a.grad.to_dense(), rtol=rtol, atol=atol, msg=f"{what} {name}")


def in_sync(model: nn.Module) -> None:
    """Parameters are the same to the bit on all ranks."""
    for name, param in model.named_parameters():
        others = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(others, param.detach().contiguous())
        assert all(torch.equal(others[0], other) for other in others), name


def compare(
    rank: int,
    make: Callable[[], nn.Module],
    *,
    compile: Callable[[DDP], Any],
    inside: Callable[[nn.Module], nn.Module] = lambda module: module,
    steps: int = 3,
    step: Step = plain_step,
    prepare: Callable[[DDP], None] = lambda ddp: None,
    zero: bool = True,
    synced: bool = True,
    rtol: float = RTOL,
    atol: float = ATOL,
    **options: Any,
) -> Seen:
    """Train an eager wrapper and a compiled one alike; gradients must be the same after each step.

    ``compile`` compiles the wrapper, and ``inside`` the module before it is wrapped.
    """
    torch._dynamo.reset()
    counters.clear()
    options.setdefault("bucket_cap_mb", 600 / 2**20)
    eager, ours = DDP(make(), **options), DDP(inside(make()), **options)
    prepare(eager)
    prepare(ours)
    compiled = compile(ours)
    watch = Watch(ours)
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for ddp in (eager, ours)]
    for n in range(steps):
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            if zero:
                optimizer.zero_grad()
            step(model, rank, n)
        same_grads(eager, ours, f"step {n}", rtol=rtol, atol=atol)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(eager.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(b, a, msg=name)
    if synced:
        in_sync(ours)
    return watch.result()
