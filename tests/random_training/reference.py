"""What a program should give: both ranks in one process, as threads, without a wrapper, averaged by hand.

A rank that synchronises waits for the other one, and the n-th synchronised backward of one rank meets the n-th of the
other, as collectives do. Where the two cannot belong together there is no right result, and ``MismatchError`` says why.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .program import RANKS, Program
from .replica import Replica, Snapshot, Trained, quiet

# Nothing takes so long; it keeps a mistake in this file from hanging.
_PATIENCE_S = 60.0


class MismatchError(Exception):
    """Two backwards met that do not belong together. ``kind`` is a word of ``expectations.ALLOWED``."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True)
class Result:
    """What one rank should have."""

    snapshots: list[Snapshot]
    # Why there is nothing right behind the last snapshot; "" if the program ended.
    mismatch: str = ""
    # An exception that the program raises without any wrapper.
    error: BaseException | None = None
    # Whether the program itself let the weights of the ranks part: it is the caller's doing, and no wrapper's.
    parted: bool = False


def expected(program: Program) -> list[Result]:
    """What each rank should have."""
    meeting = _Meeting()
    ranks = [_Reference(program, rank, meeting) for rank in RANKS]
    results: dict[int, Result] = {}

    def run(replica: _Reference) -> None:
        mismatch, error = "", None
        try:
            replica.run()
        except MismatchError as mismatched:
            mismatch = mismatched.kind
        except BaseException as raised:
            error = raised
        finally:
            meeting.leave()
        results[replica.rank] = Result(replica.snapshots, mismatch, error, meeting.parted)

    threads = [threading.Thread(target=run, args=(replica,)) for replica in ranks]
    with quiet():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [results[rank] for rank in RANKS]


@dataclass(frozen=True)
class _Arrival:
    """What a rank brings to a synchronised backward of one wrapper."""

    net: int
    through_wrapper: bool
    signature: tuple[Any, ...]
    grads: list[Tensor | None]
    # Whether a backward since the last synchronised one reached it. What none reached on any rank stays as it was.
    used: list[bool]
    # The values of parameters that the ranks have not met before.
    new_values: list[Tensor]
    weight: float | None
    values: list[Tensor]


_Averages = tuple[list[bool], list[Tensor | None]]
"""Which parameters some rank used, and the averaged gradients."""


class _Meeting:
    """Where the two ranks wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[int, _Arrival] = {}
        self._results: dict[int, _Averages | MismatchError] = {}
        self._left = 0
        self.parted = False

    def leave(self) -> None:
        with self._changed:
            self._left += 1
            self._changed.notify_all()

    def average(self, rank: int, arrival: _Arrival) -> _Averages:
        """The averages, when the other rank has come."""
        with self._changed:
            self._arrived[rank] = arrival
            if len(self._arrived) == len(RANKS):
                arrivals = [self._arrived[each] for each in RANKS]
                outcome = _averaged(arrivals)
                if not isinstance(outcome, MismatchError):
                    self.parted |= not all(map(torch.equal, *(each.values for each in arrivals)))
                self._arrived.clear()
                self._results = dict.fromkeys(RANKS, outcome)
                self._changed.notify_all()
            come = self._changed.wait_for(lambda: rank in self._results or self._left, timeout=_PATIENCE_S)
            assert come, "the reference hangs"
            if rank not in self._results:
                raise MismatchError("counts")
            result = self._results.pop(rank)
        if isinstance(result, MismatchError):
            raise MismatchError(result.kind)
        return result


def _averaged(arrivals: list[_Arrival]) -> _Averages | MismatchError:
    first, second = arrivals
    if first.net != second.net:
        return MismatchError("wrappers")
    if first.through_wrapper != second.through_wrapper:
        return MismatchError("paths")
    if first.signature != second.signature or len(first.new_values) != len(second.new_values):
        return MismatchError("parameters")
    if not all(torch.equal(mine, theirs) for mine, theirs in zip(first.new_values, second.new_values, strict=True)):
        return MismatchError("values")
    if (first.weight is None) != (second.weight is None):
        return MismatchError("weights")
    total = sum(1.0 if arrival.weight is None else arrival.weight for arrival in arrivals)
    means: list[Tensor | None] = []
    for each in zip(first.grads, second.grads, strict=True):
        present = [grad for grad in each if grad is not None]
        means.append(sum(present[1:], present[0]) / total if present and total else _zeros(present))
    return [any(each) for each in zip(first.used, second.used, strict=True)], means


def _zeros(present: list[Tensor]) -> Tensor | None:
    return torch.zeros_like(present[0]) if present else None


@dataclass
class _Weights:
    """The weights of the backwards since the last synchronised one."""

    now: float | None = None
    total: float = 0.0
    syncs: bool = True


class _Bare(nn.Module):
    """Stands where the wrapper stands, and only notes what is asked of it."""

    def __init__(self, module: nn.Module, called: Callable[[_Bare, Tensor], None]) -> None:
        super().__init__()
        self.module = module
        self.notes = _Weights()
        self.called = called

    def forward(self, *args: Any) -> Tensor:
        output = self.module(*args)
        if not output.requires_grad and any(param.requires_grad for param in self.module.parameters()):
            # A rank that uses no trainable parameter takes part in the backward all the same, with nothing to add.
            output = output + torch.zeros((), dtype=output.dtype, requires_grad=True)
        self.called(self, output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.notes.syncs = False
        try:
            yield
        finally:
            self.notes.syncs = True

    @contextlib.contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        self.notes.now = weight
        try:
            yield
        finally:
            self.notes.now = None


class _Reference(Replica):
    def __init__(self, program: Program, rank: int, meeting: _Meeting) -> None:
        super().__init__(program, rank, values_of=0)
        self._meeting = meeting
        self._forwarded: list[_Bare] = []
        # They are in the order of use: of several wrappers of one parameter, the one used last reduces it.
        self._in_use: list[_Bare] = []
        # They are in the order of registration, which is the order in which they are called.
        self._post_hooks: list[tuple[Tensor, nets.PostHook]] = []
        # The key is the tensor's identity. The tensor is kept, so that no other one gets its identity.
        self._used: dict[int, Tensor] = {}

    def wrap(self, module: nn.Module) -> _Bare:
        bare = _Bare(module, self._called)
        self._in_use.append(bare)
        return bare

    def copy_wrapper(self, wrapper: _Bare) -> _Bare:
        return self.wrap(copy.deepcopy(wrapper.module))

    def compiled(self, wrapper: Any, backend: str) -> Any:
        return wrapper

    def hook_after_accumulation(self, param: Tensor, hook: nets.PostHook) -> None:
        self._post_hooks.append((param, hook))

    def swap(self, weight: Tensor, new: nn.Parameter) -> None:
        super().swap(weight, new)
        # torch takes no notice of hooks that are added to those from before the swap.
        weight._post_accumulate_grad_hooks = OrderedDict()

    def forgets(self) -> None:
        self._forwarded = []

    def _called(self, bare: _Bare, output: Tensor) -> None:
        self._in_use.remove(bare)
        self._in_use.append(bare)
        if output.requires_grad:
            self._forwarded.append(bare)

    def _owner(self, param: Tensor) -> int:
        alive = [net.wrapper for net in self.nets]
        for bare in reversed(self._in_use):
            if bare in alive and any(param is each for each in bare.module.parameters()):
                return alive.index(bare)
        raise AssertionError("no wrapper has this parameter")

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        trainable = {id(param): param for net in self.nets for param in net.module.parameters() if param.requires_grad}
        reached: dict[int, Tensor] = {}
        handles = [
            param.register_post_accumulate_grad_hook(lambda each: reached.update({id(each): each}))
            for param in trainable.values()
        ]
        try:
            loss.backward(retain_graph=retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        self._used |= reached
        owners = {self._owner(param) for param in reached.values()}
        for index, net in enumerate(self.nets):
            if net.wrapper in self._forwarded and any(self._owner(each) == index for each in _trainable(net)):
                owners.add(index)
        # These have a final gradient, and their hooks are called: all ranks call them if one rank has used them.
        final = set(reached)
        for index in sorted(owners):
            final |= self._ended(index)
        for param, hook in self._post_hooks:
            if id(param) in final:
                hook(param)

    def _ended(self, index: int) -> set[int]:
        """Average what one wrapper averages; return the ids of the parameters that some rank has used."""
        net = self.nets[index]
        notes = net.wrapper.notes
        if notes.now is not None:
            notes.total += notes.now
        if not notes.syncs:
            return set()
        owned = [param for param in _trainable(net) if self._owner(param) == index]
        grads = [None if param.grad is None else param.grad.clone() for param in owned]
        if notes.now is not None:
            grads = [None if grad is None else grad * notes.now for grad in grads]
        met = {id(param) for param in net.met}
        arrival = _Arrival(
            net=index,
            through_wrapper=net.wrapper in self._forwarded,
            signature=tuple(
                (name, tuple(param.shape), param.dtype, param.requires_grad)
                for name, param in net.module.named_parameters()
            ),
            grads=grads,
            used=[id(param) in self._used for param in owned],
            new_values=[param.detach().clone() for param in net.module.parameters() if id(param) not in met],
            weight=None if notes.now is None else notes.total,
            values=[param.detach().clone() for param in net.module.parameters()],
        )
        used_anywhere, means = self._meeting.average(self.rank, arrival)
        notes.total = 0.0
        net.met = list(net.module.parameters())
        for param, used, mean in zip(owned, used_anywhere, means, strict=True):
            self._used.pop(id(param), None)
            if used:
                param.grad = None if mean is None else mean.clone()
        return {id(param) for param, used in zip(owned, used_anywhere, strict=True) if used}


def _trainable(net: Trained) -> list[nn.Parameter]:
    return [param for param in net.module.parameters() if param.requires_grad]
