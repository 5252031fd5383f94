"""What may import and name what: checked in the source, so that it holds for code no test runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

SRC = Path(paceline.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
TREES = {path.relative_to(SRC).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
every_file = pytest.mark.parametrize("file", sorted(TREES))

# Lower layers first. A file may import, of these, only what stands before it.
LAYERS = ["plan", "bucket", "reducer", "module"]
MAY_READ_ENVIRONMENT = {"options.py", "init.py", "launch.py"}


def _is_testing(file: str) -> bool:
    return file.startswith("testing/")


def _module_name(file: str) -> str:
    parts = ["paceline", *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(file) for file in TREES}


# -- imports point one way -----------------------------------------------------------------------------


def _is_for_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _import_nodes(node: ast.AST, *, in_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run; those for type checkers only are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif _is_for_type_checking(child):
            for other in child.orelse:  # type: ignore[attr-defined]
                yield from _import_nodes(other, in_functions=in_functions)
        elif in_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _import_nodes(child, in_functions=in_functions)


def _ours(tree: ast.AST, *, in_functions: bool) -> set[str]:
    """The paceline modules that a file imports, `from paceline import plan` included."""
    found = set()
    for node in _import_nodes(tree, in_functions=in_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
            continue
        assert node.level == 0, f"line {node.lineno}: imports are absolute here"
        source = node.module or ""
        for alias in node.names:
            full = f"{source}.{alias.name}"
            # `from paceline.init import init` names the function, `from paceline import plan` a module.
            if full in MODULES:
                found.add(full)
            elif source in MODULES:
                found.add(source)
    return found


IMPORTS = {_module_name(file): _ours(tree, in_functions=False) for file, tree in TREES.items()}
ALL_IMPORTS = {_module_name(file): _ours(tree, in_functions=True) for file, tree in TREES.items()}


def _reached_from(name: str, graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    stack = [name]
    while stack:
        for imported in graph[stack.pop()] - reached:
            reached.add(imported)
            stack.append(imported)
    return reached


def test_the_files_were_read() -> None:
    # The checks below mean nothing on an empty graph.
    assert {f"paceline.{layer}" for layer in LAYERS} <= MODULES
    for above, below in zip(LAYERS[1:], LAYERS, strict=False):
        assert f"paceline.{below}" in _reached_from(f"paceline.{above}", IMPORTS)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_reaches_no_layer_above_it(layer: str) -> None:
    above = {f"paceline.{name}" for name in LAYERS[LAYERS.index(layer) + 1 :]}
    assert not _reached_from(f"paceline.{layer}", IMPORTS) & above


@pytest.mark.parametrize("layer", LAYERS[:-1])
def test_a_layer_below_the_module_reaches_none_above_it_from_inside_a_function_either(layer: str) -> None:
    above = {f"paceline.{name}" for name in LAYERS[LAYERS.index(layer) + 1 :]}
    assert not _reached_from(f"paceline.{layer}", ALL_IMPORTS) & above


def test_the_plan_is_pure() -> None:
    assert ALL_IMPORTS["paceline.plan"] == set()
    assert not any("torch" in name for name in _imported_names(TREES["plan.py"]))


def test_no_import_goes_in_a_circle() -> None:
    circles = [name for name in MODULES if name in _reached_from(name, IMPORTS)]
    assert circles == []


@pytest.mark.parametrize("part", ["compiler", "tracing", "simulate", "shard", "transport"])
def test_drivers_of_the_plan_do_not_need_the_module(part: str) -> None:
    # Parts that do not exist yet pass; the rule is there for when they do.
    for name in MODULES:
        if name == f"paceline.{part}" or name.startswith(f"paceline.{part}."):
            assert "paceline.module" not in _reached_from(name, ALL_IMPORTS)


def test_only_tests_import_the_testing_tools() -> None:
    for name, imported in ALL_IMPORTS.items():
        if not name.startswith("paceline.testing"):
            assert not [other for other in imported if other.startswith("paceline.testing")], name


def test_private_torch_names_come_from_one_package_that_needs_no_other() -> None:
    names = {name for name in MODULES if name.partition("paceline._torch")[1]}
    assert names
    for name in names:
        assert names >= ALL_IMPORTS[name]


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


def _is_private_torch_path(text: str) -> bool:
    """For import_module("torch._x"), sys.modules["torch._x"], mock.patch("torch._x") and the like."""
    return text.startswith("torch.") and " " not in text and any(map(_is_private, text.split(".")))


def _private_torch_names(tree: ast.AST) -> list[str]:
    bound = _torch_bindings(tree)
    found = [
        f"import {name}"
        for name in _imported_names(tree)
        if name.split(".")[0] == "torch" and any(map(_is_private, name.split(".")))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = _dotted(node)
            if parts and parts[0] in bound and any(map(_is_private, parts[1:])):
                found.append(f"line {node.lineno}: {'.'.join(parts)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            parts = _dotted(node.args[0])
            name = node.args[1]
            if (
                parts
                and parts[0] in bound
                and isinstance(name, ast.Constant)
                and isinstance(name.value, str)
                and _is_private(name.value)
            ):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_private_torch_path(node.value):
            found.append(f"line {node.lineno}: {node.value!r}")
    return found


@every_file
def test_only_one_package_names_private_torch(file: str) -> None:
    found = _private_torch_names(TREES[file])
    assert file.startswith("_torch/") or found == []


def test_private_names_would_be_found() -> None:
    assert _private_torch_names(TREES["_torch/c10d.py"])


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C._x()",
        "import torch._dynamo",
        "import torch.distributed as dist\ndist._thing",
        "import torch.distributed as dist\ndist.ProcessGroup._thing",
        "from torch._utils import x",
        "from torch import _C",
        "from torch.utils import _pytree as tree",
        "from torch import nn\ndef f():\n    return nn.Module._call_impl",
        "import torch\ngetattr(torch, '_C')",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_the_check_for_private_names_can_fail(code: str) -> None:
    assert _private_torch_names(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.nn.Module.__init__",
        "from paceline import _torch\n_torch.default_group()",
        "import torch\nclass A(torch.nn.Module):\n    def f(self):\n        return self._x",
        "'torch._C is what this text is about'",
    ],
)
def test_the_check_for_private_names_does_not_fail_for_others(code: str) -> None:
    assert _private_torch_names(ast.parse(code)) == []


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


@every_file
def test_nothing_is_pickled(file: str) -> None:
    if _is_testing(file):
        # The pool hands test functions to its own child processes; no rank reads what another one pickled.
        return
    assert not {name.split(".")[0] for name in _imported_names(TREES[file])} & PICKLING_MODULES
    for node in ast.walk(TREES[file]):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in PICKLING_CALLS | PICKLING_MODULES, f"{file}:{node.lineno}: {name}"  # type: ignore[attr-defined]


@every_file
def test_nothing_is_evaluated(file: str) -> None:
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in EVALUATING, f"{file}:{node.lineno}: {node.func.id}()"


@every_file
def test_the_environment_is_read_in_few_places(file: str) -> None:
    if file in MAY_READ_ENVIRONMENT or _is_testing(file):
        return
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Attribute) and _dotted(node) in (["os", "environ"], ["os", "getenv"], ["os", "putenv"]):
            raise AssertionError(f"{file}:{node.lineno}: ask paceline.options.environment() instead")
    assert not {"os.environ", "os.getenv", "os.putenv"} & _imported_names(TREES[file])


@every_file
def test_the_library_needs_no_test_framework(file: str) -> None:
    assert not any(name.startswith(("unittest", "pytest")) for name in _imported_names(TREES[file]))


@every_file
def test_no_file_is_without_words_on_what_it_is_for(file: str) -> None:
    assert ast.get_docstring(TREES[file])
