"""Where a graph is cut into parts, and why there.

[Note: cuts]
The operators of a graph stand in the order of forward, and backward goes through them from the end. A part is a run of
operators. Its backward is one node to autograd, so its gradients come when all of it has ended. Therefore a graph is
cut in front of the operator at which backward completes the last gradient of a bucket. Operators at the front of the
graph that use no parameter belong to the first part that does.

A cut moves towards the front of the graph in three cases: if the part behind it would have no output, since nothing
would run it; out of a region with a state that must not be interrupted, such as ``vmap``; and to where no value crosses
that must not ([Note: memory across cuts] in forbidden_cuts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from paceline import _torch
from paceline.compiler.split.forbidden_cuts import obstacles
from paceline.gradients.plan import MB

NO_OUTPUT = "the part would have no output"
ONE_STATE = "a state (vmap, inference mode, ...) must not be interrupted"
_SHOWN = 3


@dataclass
class GraphBucket:
    """Parameters of a graph whose gradients travel together."""

    size: int = 0
    """In bytes."""
    params: list[str] = field(default_factory=list)
    param_ids: list[int] = field(default_factory=list)

    def add(self, name: str, param: Tensor) -> None:
        if id(param) not in self.param_ids:
            self.size += param.numel() * param.element_size()
            self.params.append(name)
            self.param_ids.append(id(param))

    def take_over(self, other: GraphBucket) -> None:
        self.size += other.size
        self.params += other.params
        self.param_ids += other.param_ids


@dataclass(frozen=True)
class Cut:
    """A place where a graph is cut. ``str()`` of it says why."""

    position: int
    """The number of the first operator behind it."""
    operator: str
    """Its name in the graph."""
    size_bytes: int
    params: tuple[str, ...]
    """The parameters whose gradients travel once backward has got here."""
    moved_by: int = 0
    """How many operators the cut had to move towards the front, from where backward completes the bucket."""
    moved_since: str = ""
    """Why the cut had to move."""

    def __str__(self) -> str:
        more = len(self.params) - _SHOWN
        names = ", ".join(self.params[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        text = (
            f"cut before {self.operator}: there backward completes a bucket of {self.size_bytes / MB:.2f} MB ({names})"
        )
        if self.moved_by:
            text += f"; {self.moved_by} operator(s) earlier than needed, since {self.moved_since}"
        return text


class Body:
    """The operators of a graph in order, and what has to be known of them to cut it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        self.position = {node: n for n, node in enumerate(self.nodes)}
        end = len(self.nodes)
        # Contexts are entered anew in each part, so a context that ends in another part is not a value that crosses.
        self.last_use = [
            -1
            if node.target is _torch.enter_autocast
            else max((self.position.get(user, end) for user in node.users), default=-1)
            for node in self.nodes
        ]
        depth, self._is_inside = 0, []
        for node in self.nodes:
            step = _torch.region_step(node)
            depth += min(step, 0)
            self._is_inside.append(depth > 0)
            depth += max(step, 0)
        self._obstacles = obstacles(graph, self.position)

    def obstacle(self, start: int, end: int) -> str:
        """Why there can be no part from ``start`` to ``end``; "" if there can."""
        if self._is_inside[start]:
            return ONE_STATE
        if start and self._obstacles[start]:
            return self._obstacles[start]
        return "" if max(self.last_use[start:end]) >= end else NO_OUTPUT


Params = Mapping[fx.Node, Sequence[tuple[str, Tensor]]]
"""The parameters that each operator of a graph uses, with their names."""


def cut_by_size(
    body: Body, params: Params, *, first_cap_bytes: int, cap_bytes: int
) -> tuple[list[GraphBucket], list[Cut]]:
    """Fill buckets from the end of the graph, and cut where one is full. Buckets and cuts are in the order of forward.

    A parameter that several parts use is in the bucket of each of them, and counts once in each.
    """
    buckets: list[GraphBucket] = []
    cuts: list[Cut] = []
    bucket, end, moved_by, since = GraphBucket(), len(body.nodes), 0, ""
    for position in reversed(range(len(body.nodes))):
        for name, param in params.get(body.nodes[position], ()):
            bucket.add(name, param)
        if bucket.size < (cap_bytes if buckets else first_cap_bytes):
            continue
        obstacle = body.obstacle(position, end)
        if obstacle:
            moved_by, since = moved_by + 1, obstacle
            continue
        buckets.append(bucket)
        cuts.append(_cut(body, position, bucket, moved_by, since))
        bucket, end, moved_by, since = GraphBucket(), position, 0, ""
    if not buckets or (bucket.size and not body.obstacle(0, end)):
        buckets.append(bucket)
    else:
        cuts.pop()
        buckets[-1].take_over(bucket)
    return buckets[::-1], cuts[::-1]


def first_uses(body: Body, params: Params) -> dict[int, int]:
    """For each parameter, by its id, the number of the operator at which backward completes its gradient."""
    found: dict[int, int] = {}
    for position, node in enumerate(body.nodes):
        for _, param in params.get(node, ()):
            found.setdefault(id(param), position)
    return found


def cut_by_plan(
    body: Body, first_use: dict[int, int], plans: Iterable[Sequence[GraphBucket]]
) -> tuple[list[GraphBucket], list[Cut]]:
    """Cut where backward completes each bucket of ``plans``, whose buckets are in the order in which they leave.

    A bucket leaves after those before it, so a bucket that is complete before them has no cut of its own.
    """
    complete_at: dict[int, GraphBucket] = {}
    for plan in plans:
        front = len(body.nodes)
        for bucket in plan:
            uses = [first_use[key] for key in bucket.param_ids if key in first_use]
            if uses:
                front = min(front, *uses)
                complete_at.setdefault(front, GraphBucket()).take_over(bucket)
    buckets: list[GraphBucket] = []
    cuts: list[Cut] = []
    end = len(body.nodes)
    for front, bucket in sorted(complete_at.items(), reverse=True):
        position, since = min(front, end - 1), ""
        while position > 0 and (obstacle := body.obstacle(position, end)):
            position, since = position - 1, obstacle
        if buckets and front >= end:
            # The cut of the bucket before this one had to move past the point at which this one is complete.
            buckets[-1].take_over(bucket)
            continue
        buckets.append(bucket)
        cuts.append(_cut(body, position, bucket, front - position, since))
        end = position
    if buckets:
        # Nothing in front of the last cut has a parameter.
        cuts.pop()
        if cuts and body.obstacle(0, cuts[-1].position):
            cuts.pop()
            buckets[-2].take_over(buckets.pop())
    return buckets[::-1], cuts[::-1]


def _cut(body: Body, position: int, bucket: GraphBucket, moved_by: int, since: str) -> Cut:
    return Cut(position, body.nodes[position].name, bucket.size, tuple(bucket.params), moved_by, since)
