"""How tensors are reduced: each method is opened once on all ranks and then takes turns.

To add one, register it here; nothing else lists names (goals are in `judge.py`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from . import mpi
from .limit import Limit, LimitGroup
from .turn import Gate, timed

Turn = Callable[[int, int], float]
"""(bytes, calls) -> seconds of one call on this rank."""


class MethodMissingError(RuntimeError):
    """A method can't be used here; raised on all ranks alike."""


@dataclasses.dataclass
class Place:
    """What a method is given when it is opened."""

    rank: int
    world_size: int
    largest_bytes: int
    scope: ExitStack
    """Ends with the run: for what has to be closed."""
    facts: dict[str, str]
    """What a reader of the figures should know; rank 0's are reported."""
    gate: Gate | None
    """None: calls follow each other on warm caches."""

    def preparation(self, tensor: Tensor) -> Callable[[], object]:
        """What goes before each call."""
        gate = self.gate
        if gate is None:
            return lambda: None

        def prepare() -> None:
            tensor.zero_()
            gate()

        return prepare


@dataclasses.dataclass(frozen=True)
class Method:
    name: str
    title: str
    open: Callable[[Place], Turn]
    missing: Callable[[], str | None] = lambda: None
    """Why it can't run here, or None; asked before any rank is started."""


METHODS: dict[str, Method] = {}


def register(method: Method) -> Method:
    if method.name in METHODS:
        raise ValueError(f"the method {method.name!r} is registered twice")
    METHODS[method.name] = method
    return method


def _turns(place: Place, buffer: Tensor, group: dist.ProcessGroup | None) -> Turn:
    views: dict[int, Tensor] = {}

    def turn(nbytes: int, calls: int) -> float:
        if nbytes not in views:
            views[nbytes] = buffer[: nbytes // buffer.element_size()]
            _check(place, views[nbytes], group)
        tensor = views[nbytes]
        return timed(lambda: dist.all_reduce(tensor, group=group), place.preparation(tensor), calls)

    return turn


def _check(place: Place, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """A fast wrong answer is no answer. Leaves zeros, which sums of sums keep finite."""
    tensor.fill_(place.rank + 1)
    dist.all_reduce(tensor, group=group)
    expected = place.world_size * (place.world_size + 1) / 2
    if not bool((tensor == expected).all()):
        raise AssertionError(f"rank {place.rank}: {tensor.numel()} elements were summed wrongly")
    tensor.zero_()


def _gloo(place: Place) -> Turn:
    return _turns(place, torch.zeros(place.largest_bytes // 4), None)


def _shm_group() -> dist.ProcessGroup:
    from paceline import transport

    group = dist.new_group(backend="cpu:shm")
    carried = transport.describe(group)
    if "shared memory" not in carried:
        raise MethodMissingError(f"the ranks share no memory ({carried})")
    return group


def _shm(place: Place) -> Turn:
    return _turns(place, torch.zeros(place.largest_bytes // 4), _shm_group())


def _zero_copy(place: Place) -> Turn:
    from paceline import transport

    group = _shm_group()
    memory = transport.allocate(place.largest_bytes, group=group)
    if memory is None:
        raise MethodMissingError(f"no room for {place.largest_bytes} bytes of shared memory a rank")
    return _turns(place, memory.view(torch.float32), group)


def _limit(place: Place) -> Turn:
    limit = Limit(place.rank, place.world_size, place.largest_bytes)
    place.facts["limit"] = limit.how
    return _without_waiting(place, limit, lambda own: partial(limit.run, own.nbytes))


def _limit_called(place: Place) -> Turn:
    limit = Limit(place.rank, place.world_size, place.largest_bytes)
    dist.Backend.register_backend("limit", partial(_limit_group, limit), devices=["cpu"])
    group = dist.new_group(backend="limit")
    return _without_waiting(place, limit, lambda own: partial(dist.all_reduce, own, group=group))


def _limit_group(limit: Limit, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> LimitGroup:
    return LimitGroup(limit, rank, world_size)


def _without_waiting(place: Place, limit: Limit, call_of: Callable[[Tensor], Callable[[], object]]) -> Turn:
    # Where ranks have to share a core, they can only do their parts one after another.
    waves = max(1.0, place.world_size / len(os.sched_getaffinity(0)))

    def turn(nbytes: int, calls: int) -> float:
        own = limit.own(nbytes)
        return waves * timed(call_of(own), place.preparation(own), calls)

    return turn


def _mpi(place: Place) -> Turn:
    peer = mpi.Peer(place.rank, place.world_size)
    place.scope.callback(peer.close)
    place.facts["mpi"] = peer.version
    return lambda nbytes, calls: peer.turn(nbytes, calls, warm=place.gate is None)


def _shm_missing() -> str | None:
    try:
        import paceline  # noqa: F401  (registers the backend)
        from paceline.transport.shm import kernel
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    if "shm" not in dist.Backend.backend_list:
        return "paceline has registered no backend of this name"
    return kernel.reason_unavailable()


register(Method("gloo", "gloo", _gloo))
register(Method("shm", "shm, ordinary tensors", _shm, _shm_missing))
register(Method("shm-zero-copy", "shm, zero copy", _zero_copy, _shm_missing))
register(Method("mpi", "MPI", _mpi, mpi.missing))
register(Method("limit", "the limit", _limit))
register(Method("limit-called", "the limit, by dist.all_reduce", _limit_called))
