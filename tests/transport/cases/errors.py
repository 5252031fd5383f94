"""Bad input: the class of error that gloo raises, on the rank that made the mistake, before anything is sent.

The mistakes are made on all ranks alike, so that nobody waits; the group works on afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import DisagreementError

from ..conformance import case

ones, zeros = torch.ones, torch.zeros


def _refused(kind: type[Exception], call: Callable[[], Any], *what: object, said: str = "") -> None:
    try:
        call()
    except kind as error:
        if re.search(said, str(error)) is None:
            raise AssertionError(f"{what}: {error}") from error
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} is no {kind.__name__}: {error}") from error
    raise AssertionError(f"{what}: no error")


def _works(world_size: int) -> None:
    tensor = ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world_size).all()


@case()
def sizes_and_counts(rank, world_size):
    calls: dict[str, Callable[[], Any]] = {
        "all_gather: list too short": lambda: dist.all_gather([zeros(2)], ones(2)),
        "all_gather: list too long": lambda: dist.all_gather([zeros(2)] * 3, ones(2)),
        "all_gather: sizes differ": lambda: dist.all_gather([zeros(2), zeros(3)], ones(2)),
        "all_gather_single: size": lambda: dist.all_gather_single(zeros(5), ones(2)),
        "all_gather_single: dtype": lambda: dist.all_gather_single(zeros(4, dtype=torch.int32), ones(2)),
        "reduce_scatter: list too short": lambda: dist.reduce_scatter(zeros(2), [ones(2)]),
        "reduce_scatter: size": lambda: dist.reduce_scatter(zeros(2), [ones(3), ones(3)]),
        "reduce_scatter_single: size": lambda: dist.reduce_scatter_single(zeros(2), ones(5)),
        "reduce_scatter_single: dtype": lambda: dist.reduce_scatter_single(zeros(2), ones(4, dtype=torch.int32)),
        "all_to_all_single: sum of splits": lambda: dist.all_to_all_single(zeros(4), ones(4), [1, 1], [2, 2]),
        "all_to_all_single: number of splits": lambda: dist.all_to_all_single(zeros(4), ones(4), [4], [4]),
        "all_to_all: list too short": lambda: dist.all_to_all([zeros(2)], [ones(2)]),
        "gather: list too short": lambda: dist.gather(ones(2), [zeros(2)], dst=rank),
        "gather: sizes differ": lambda: dist.gather(ones(2), [zeros(2), zeros(3)], dst=rank),
        "scatter: list too short": lambda: dist.scatter(ones(2), [zeros(2)], src=rank),
        "scatter: sizes differ": lambda: dist.scatter(ones(2), [zeros(2), zeros(3)], src=rank),
    }
    for what, call in calls.items():
        _refused(RuntimeError, call, what)
    _works(world_size)


@case()
def roots_and_tags(rank, world_size):
    calls: dict[str, Callable[[], Any]] = {
        "broadcast: no such root": lambda: dist.broadcast(ones(2), 5),
        "broadcast: negative root": lambda: dist.broadcast(ones(2), -1),
        "reduce: no such root": lambda: dist.reduce(ones(2), 7),
        "isend: negative tag": lambda: dist.isend(ones(2), 1 - rank, tag=-1),
        "irecv: negative tag": lambda: dist.irecv(ones(2), 1 - rank, tag=-1),
    }
    for what, call in calls.items():
        _refused(RuntimeError, call, what)
    _refused(ValueError, lambda: dist.send(ones(2), rank), "send to itself")
    _works(world_size)


@case()
def found_by_torch(rank, world_size):
    """What the front end of c10d refuses for any backend, it still does."""
    calls: dict[str, Callable[[], Any]] = {
        "all_gather: dtypes differ": lambda: dist.all_gather([zeros(2), zeros(2, dtype=torch.int32)], ones(2)),
        "reduce_scatter: dtypes differ": lambda: dist.reduce_scatter(zeros(2), [ones(2, dtype=torch.int32)] * 2),
        "all_to_all_single: dtypes differ": lambda: dist.all_to_all_single(zeros(4), ones(4, dtype=torch.int32)),
        "gather: list on a rank that does not gather": lambda: dist.gather(ones(2), [zeros(2)] * 2, dst=1 - rank),
        "gather: no list": lambda: dist.gather(ones(2), None, dst=rank),
        "scatter: no list": lambda: dist.scatter(ones(2), None, src=rank),
        "all_reduce: complex maximum": lambda: dist.all_reduce(ones(2, dtype=torch.complex64), dist.ReduceOp.MAX),
    }
    for what, call in calls.items():
        _refused(ValueError, call, what)
    _refused(TypeError, lambda: dist.all_reduce([ones(2)]), "all_reduce of a list")
    _works(world_size)


def _undefined(dtype: torch.dtype) -> list[Any]:
    if dtype.is_complex:
        return [dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.BAND]
    if dtype.is_floating_point:
        return [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
    # gloo refuses the mean of any integers, and shm of truth values only.
    return [dist.ReduceOp.AVG] if dtype is torch.bool or dist.get_backend() == "gloo" else []


UNDEFINED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)


@case()
def undefined_operations(rank, world_size):
    for dtype in (*UNDEFINED_DTYPES, torch.complex64):
        for op in _undefined(dtype):
            one, two = ones(1, dtype=dtype), ones(2, dtype=dtype)
            calls = {
                "reduce": partial(dist.reduce, two, 0, op),
                "reduce_scatter": partial(dist.reduce_scatter, one, [one, one], op),
            }
            if not dtype.is_complex:
                calls["all_reduce"] = partial(dist.all_reduce, two, op)
            for what, call in calls.items():
                _refused(RuntimeError, call, what, dtype, op)
    # gloo finds out on its thread, and the group is broken afterwards.
    if dist.get_backend() != "gloo":
        _works(world_size)


@case(2, shm_only="gloo crashes, hangs or gives a wrong result")
def ranks_that_disagree(rank, world_size):
    """Different collectives, operations, dtypes, sizes or roots are an error on every rank that names who does what."""

    def collectives(group: dist.ProcessGroup) -> None:
        dist.all_reduce(ones(2), group=group) if rank else dist.broadcast(ones(2), 0, group=group)

    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    dtype = torch.int32 if rank else torch.float32
    calls: dict[str, Callable[[dist.ProcessGroup], Any]] = {
        "collectives": collectives,
        "operations": lambda group: dist.all_reduce(ones(2), op, group=group),
        "dtypes": lambda group: dist.all_reduce(ones(2, dtype=dtype), group=group),
        "sizes": lambda group: dist.all_reduce(ones(2 + rank), group=group),
        "large sizes": lambda group: dist.all_reduce(ones(400_000 + rank), group=group),
        "roots": lambda group: dist.broadcast(ones(2), rank, group=group),
        "pieces": lambda group: dist.all_to_all_single(zeros(4), ones(4), [2, 2], [3 - rank, 1 + rank], group=group),
    }
    for what, call in calls.items():
        # Pieces are compared one by one, so a message names the first that does not fit.
        of_pieces = r"rank 0 sends \d+ bytes to rank 0, which expects \d+"
        said = of_pieces if what == "pieces" else r"rank 0 in .+, rank 1 in "
        _refused(DisagreementError, partial(call, dist.new_group([0, 1])), what, said=said)
    _works(world_size)


@case(shm_only="gloo moves the bytes, whatever they are")
def dtypes_that_differ(rank, world_size):
    """Of one size in bytes, so that they could be moved, and would be something else on arrival."""
    mine = ones(4, dtype=torch.int32 if rank else torch.float32)
    all_of_them = mine.new_zeros(4 * world_size)
    pieces = list(all_of_them.chunk(world_size))
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(mine, 0),
        "all_gather": lambda: dist.all_gather(pieces, mine),
        "all_gather_single": lambda: dist.all_gather_single(all_of_them, mine),
        "all_to_all_single": lambda: dist.all_to_all_single(all_of_them.clone(), all_of_them),
        "gather": lambda: dist.gather(mine, pieces if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(mine, pieces if rank == 0 else None, src=0),
    }
    for what, call in calls.items():
        _refused(DisagreementError, call, what)
    # Nothing goes with anything.
    dist.all_gather([mine.new_zeros(0)] * world_size, mine.new_zeros(0))
    _works(world_size)
