"""The operators that stand in a graph for the collectives torch has no operator for.

There is one operator for each collective. All have the same signature, so that there is one fake rule and one lowering:

    broadcast(Tensor[] written, Tensor[] read, str group, str how, SymInt[] ranks, bool wait) -> Tensor[]

``written`` are the tensors the collective would write to, ``read`` those it only reads. The operator changes neither:
it returns what ``written`` are going to hold, and :mod:`~paceline.tracing.collectives` copies that back. Since
it is functional, it needs no functionalization and can never be seen half done. With ``wait`` False the tensors are
still on their way, and the operator ``arrive`` gives what they hold in the end.

At run time, the operators call ``torch.distributed`` with exactly the arguments that the user wrote. Hence a wrong call
(sizes, ranks, a missing list) raises the same error as without the compiler.

[Note: collectives in the order of the program] Ranks must begin collectives of a group in one order. The order of a
graph is the order of the program, and three things keep it. The operators are impure
(``torch.fx.node.has_side_effect``), so no pass removes one, not even a barrier or a send. Inductor is told that they
are collectives (``_torch.lower_as_collectives``), and it chains all collectives of a graph, torch's own among them. And
passes that sort a graph anew sort it stably. Waiting is part of the chain: we wait with our operator ``arrive``, and
not with torch's ``wait_tensor``. Inductor is free to wait early with that one, and waiting for a send before the
receive that follows it has begun is a deadlock.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d
from torch.fx.node import has_side_effect

from paceline import _torch
from paceline.tracing import hooks
from paceline.tracing.operator_namespace import NAMESPACE, operators

NOBODY = -1
"""Stands in ``ranks`` for an argument that was not given."""

OUTSIDE = "no member"
"""Stands for the name of a group that this rank is not in. The rank is told so, and does nothing."""


class Call(NamedTuple):
    """What an operator was called with; ``written`` are fresh tensors that may be written to."""

    written: list[Tensor]
    read: list[Tensor]
    group: ProcessGroup
    how: str
    """A reduction, by torch's name for it in lower case; for a batch the kind of each operation."""
    ranks: list[int]

    def rank(self, index: int) -> int | None:
        return None if self.ranks[index] == NOBODY else self.ranks[index]


Starter = Callable[[Call, bool], Work | list[Work] | None]
"""Begins the collective; the second argument is ``async_op``."""

STARTERS: dict[str, Starter] = {}
"""The starter of each operator, by its name."""


def starter(function: Starter) -> Starter:
    STARTERS[function.__name__] = function
    return function


def reduction(name: str) -> dist.ReduceOp.RedOpType:
    return getattr(dist.ReduceOp, name.upper())


@starter
def all_gather(call: Call, later: bool) -> Work | None:
    return dist.all_gather(call.written, call.read[0], call.group, later)


@starter
def all_gather_into_tensor(call: Call, later: bool) -> Work | None:
    return dist.all_gather_into_tensor(call.written[0], call.read[0], call.group, later)


@starter
def all_gather_coalesced(call: Call, later: bool) -> Work | None:
    count = len(call.read)
    lists = [call.written[start : start + count] for start in range(0, len(call.written), count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the user is warned where the call was traced, if at all
        return c10d.all_gather_coalesced(lists, call.read, call.group, later)


@starter
def all_reduce(call: Call, later: bool) -> Work | None:
    return dist.all_reduce(call.written[0], reduction(call.how), call.group, later)


@starter
def all_reduce_coalesced(call: Call, later: bool) -> Work | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return c10d.all_reduce_coalesced(call.written, reduction(call.how), call.group, later)


@starter
def all_to_all(call: Call, later: bool) -> Work | None:
    return dist.all_to_all(call.written, call.read, call.group, later)


@starter
def all_to_all_single(call: Call, later: bool) -> Work | None:
    parts, half = call.ranks or None, len(call.ranks) // 2
    outputs, inputs = (parts[:half], parts[half:]) if parts else (None, None)
    return dist.all_to_all_single(call.written[0], call.read[0], outputs, inputs, call.group, later)


@starter
def reduce_scatter(call: Call, later: bool) -> Work | None:
    return dist.reduce_scatter(call.written[0], call.read, reduction(call.how), call.group, later)


@starter
def reduce_scatter_tensor(call: Call, later: bool) -> Work | None:
    return dist.reduce_scatter_tensor(call.written[0], call.read[0], reduction(call.how), call.group, later)


@starter
def broadcast(call: Call, later: bool) -> Work | None:
    return dist.broadcast(call.written[0], call.rank(0), call.group, later, call.rank(1))


@starter
def reduce(call: Call, later: bool) -> Work | None:
    return dist.reduce(call.written[0], call.rank(0), reduction(call.how), call.group, later, call.rank(1))


@starter
def gather(call: Call, later: bool) -> Work | None:
    return dist.gather(call.read[0], call.written or None, call.rank(0), call.group, later, call.rank(1))


@starter
def scatter(call: Call, later: bool) -> Work | None:
    return dist.scatter(call.written[0], call.read or None, call.rank(0), call.group, later, call.rank(1))


@starter
def barrier(call: Call, later: bool) -> Work | None:
    # This uses eager's defaults: a graph outlives both the device numbers and a time-out object.
    return dist.barrier(call.group, later)


@starter
def monitored_barrier(call: Call, later: bool) -> Work | None:
    c10d.monitored_barrier(call.group, wait_all_ranks=bool(call.ranks[0]))
    return None


@starter
def isend(call: Call, later: bool) -> Work | None:
    send = dist.isend if later else dist.send
    return send(call.read[0], call.rank(0), call.group, call.ranks[2], call.rank(1))


@starter
def irecv(call: Call, later: bool) -> Work | None:
    receive = dist.irecv if later else dist.recv
    received = receive(call.written[0], call.rank(0), call.group, call.ranks[2], call.rank(1))
    # The blocking form returns the sender.
    return received if isinstance(received, Work) else None


@starter
def recv_any(call: Call, later: bool) -> None:
    """``dist.recv`` without a source. The sender is known only now, and is the second thing that is written."""
    value, source = call.written
    source.fill_(dist.recv(value, None, call.group, call.ranks[0]))


@starter
def batch_isend_irecv(call: Call, later: bool) -> list[Work]:
    """``how`` has one letter for each operation, s or r; ``ranks`` has all peers (in the group), then all tags."""
    received, sent = iter(call.written), iter(call.read)
    count = len(call.how)
    operations = [
        dist.P2POp(
            dist.isend if kind == "s" else dist.irecv,
            next(sent if kind == "s" else received),
            group=call.group,
            tag=call.ranks[count + index],
            group_peer=call.ranks[index],
        )
        for index, kind in enumerate(call.how)
    ]
    return dist.batch_isend_irecv(operations)


POINT_TO_POINT = frozenset(function.__name__ for function in (isend, irecv, recv_any, batch_isend_irecv))
"""The operators that move messages between two ranks. Other ranks of the group take no part."""


def _run(
    name: str, written: list[Tensor], read: list[Tensor], group: str, how: str, ranks: list[int], wait: bool
) -> list[Tensor]:
    # A tensor may stay unwritten (in a reduction, on every rank but the root), and must then keep its contents.
    fresh = [_copied(tensor) for tensor in written]
    if group == OUTSIDE:
        _torch.warn_not_a_member(name)
        return _results(name, fresh, how)
    # Inductor may use an input's memory for something else as soon as the operator has returned.
    kept = [tensor.contiguous() if wait else _copied(tensor) for tensor in read]
    started = STARTERS[name](Call(fresh, kept, _torch.group_named(group), how, ranks), not wait)
    works = started if isinstance(started, list) else [started]
    results = _results(name, fresh, how)
    if wait:
        for work in works:
            if work is not None:
                work.wait()
        return results
    # A backend that runs a batch as one kernel gives one work for all of it.
    shared = len(works) != len(results)
    for index, result in enumerate(results):
        work = works[0 if shared else index]
        if work is not None:
            _torch.register_work(result, work)
    return results


def _describe(
    name: str, written: list[Tensor], read: list[Tensor], group: str, how: str, ranks: list[int], wait: bool
) -> list[Tensor]:
    """The results as the compiler sees them, without memory."""
    return _results(name, [_like(tensor) for tensor in written], how)


def _results(name: str, fresh: list[Tensor], how: str) -> list[Tensor]:
    """What an operator returns. One that writes nothing still needs a tensor that can be waited for."""
    if name != "batch_isend_irecv":
        return fresh or [torch.empty(1)]
    received = iter(fresh)
    return [next(received) if kind == "r" else torch.empty(1) for kind in how]


def _like(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


# --- what is not a collective ------------------------------------------------------------------------------


def _in_flight(pending: list[Tensor]) -> None:
    """Do nothing but use what torch's own functional collectives return, so that none is removed as unused.

    If nobody waits for a handle, the compiler would drop the collective on this rank, while the others wait for it.
    """


def _arrive(pending: list[Tensor]) -> list[Tensor]:
    """Wait for results of the operators above ([Note: collectives in the order of the program])."""
    return [_copied(_torch.wait_tensor(tensor)) for tensor in pending]


def _number(tensor: Tensor) -> int:
    """The number in a tensor; ``tensor.item()`` breaks the graph unless torch is configured otherwise."""
    return int(tensor.item())


def _describe_number(tensor: Tensor) -> Any:
    return torch.library.get_ctx().new_dynamic_size(min=0)


def _find_group(group: str) -> None:
    """Say what is wrong with a group that is not there any more."""
    _torch.group_named(group)


def _not_a_member(function: str) -> None:
    """Say what eager says to a rank that calls a collective of a group it is not in."""
    _torch.warn_not_a_member(function)


def _invalid_group() -> None:
    """Raise what eager raises where it does not take the marker of a group that this rank is not in."""
    raise ValueError("Invalid process group specified")


SCHEMA = "(Tensor[] written, Tensor[] read, str group, str how, SymInt[] ranks, bool wait) -> Tensor[]"

library = torch.library.Library(NAMESPACE, "FRAGMENT")
defined = False


def define() -> None:
    """Make the operators known to torch, once; called when the compiler is imported."""
    global defined
    if defined:
        return
    defined = True
    # It is imported late, since its rows are traced by way of the operators of this file.
    from paceline.tracing import placements

    for name in STARTERS:
        _define(name, functools.partial(_run, name), SCHEMA, functools.partial(_describe, name))
    _define("arrive", _arrive, "(Tensor[] pending) -> Tensor[]", lambda pending: [_like(tensor) for tensor in pending])
    _define("backward_hooks", hooks.call_hooks, hooks.SCHEMA, hooks.describe)
    _define("number", _number, "(Tensor tensor) -> SymInt", _describe_number)
    _define("check_same", placements.check_same, placements.CHECK_SCHEMA, lambda *args: None)
    _define("in_flight", _in_flight, "(Tensor[] pending) -> ()", lambda pending: None)
    _define("find_group", _find_group, "(str group) -> ()", lambda group: None)
    _define("invalid_group", _invalid_group, "() -> ()", lambda: None)
    _define("not_a_member", _not_a_member, "(str function) -> ()", lambda function: None)


def _define(name: str, function: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> None:
    # This is not torch.library.custom_op, whose calls cost twice as much: nothing here is differentiable or aliases.
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    _torch.keep_in_backward(f"{NAMESPACE}::{name}", library)
    packet = getattr(operators, name)
    has_side_effect(packet)
    has_side_effect(packet.default)


def lower() -> None:
    """Tell Inductor what the operators are; called when it has been imported."""
    collectives = [getattr(operators, name) for name in (*STARTERS, "arrive", "backward_hooks")]
    _torch.lower_as_collectives(collectives, dropped=[operators.in_flight])
