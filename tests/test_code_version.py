"""Versions of code: what keeps compiled code of another Paceline from being found in torch's caches."""

from __future__ import annotations

import compileall
import importlib
import sys
from importlib import metadata
from types import ModuleType

import pytest

from paceline import _torch, tracing
from paceline.code_version import code_version
from paceline.compiler import taps
from paceline.compiler.taps import ops
from paceline.gradients import outputs, strides
from paceline.reduction import early_gradients
from paceline.tracing.operator_namespace import NAMESPACE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which `package` lies, with two modules. What is imported from there is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package").mkdir()
    for name in ("__init__", "one", "two"):
        (tmp_path / "package" / f"{name}.py").write_text(f"NAME = {name!r}\n", encoding="utf-8")
    known = set(sys.modules)
    yield tmp_path / "package"
    for name in set(sys.modules) - known:
        del sys.modules[name]


def load(name: str = "package") -> ModuleType:
    for known in [known for known in sys.modules if known.split(".")[0] == "package"]:
        del sys.modules[known]
    importlib.invalidate_caches()
    return importlib.import_module(name)


CHANGES = {
    "a text": lambda folder: (folder / "two.py").write_text("NAME = 'three'\n", encoding="utf-8"),
    "a name": lambda folder: (folder / "two.py").rename(folder / "three.py"),
    "a new file": lambda folder: (folder / "three.py").write_text("", encoding="utf-8"),
    "a file that is gone": lambda folder: (folder / "two.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_in_a_package_is_another_version(folder, change):
    before = code_version(load())
    assert code_version(load()) == before
    CHANGES[change](folder)
    assert code_version(load()) != before


def test_a_module_that_moves_is_another_version_or_fails(folder):
    module = load("package.two")
    before = code_version(module)
    (folder / "two.py").rename(folder / "three.py")
    assert code_version(load("package.three")) != before
    with pytest.raises((ImportError, TypeError)):
        code_version(module)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"'tracing/ops\.py' is not a module"):
        code_version("tracing/ops.py")


def without_source(folder, *names):
    compileall.compile_dir(folder, legacy=True, quiet=2)
    for name in names:
        (folder / f"{name}.py").unlink()


def test_without_any_source_the_release_counts(folder, monkeypatch):
    without_source(folder, "__init__", "one", "two")
    before = code_version(load())
    monkeypatch.setattr(metadata, "version", lambda _package: "99.0")
    assert code_version(load()) != before


def test_a_part_of_the_source_is_refused(folder):
    without_source(folder, "two")
    with pytest.raises(ImportError, match=r"the source of \['package.two'\] is missing"):
        code_version(load())


def test_operators_are_named_by_the_code_that_gives_them_their_meaning():
    assert f"paceline_{code_version(tracing, _torch)}" == NAMESPACE
    assert code_version(taps, strides, outputs, early_gradients) == ops.VERSION
