"""``python -m tests.tracing.graphs [--paceline]``: the graphs of all expressions, on a fake group of 8.

A line of JSON an expression, as soon as it is known. With and without Paceline, each in a process of its own, for the
test that torch's own expressions keep their graphs, and for the table in the docs: a row that torch refuses has its
error instead of graphs.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.tracing.expressions import EXPRESSIONS
from tests.tracing.row import Expression, Place, difference, join_fake_group
from tests.tracing.runner import ALLOWED_WARNINGS

FAKE_RANKS = 8
ROOT = Path(__file__).resolve().parents[2]
# Holds the whole output, so that the process does not stop where nobody reads yet.
PIPE_BYTES = 2**20


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


def recorder() -> tuple[list[str], Callable[..., Any]]:
    """A backend that runs graphs as they are, and the list in which it draws each."""
    graphs: list[str] = []

    def record(module: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        graphs.append(drawing(module.graph))
        return module.forward

    return graphs, record


def graphs_of(expression: Expression, place: Place) -> dict[str, Any]:
    """``{"graphs": [drawing, ...], "wrong": what differs from eager or None}``, or ``{"error": what was raised}``."""
    graphs, record = recorder()
    want = expression.run(place, lambda function: function)
    torch._dynamo.reset()
    try:
        got = expression.run(place, lambda function: torch.compile(function, fullgraph=True, backend=record))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"graphs": graphs, "wrong": difference(got, want, values=False)}


def on_fake_group() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every expression that a fake group can run, as rank 1 of many."""
    join_fake_group(1, FAKE_RANKS)
    place = Place(1, FAKE_RANKS)
    for expression in EXPRESSIONS:
        if expression.fake:
            yield expression.id, graphs_of(expression, place)
    dist.destroy_process_group()


NOTHING = "a program that uses nothing of it"


def nothing_distributed() -> dict[str, Any]:
    """Every graph of a program of modules, shapes, modes, breaks and forward hooks, each time it compiled one."""
    graphs, record = recorder()
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.5)), nn.ReLU())
    compiled = torch.compile(model, backend=record)
    for length in (2, 3, 5):
        compiled(torch.ones(length, 4)).sum().backward()
    model.eval()
    compiled(torch.ones(2, 4))
    with torch.no_grad():
        compiled(torch.ones(2, 4))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    compiled(torch.ones(2, 4))
    model[2] = nn.Tanh()
    compiled(torch.ones(2, 4))

    @torch.compile(backend=record)
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    for x in (torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.int64)):
        broken(x)
    return {"graphs": graphs}


class Outcomes:
    """Of the expressions on a fake group, by id, from a process that is still at work on them."""

    def __init__(self, *arguments: str) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tracing.graphs", *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            pipesize=PIPE_BYTES,
        )

    def __getitem__(self, row: str) -> dict[str, Any]:
        while row not in self._known and self._read():
            pass
        return self._known[row]

    def all(self) -> dict[str, dict[str, Any]]:
        while self._read():
            pass
        return self._known

    def _read(self) -> bool:
        """Wait for one more; False if that was all."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            name, outcome = json.loads(line)
            self._known[name] = outcome
        elif self._process.wait() != 0:
            self._errors.seek(0)
            raise RuntimeError(f"the process that makes graphs has failed:\n{self._errors.read()}")
        return bool(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def main(arguments: list[str]) -> None:
    if "--paceline" in arguments:
        import paceline  # noqa: F401

        warnings.simplefilter("error")
        for message, category in ALLOWED_WARNINGS:
            warnings.filterwarnings("ignore", message, category)
    else:
        assert "paceline" not in sys.modules
        warnings.simplefilter("ignore")
    # What torch prints is not part of the answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for answer in itertools.chain([(NOTHING, nothing_distributed())], on_fake_group()):
        json.dump(answer, answers)
        answers.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
