"""Which tests of torch's suite use DistributedDataParallel, found by reading its source."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

SUITE = "torch.testing._internal.distributed.distributed_test"
BASE_CLASS = "_DistTestBase"
DEFAULT_RANKS = 2
# How many ranks (one GPU each) a decorator says that a test needs; None if its argument says it.
_RANKS_OF_DECORATORS = dict.fromkeys(("skip_if_lt_x_gpu", "require_world_size", "require_exact_world_size"))


@dataclass(frozen=True)
class Selected:
    """A test to run."""

    name: str
    ranks: int
    """How many ranks it needs: two, unless its decorators ask for more."""
    skips: Mapping[int, str] = field(default_factory=dict)
    """Exit codes with which the test itself says that it is not for this machine, and what each says."""

    def is_asked_for(self, only: str | None) -> bool:
        """Whether the name contains or matches the pattern ``only``, if there is one."""
        return only is None or only in self.name or fnmatch.fnmatch(self.name, only)


def read_suite() -> tuple[dict[str, ast.FunctionDef], dict[str, ast.FunctionDef]]:
    """The functions of the suite's module and the methods of its class, by name."""
    spec = find_spec(SUITE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"this torch does not ship {SUITE}")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    base = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == BASE_CLASS)
    functions, methods = (
        {node.name: node for node in body if isinstance(node, ast.FunctionDef)} for body in (tree.body, base.body)
    )
    return functions, methods


def select_tests() -> list[Selected]:
    """The suite's tests that reach DistributedDataParallel, directly or through a helper, in source order."""
    functions, methods = read_suite()
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
        Selected(name, ranks_needed(node, _RANKS_OF_DECORATORS, least=DEFAULT_RANKS))
        for name, node in methods.items()
        if name.startswith("test_") and uses_ddp(name)
    ]


def _names_in(node: ast.FunctionDef) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def ranks_needed(node: ast.FunctionDef, of_decorators: Mapping[str, int | None], *, least: int) -> int:
    """How many ranks the decorators of a test ask for, and not less than ``least``."""
    found = [least]
    for decorator in node.decorator_list:
        match decorator:
            case ast.Name(id=name) if of_decorators.get(name) is not None:
                found.append(of_decorators[name])
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=int(wanted))]) if name in of_decorators:
                found.append(wanted)
    return max(found)
