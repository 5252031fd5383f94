"""Which tests of torch's suite use DistributedDataParallel, found by reading its source."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
BASE_CLASS = "_DistTestBase"
DEFAULT_RANKS = 2
# Decorators whose integer argument says how many ranks (one GPU each) a test needs.
_RANK_DECORATORS = frozenset({"skip_if_lt_x_gpu", "require_world_size", "require_exact_world_size"})


@dataclass(frozen=True)
class Selected:
    """A test to run."""

    name: str
    ranks: int
    """How many ranks it needs: two, unless its decorators ask for more."""
    skips: Mapping[int, str] = field(default_factory=dict)
    """Exit codes with which the test itself says that it is not for this machine, and what each says."""


def select_tests(source: Path) -> list[Selected]:
    """The suite's tests that reach DistributedDataParallel, directly or through a helper, in source order."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    base = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == BASE_CLASS)
    methods = {node.name: node for node in base.body if isinstance(node, ast.FunctionDef)}
    callables = functions | methods
    reached = {name: _names_in(node) for name, node in callables.items()}

    def uses_ddp(name: str) -> bool:
        seen: set[str] = set()
        todo = [name]
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            if "DistributedDataParallel" in reached[current]:
                return True
            todo.extend(reached[current] & callables.keys())
        return False

    return [
        Selected(name, _ranks_needed(node))
        for name, node in methods.items()
        if name.startswith("test_") and uses_ddp(name)
    ]


def _names_in(node: ast.FunctionDef) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _ranks_needed(node: ast.FunctionDef) -> int:
    ranks = DEFAULT_RANKS
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=int(wanted))]):
                if name in _RANK_DECORATORS:
                    ranks = max(ranks, wanted)
    return ranks
