"""What an expression is, where it runs, and when two answers are the same.

An expression is a function of ``x`` and of things it names as parameters: ``def f(x, group, mesh)`` is given the
attributes of that name of a :class:`Place`. It is run as it is, for the eager answer, then compiled. A graph computes
something with a tensor, so a function that does not take ``x`` is compiled in one that also returns ``x + 1``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def join_fake_group(rank: int, size: int) -> None:
    """Make the default group one that delivers nothing, as ``rank`` of ``size``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


class Place:
    """One rank's groups, meshes and inputs; made once a run, on every rank alike."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.group = dist.group.WORLD
        # The same ranks as `group`, and another group.
        self.other = dist.new_group(list(range(size)), group_desc="the other group")
        # Each rank alone, in a group of its own.
        self.solo = [dist.new_group([r], group_desc="alone") for r in range(size)][rank]
        # Rank 0's group: all other ranks hold torch's marker for "not a member".
        self.first = dist.new_group([0])
        # Ranks in reverse: a rank's number in the group is not its global one.
        self.reverse = dist.new_group(list(reversed(range(size))), sort_ranks=False)
        self.mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        # Two dimensions; both longer than 1 on 4 ranks.
        self.grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        self.grid_again = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        # Flattening makes a group the first time; inside a graph it is found again.
        self.grid._flatten()
        self.grid._flatten("all")
        self.unnamed = init_device_mesh("cpu", (size // 2, 2))
        self.groups = [self.group, self.other, self.solo]
        self.table_of_groups = {self.group: 1, self.other: 2}
        self.max_op = dist.ReduceOp.MAX
        self.sharded = Shard(1)
        self.placements = [Shard(1), Replicate(), Partial("avg")]
        self.pair_of_placements = (Replicate(), Shard(0))
        self.solo_of_first = None if self.first == dist.GroupMember.NON_GROUP_MEMBER else self.first
        self.width = 2 * size
        self.y = torch.full((self.width,), 0.5)
        self.ring = [(r + 1) % size for r in range(size)]
        self.next = (rank + 1) % size
        self.previous = (rank - 1) % size

    def x(self, rank: int | None = None) -> torch.Tensor:
        """The input: other numbers on every rank, as long as the group is large twice over."""
        rank = self.rank if rank is None else rank
        return torch.arange(2 * self.size, dtype=torch.float32) + 1 + 10 * rank

    def all_x(self) -> list[torch.Tensor]:
        return [self.x(rank) for rank in range(self.size)]


Answer = Callable[[Place], Any]


@dataclasses.dataclass(frozen=True)
class Expression:
    """A row of the list."""

    name: str
    """As the table in the docs shows it."""
    point: int
    """The point of the issue it belongs to: 1 groups, 2 meshes, 3 placements, 4 collectives, 5 hooks."""
    function: Callable[..., Any]
    """What is compiled; or, with ``builds``, what makes it."""
    ranks: int = 2
    """How many ranks it needs for a meaningful answer."""
    answer: Answer | None = None
    """What eager returns, worked out by hand; None: what it does return is believed."""
    builds: bool = False
    """``function`` returns ``(what to compile, look)``; ``look()`` returns what the hooks have seen."""
    grad: bool = False
    """``x`` requires grad; the result is run backward and gradients are compared."""
    inductor: bool = False
    """Compiled by inductor too."""
    gloo: bool = True
    """Whether gloo can do it, in eager or compiled."""
    fake: bool = True
    """Whether the fake backend, on 8 ranks, can do it."""
    eager_on_gloo: bool = True
    """Whether gloo can do it in eager; if not, what is compiled is compared with ``answer`` alone."""
    deterministic_input: bool = True
    """Whether ``x`` after the call is defined on every rank."""

    @property
    def id(self) -> str:
        return f"{self.point}-{self.name}"

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments that no place has."""

    def run(self, place: Place, compiler: Callable[[Any], Any]) -> Any:
        """All that can be observed: the result, ``x`` afterwards, gradients, what hooks saw."""
        x = place.x().requires_grad_(self.grad)
        names = list(inspect.signature(self.function).parameters)
        arguments = [self.given[n] if n in self.given else getattr(place, n) for n in names if n != "x"]
        torch.manual_seed(0)
        function, look = self.function, None
        if self.builds:
            function, look = self.function(*arguments)
            arguments = []
        elif "x" not in names:
            function = beside_x(self.function)
        try:
            result = compiler(function)(x, *arguments)
            seen: dict[str, Any] = {"result": result}
            if self.grad:
                differentiable(result).backward()
                seen["x.grad"] = x.grad
                if isinstance(function, nn.Module):
                    seen["grads"] = {name: param.grad for name, param in function.named_parameters()}
        finally:
            looked = look() if look is not None else None
        if self.deterministic_input:
            seen["x"] = x.detach()
        return {**seen, "look": looked}


def beside_x(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *arguments: (x + 1, function(*arguments))


def differentiable(result: Any) -> torch.Tensor:
    """A scalar that depends on every part of ``result``, each part with a weight of its own."""
    parts = [part for part in leaves(result) if isinstance(part, torch.Tensor) and part.requires_grad]
    assert parts, f"nothing to differentiate in {result!r}"
    total = torch.zeros(())
    for number, part in enumerate(parts, 1):
        part = part.full_tensor() if isinstance(part, DTensor) else part
        weights = torch.arange(1, part.numel() + 1, dtype=part.dtype).view_as(part)
        total = total + number * (part * weights).sum()
    return total


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def difference(got: Any, want: Any, where: str = "the answer", *, values: bool = True) -> str | None:
    """What is not the same in ``got``, or None. Types count: a Size is not a tuple.

    ``values=False`` leaves out the numbers in tensors: a fake group delivers none.
    """
    got, want = _settled(got), _settled(want)
    if type(got) is not type(want):
        return f"{where} is a {type(got).__name__} ({got!r}), not a {type(want).__name__} ({want!r})"
    if isinstance(want, DTensor):
        for part, (a, b) in {
            "placements": (got.placements, want.placements),
            "mesh": (got.device_mesh, want.device_mesh),
            "shape": (got.shape, want.shape),
            "local tensor": (got.to_local().detach(), want.to_local().detach()),
        }.items():
            if found := difference(a, b, f"{part} of {where}", values=values):
                return found
        return None
    if isinstance(want, torch.Tensor):
        if got.dtype != want.dtype or got.shape != want.shape or (values and not _are_the_same_numbers(got, want)):
            return f"{where} is {got!r}, not {want!r}"
        if got.requires_grad != want.requires_grad:
            return f"{where}: requires_grad is {got.requires_grad}"
        return None
    if isinstance(want, Mapping):
        if list(got) != list(want):
            return f"{where} has keys {list(got)}, not {list(want)}"
        pairs = [(f"{where}[{key!r}]", got[key], want[key]) for key in want]
    elif isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"{where} is {got!r}, not {want!r}"
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(got, want, strict=True))]
    elif isinstance(want, (dist.ProcessGroup, dist.Work)):
        # Groups are compared by who they are; of a handle it is enough that it is one.
        return None if isinstance(want, dist.Work) or got is want else f"{where} is {got!r}, not {want!r}"
    elif isinstance(want, float):
        return difference(torch.tensor(got), torch.tensor(want), where)
    else:
        return None if got == want else f"{where} is {got!r}, not {want!r}"
    for place, a, b in pairs:
        if found := difference(a, b, place, values=values):
            return found
    return None


def _are_the_same_numbers(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether they are equal. The last bit of a matrix product may depend on where its operands lie in memory."""
    if want.is_floating_point() or want.is_complex():
        return torch.allclose(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
    return torch.equal(got, want)


def _settled(value: Any) -> Any:
    # Eager hands out collectives' results that wait when they are used; the wait is no part of the answer.
    return value.wait() if isinstance(value, AsyncCollectiveTensor) else value


class Rows:
    """The rows of one point: functions that it decorates, and those of one expression that it is given."""

    def __init__(self, point: int, **defaults: Any) -> None:
        self.point = point
        self.defaults = defaults
        self.rows: list[Expression] = []

    def add(self, name: str, answer: Answer | None, function: Callable[..., Any], **more: Any) -> None:
        self.rows.append(Expression(name, self.point, function, answer=answer, **{**self.defaults, **more}))

    def __call__(self, name: str, answer: Answer | None = None, **more: Any) -> Callable[[Callable[..., Any]], None]:
        return lambda function: self.add(name, answer, function, **more)
