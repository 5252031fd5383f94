"""``python -m tests.tracing.graphs [--paceline]``: the graphs of all expressions, as JSON, on a fake group of 8.

With and without Paceline, each in a process of its own, for the test that torch's own expressions keep their graphs,
and for the table in the docs: a row that torch refuses has its error instead of graphs.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.tracing.expressions import EXPRESSIONS
from tests.tracing.row import Expression, Place, difference

FAKE_RANKS = 8


def drawing(graph: torch.fx.Graph) -> str:
    """The graph without the names of its values, which follow those of somebody's variables."""
    numbers: dict[str, int] = {}
    lines = []
    for node in graph.nodes:
        numbers[node.name] = len(numbers)
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n.name]}")
        target = node.target if isinstance(node.target, str) else torch.typename(node.target)
        lines.append(f"%{numbers[node.name]} = {node.op} {'' if node.op == 'placeholder' else target} {arguments}")
    return "\n".join(lines)


def graphs_of(expression: Expression, place: Place) -> dict[str, Any]:
    """``{"graphs": [drawing, ...], "wrong": what differs from eager or None}``, or ``{"error": what was raised}``."""
    graphs: list[str] = []

    def record(module: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        graphs.append(drawing(module.graph))
        return module.forward

    want = expression.run(place, lambda function: function)
    torch._dynamo.reset()
    try:
        got = expression.run(place, lambda function: torch.compile(function, fullgraph=True, backend=record))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"graphs": graphs, "wrong": difference(got, want, values=False)}


def on_fake_group(_rank: int = 0, _size: int = 1) -> dict[str, dict[str, Any]]:
    """Every expression that a fake group can run, as rank 1 of many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=FAKE_RANKS)
    place = Place(1, FAKE_RANKS)
    try:
        return {e.id: graphs_of(e, place) for e in EXPRESSIONS if e.fake}
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    if "--paceline" in arguments:
        import paceline  # noqa: F401
    else:
        assert "paceline" not in sys.modules
    warnings.simplefilter("ignore")
    json.dump(on_fake_group(), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
