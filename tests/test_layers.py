"""What may import and name what: checked in the source, so that it holds for code no test runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline

SRC = Path(paceline.__file__).parent
FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))

MAY_READ_ENVIRONMENT = ("settings.py", "run/", "testing/")


def _module_name(file: str) -> str:
    parts = ["paceline", *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(file) for file in FILES}


@cache
def _tree(file: str) -> ast.Module:
    return ast.parse((SRC / file).read_text(encoding="utf-8"))


# -- imports point one way -----------------------------------------------------------------------------


def _is_for_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _import_nodes(node: ast.AST, *, everywhere: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run when the file is imported; ``everywhere``: all others, too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif everywhere or not (
            _is_for_type_checking(child) or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        ):
            yield from _import_nodes(child, everywhere=everywhere)


def _ours(tree: ast.AST, modules: Set[str], *, everywhere: bool) -> set[str]:
    """The paceline modules that a file imports, `from paceline.gradients import plan` included."""
    found = set()
    for node in _import_nodes(tree, everywhere=everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
            continue
        assert node.level == 0, f"line {node.lineno}: imports are absolute here"
        source = node.module or ""
        for alias in node.names:
            full = f"{source}.{alias.name}"
            # `from paceline.run.init import init` names a function, `from paceline.run import init` a module.
            if full in modules:
                found.add(full)
            elif source in modules:
                found.add(source)
    return found


@cache
def _imports(*, everywhere: bool) -> dict[str, set[str]]:
    return {_module_name(file): _ours(_tree(file), MODULES, everywhere=everywhere) for file in FILES}


def _reached_from(name: str, graph: Mapping[str, Set[str]]) -> set[str]:
    reached: set[str] = set()
    stack = [name]
    while stack:
        for imported in graph[stack.pop()] - reached:
            reached.add(imported)
            stack.append(imported)
    return reached


def _circles(graph: Mapping[str, Set[str]]) -> list[str]:
    return sorted(name for name in graph if name in _reached_from(name, graph))


def _rooms(package: str, imports: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """What each folder or file of ``package`` uses of the others, as the tree and the import statements have it.

    Whatever lies in a folder counts as that folder. The package's own ``__init__`` stands above all of them: it may
    use any, and none may use it.
    """

    def room(module: str) -> str:
        return ".".join(module.split(".")[: package.count(".") + 2])

    inside = [name for name in imports if name == package or name.startswith(f"{package}.")]
    graph: dict[str, set[str]] = {room(name): set() for name in inside}
    for name in inside:
        graph[room(name)] |= {room(other) for other in imports[name] if other in inside} - {room(name)}
    return graph


PACKAGES = sorted({name.rpartition(".")[0] for name in MODULES} - {""})


def test_the_files_were_read() -> None:
    # The checks below mean nothing on an empty graph.
    rooms = _rooms("paceline", _imports(everywhere=True))
    assert {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()} <= {
        name.removeprefix("paceline.") for name in rooms
    }
    assert "paceline.gradients" in _reached_from("paceline.ddp", rooms)


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_one_way(package: str) -> None:
    # Type checkers' imports and those inside functions count: what is needed is needed, whenever it is imported.
    graph = _rooms(package, _imports(everywhere=True))
    files = {name for name in graph if name in MODULES and name not in PACKAGES}
    folders = {name: _reached_from(name, graph) for name in graph if name not in files}
    assert [name for name, reached in folders.items() if name in reached] == []


def test_the_list_of_folders_is_in_the_order_of_their_use() -> None:
    listed = re.findall(r"^- (``.*``):", paceline.__doc__ or "", re.MULTILINE)
    order = [f"paceline.{name}" for line in listed for name in re.findall(r"``(\w+)``", line)]
    graph = _rooms("paceline", _imports(everywhere=True))
    assert sorted(order) == sorted(graph.keys() - {"paceline", "paceline.__main__"})
    above = {
        (name, used) for name in order for used in graph[name] & set(order) if order.index(used) < order.index(name)
    }
    # All that every folder may use stands in one line, in no order.
    base = {f"paceline.{name}" for name in re.findall(r"``(\w+)``", listed[-2])}
    assert {(name, used) for name, used in above if not {name, used} <= base} == set()


def test_a_way_back_would_be_found() -> None:
    good = {"a": set(), "a.low.x": set(), "a.high.y": {"a.low.x"}}
    assert _circles(_rooms("a", good)) == []
    back = {**good, "a.low.z": {"a.high.y"}}
    assert _circles(_rooms("a", back)) == ["a.high", "a.low"]
    code = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.high import y\ndef f():\n    import a.low.x"
    assert _ours(ast.parse(code), back.keys(), everywhere=True) == {"a.high.y", "a.low.x"}


def test_no_import_goes_in_a_circle() -> None:
    assert _circles(_imports(everywhere=False)) == []


def test_the_plan_is_pure() -> None:
    # Two files: the plan, and the table that `print` shows of it.
    imports = _imports(everywhere=True)
    assert imports["paceline.gradients.plan"] == {"paceline.gradients.plan_table"}
    assert imports["paceline.gradients.plan_table"] == {"paceline.gradients.plan"}
    for file in ("gradients/plan.py", "gradients/plan_table.py"):
        assert not any("torch" in name for name in _imported_names(_tree(file)))


def test_only_tests_import_the_testing_tools() -> None:
    for name, imported in _imports(everywhere=True).items():
        if not name.startswith("paceline.testing"):
            assert not [other for other in imported if other.startswith("paceline.testing")], name


def test_private_torch_names_come_from_one_package_that_needs_no_other() -> None:
    names = {name for name in MODULES if name.partition("paceline._torch")[1]}
    assert names
    for name in names:
        assert names >= _imports(everywhere=True)[name]


# -- private names of torch ----------------------------------------------------------------------------


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _imported_names(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _torch_bindings(tree: ast.AST) -> dict[str, str]:
    """Names of a file that stand for something of torch: {"dist": "torch.distributed", ...}."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def _dotted(node: ast.AST) -> list[str] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


# Python documents these, or has no other name for them.
PYTHONS = {"_NamedFuncPointer", "_current_frames", "_exit", "_fields", "_initializing"}
# What torch's objects have in attributes with an underscore. Ours may be called the same, on `self`.
TORCHS = set().union(
    dir(torch.nn.Linear(1, 1)),
    *map(dir, (torch.Tensor, torch.UntypedStorage, torch.optim.Optimizer, torch.autograd.graph.Node, torch.fx.Node)),
    *map(dir, (dist.ProcessGroup, dist.Work, dist.Store, dist.Backend, dist.device_mesh.DeviceMesh)),
)


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to functions, classes, variables, slots and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        for statement in node.body if isinstance(node, (ast.Module, ast.ClassDef)) else ():
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                names = [part.id for part in ast.walk(statement) if isinstance(part, ast.Name)]
                yield from names
                if "__slots__" in names and statement.value is not None:
                    yield from ast.literal_eval(statement.value)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _accesses(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Where a private attribute is looked at, and its name."""
    for node in ast.walk(tree):
        name: object = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            owner, name = node.args[0], node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if isinstance(name, str) and _is_private(name):
            yield owner, name


def _is_private_path(text: str) -> bool:
    """For `import torch._x`, import_module("torch._x"), sys.modules["torch._x"] and the like."""
    return text.startswith("torch.") and " " not in text and any(map(_is_private, text.split(".")))


def _private_of_torch(tree: ast.AST, ours: Set[str]) -> list[str]:
    """Private names of torch that a file uses.

    They are those that it imports, or has in a text, and attributes: of what it has imported from torch; those that
    nothing of ours defines; and those that torch has, too, if they are not of ``self``.
    """
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = [name for name in (*_imported_names(tree), *texts) if _is_private_path(name)]
    bound = _torch_bindings(tree)
    for owner, name in _accesses(tree):
        is_torchs = name in TORCHS and not _is_self(owner)
        if name not in PYTHONS and (name not in ours or is_torchs or (_dotted(owner) or [""])[0] in bound):
            found.append(f"line {owner.lineno}: {ast.unparse(owner)}.{name}")
    return found


def test_only_one_package_uses_private_names_of_torch() -> None:
    ours = {name for file in FILES if not file.startswith("_torch/") for name in _defined(_tree(file))}
    found = {file: names for file in FILES if (names := _private_of_torch(_tree(file), ours))}
    assert "_torch/c10d.py" in found
    assert {file: names for file, names in found.items() if not file.startswith("_torch/")} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C._x()",
        "import torch._dynamo",
        "import torch.distributed as dist\ndist._thing\n_thing = 1",
        "import torch.distributed as dist\ndist.ProcessGroup._thing\n_thing = 1",
        "from torch._utils import x",
        "from torch import _C",
        "from torch.utils import _pytree as tree",
        "from torch import nn\ndef f():\n    return nn.Module._call_impl\n_call_impl = 1",
        "import torch\ngetattr(torch, '_C')\n_C = 1",
        "import importlib\nimportlib.import_module('torch._dynamo')",
        "tensor._version",
        "owner._parameters",
        "work._source_rank()",
        "getattr(param, '_ddp_ignored', False)",
        "module._x = 1",
        "hasattr(self.group, '_x')",
        "class A:\n    def f(self, other):\n        self._buffers = other._buffers",
    ],
)
def test_the_check_for_private_names_can_fail(code: str) -> None:
    tree = ast.parse(code)
    assert _private_of_torch(tree, set(_defined(tree)))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.nn.Module.__init__",
        "from paceline import _torch\n_torch.default_group()",
        "import torch\nclass A(torch.nn.Module):\n    def f(self):\n        self._x = 1\n        return self._x",
        "'torch._C is what this text is about'",
        "class A:\n    __slots__ = ('_x',)\ndef f(a):\n    return a._x",
        "class A:\n    def __init__(self):\n        self._x = 1\ndef f(a):\n    return a._x",
        "class A:\n    _x: int\n    def _y(self):\n        return self._x\nA()._y()",
        "import os\nos._exit(1)",
        "getattr(a, name)",
    ],
)
def test_the_check_for_private_names_does_not_fail_for_others(code: str) -> None:
    tree = ast.parse(code)
    assert _private_of_torch(tree, set(_defined(tree))) == []


# -- what is not used at all ---------------------------------------------------------------------------

# torch's object collectives pickle what they send.
PICKLING_CALLS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
PICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
EVALUATING = {"eval", "exec", "compile", "__import__"}


def test_nothing_is_pickled() -> None:
    for file in FILES:
        if file.startswith("testing/"):
            # The pool hands test functions to its own child processes; no rank reads what another one pickled.
            continue
        assert not {name.split(".")[0] for name in _imported_names(_tree(file))} & PICKLING_MODULES, file
        for node in ast.walk(_tree(file)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in PICKLING_CALLS | PICKLING_MODULES, f"{file}:{node.lineno}: {name}"  # type: ignore[attr-defined]


def test_nothing_is_evaluated() -> None:
    for file in FILES:
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in EVALUATING, f"{file}:{node.lineno}: {node.func.id}()"


def test_the_environment_is_read_in_few_places() -> None:
    ways = (["os", "environ"], ["os", "getenv"], ["os", "putenv"])
    for file in FILES:
        if file.startswith(MAY_READ_ENVIRONMENT):
            continue
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Attribute) and _dotted(node) in ways:
                raise AssertionError(f"{file}:{node.lineno}: ask paceline.settings.environment() instead")
        assert not {".".join(way) for way in ways} & _imported_names(_tree(file)), file


def test_the_library_needs_no_test_framework() -> None:
    for file in FILES:
        assert not any(name.startswith(("unittest", "pytest")) for name in _imported_names(_tree(file))), file


def test_no_file_is_without_words_on_what_it_is_for() -> None:
    assert [file for file in FILES if not ast.get_docstring(_tree(file))] == []


def test_no_two_classes_have_one_name() -> None:
    found = [node.name for file in FILES for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)]
    assert {name for name in found if found.count(name) > 1} == set()


def test_only_one_file_makes_threads() -> None:
    def is_one(expression: ast.expr) -> bool:
        return ast.unparse(expression).rpartition(".")[2] in ("Thread", "Timer", "ThreadPoolExecutor")

    made = [(file, node.func) for file in FILES for node in ast.walk(_tree(file)) if isinstance(node, ast.Call)]
    # A rank of the test pool has one that must outlive `shutdown`: it ends the rank when the tests have ended.
    assert {file for file, call in made if is_one(call)} == {"testing/_rank.py", "threads.py"}
    bases = [(file, node.bases) for file in FILES for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)]
    assert [file for file, of in bases if any(map(is_one, of))] == ["threads.py"]
