"""Programs on live ranks: many in one process group, until one of them ends in an error."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import DDP
from paceline.errors import PeerError
from paceline.testing import RankError, RankPool

from . import nets
from .program import RANKS, Program
from .replica import Replica, Snapshot, quiet

GROUP_TIMEOUT_S = 15.0
REFUSED_TIMEOUT_S = 3.0
"""The group's time-out for a program of which it is known that a rank will wait in vain."""
_PROGRAM_S = 40.0
"""A program that takes longer than this hangs: no wait of ours is longer than the group's time-out."""
_BATCH_S = 300.0
_TINY_MB = 1e-5


@dataclass(frozen=True)
class Ended:
    """How a program ended on one rank. ``error`` has the names of the exception's class and of the classes above it."""

    snapshots: list[Snapshot]
    error: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True)
class Gone:
    """A rank that gave no answer: it was stuck, or its process ended."""

    what: str
    log: str


class _Live(Replica):
    def wrap(self, module: nn.Module) -> DDP:
        options = self.program.options
        return DDP(
            module,
            bucket_cap_mb=_TINY_MB if options.small_buckets else None,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            verify_every=options.verify_every,
        )

    def copy_wrapper(self, wrapper: Any) -> Any:
        return copy.deepcopy(wrapper)

    def compiled(self, wrapper: Any, backend: str) -> Callable[..., Tensor]:
        return torch.compile(wrapper, backend=backend, dynamic=False)

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        loss.backward(retain_graph=retain_graph)

    def hook_after_accumulation(self, param: Tensor, hook: nets.PostHook) -> None:
        param.register_post_accumulate_grad_hook(hook)


Around = Callable[[], contextlib.AbstractContextManager[object]]
"""A module-level function whose context ranks run programs in: it breaks something, to see that this is found."""


def run_batch(rank: int, world_size: int, programs: Sequence[Program], around: Around) -> list[Ended]:
    """On a rank: run the programs up to the first one that ends in an error somewhere."""
    # Ranks tell each other in a group of their own how they fared, as the tested one may be out of step.
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=_PROGRAM_S))
    done: list[Ended] = []
    for program in programs:
        with around():
            done.append(_run_one(rank, program))
        failed = torch.tensor([float(bool(done[-1].error))])
        try:
            dist.all_reduce(failed, group=control)
        except RuntimeError:
            # The other rank is stuck or dead, and the parent knows it.
            break
        if failed.item():
            break
    return done


def _run_one(rank: int, program: Program) -> Ended:
    replica = _Live(program, rank, values_of=rank)
    try:
        with quiet():
            replica.run()
        return Ended(replica.snapshots)
    except BaseException as error:
        if not isinstance(error, PeerError):
            # What the interpreter does with an exception that ends a program; the other rank hears of it.
            with contextlib.redirect_stderr(io.StringIO()):
                sys.excepthook(type(error), error, error.__traceback__)
        names = tuple(kind.__name__ for kind in type(error).__mro__)
        return Ended(replica.snapshots, names, str(error))
    finally:
        if program.compiles:
            torch.compiler.reset()


def run(
    pool: RankPool,
    programs: Sequence[Program],
    *,
    refused: bool = False,
    around: Around = contextlib.nullcontext,
    tries: int = 2,
) -> Iterator[list[Ended | Gone]]:
    """Run programs of one backend; yields what became of each, by rank. ``refused``: a rank will wait in vain.

    ``tries``: how often ranks may try to make their group. Its time-out is short where a rank waits in vain, and a
    busy machine can stand still for so long.
    """
    left = list(programs)
    while left:
        try:
            answers = pool.run(
                run_batch,
                left,
                around,
                backend=left[0].backend,
                timeout=_BATCH_S if len(left) > 1 else _PROGRAM_S,
                group_timeout_s=REFUSED_TIMEOUT_S if refused else GROUP_TIMEOUT_S,
                settle_s=_PROGRAM_S,
            )
        except RankError as error:
            if len(left) > 1:
                # Which one it was is found by running each by itself.
                for program in left:
                    yield from run(pool, [program], refused=refused, around=around)
            elif tries > 1 and all(_never_began(error, rank) for rank in RANKS):
                yield from run(pool, left, refused=refused, around=around, tries=tries - 1)
            else:
                yield [_answer(error, rank) for rank in RANKS]
            return
        yield from ([*each] for each in zip(*answers, strict=True))
        left = left[len(answers[0]) :]


def _never_began(error: RankError, rank: int) -> bool:
    return rank in error.failures and bool(error.failures[rank].error_type)


def _answer(error: RankError, rank: int) -> Ended | Gone:
    failure = error.failures.get(rank)
    if failure is None:
        ended = error.results[rank][-1]
        assert isinstance(ended, Ended)
        return ended
    if _never_began(error, rank):
        # It could not even begin, as the other one was not there.
        return Gone("lost", f"{failure.error_type}: {failure.message}")
    return Gone("hang" if failure.message.startswith("stuck") else "crash", failure.traceback[-3000:])
