"""The public names, and that importing them changes nothing in the process."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paceline
import paceline.control
import paceline.data
import paceline.hooks
import paceline.testing

PACKAGES = [paceline, paceline.hooks, paceline.control, paceline.data, paceline.testing]
# Modules that are public names of the package, in contrast to those that merely lie in it.
PUBLIC_MODULES = {"data", "errors", "hooks", "tracing", "transport"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_is_what_is_exported(package: ModuleType) -> None:
    found = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_")
        and name != "annotations"  # from __future__
        and (not isinstance(value, ModuleType) or (package is paceline and name in PUBLIC_MODULES))
    }
    assert found == set(package.__all__)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_has_no_name_twice_and_is_sorted(package: ModuleType) -> None:
    names = package.__all__
    assert len(names) == len(set(names))
    # Ruff sorts it like this: constants, classes, the rest.
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def test_the_short_name_is_the_class() -> None:
    assert paceline.DDP is paceline.DistributedDataParallel


def test_everything_public_is_documented() -> None:
    for package in PACKAGES:
        assert package.__doc__
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
                assert inspect.getdoc(value), f"{package.__name__}.{name}"


def test_the_layout_at_the_top_names_files_that_exist() -> None:
    layout, _, _ = (paceline.__doc__ or "").partition("Importing the package")
    told = [part for part in layout.split("``")[1::2] if part.isidentifier() and part.islower()]
    assert "gradients" in told
    for name in told:
        importlib.import_module(f"paceline.{name}")


def test_the_layout_at_the_top_leaves_no_file_out() -> None:
    told = (paceline.__doc__ or "").split("``")[1::2]
    found = {info.name for info in pkgutil.iter_modules(paceline.__path__)} - {"__main__", "errors"}
    assert found <= set(told)


def test_the_errors_form_one_tree_in_which_torchs_except_clauses_work() -> None:
    classes = [value for value in vars(paceline.errors).values() if inspect.isclass(value)]
    assert len(classes) > 5
    for cls in classes:
        assert issubclass(cls, paceline.errors.PacelineError)
        assert cls.__name__ in (paceline.errors.__doc__ or "")
        if not cls.__subclasses__():
            assert issubclass(cls, (ValueError, TypeError, RuntimeError))


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert paceline.__version__ == version("paceline")


# -- what importing does -------------------------------------------------------------------------------

# Runs in a process of its own, in which torch is there and paceline is not yet. Of every module and class of torch, and
# of the modules with which Python is changed for a whole process, it notes what each attribute is, or what is in it.
SNAPSHOTS = """
import abc, atexit, json, logging, os, signal, sys, threading, types, warnings
import torch, torch.distributed.nn.functional, torch.distributed.rpc, torch.utils.checkpoint
if {with_compiler}:
    # Whoever has imported it before gets our rows for it at once; its settings stay as they are.
    import torch._dynamo, torch._inductor.config

PYTHON = ("atexit", "builtins", "copyreg", "importlib", "logging", "os", "signal", "sys", "threading", "warnings")
# Classes that others can declare theirs to be, which shows in none of their attributes.
STOCK = {{
    f"{{cls.__module__}}.{{cls.__qualname__}}": cls
    for cls in (torch.nn.parallel.DistributedDataParallel, torch.distributed.algorithms.join.Joinable)
}}
# What every import changes.
BY_IMPORT = ("sys.modules", "sys.path_importer_cache")

def told(value):
    if isinstance(value, dict):
        return {{str(key): id(item) for key, item in list(value.items())}}
    if isinstance(value, (list, tuple, set, frozenset)):
        return sorted(map(id, value))
    return repr(value) if isinstance(value, (int, float, str, type(None))) else id(value)

def attributes():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", *PYTHON):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) or key.startswith("__") or f"{{name}}.{{key}}" in BY_IMPORT:
                continue
            found[f"{{name}}.{{key}}"] = told(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {{f"{{name}}.{{key}}.{{k}}": told(v) for k, v in vars(value).items() if k != "__doc__"}}
    return found

def loggers():
    return {{
        f"logger {{name}}": [logger.level, len(logger.handlers), len(logger.filters), logger.disabled, logger.propagate]
        for name, logger in [("", logging.root), *logging.root.manager.loggerDict.items()]
        if isinstance(logger, logging.Logger)
    }}

def process():
    configs = [sys.modules[name] for name in ("torch._dynamo.config", "torch._inductor.config") if {with_compiler}]
    return {{
        "environment": dict(os.environ),
        "functions at exit": atexit._ncallbacks(),
        "registered subclasses": {{
            name: len(abc._get_dump(cls)[0]) for name, cls in STOCK.items()
        }},
        "directory": os.getcwd(),
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "threads": [sorted(thread.name for thread in threading.enumerate()), len(os.listdir("/proc/self/task"))],
        "settings": [
            torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
            str(torch.get_default_device()), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.is_anomaly_enabled(), torch.initial_seed(),
            torch.distributed.is_initialized(), str(torch.distributed.get_debug_level()),
            torch.random.get_rng_state().sum().item(), torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32, torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic,
            torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy,
            *(repr(config.get_config_copy()) for config in configs),
        ],
    }}

warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated")
process()  # torch imports something to answer
modules = set(sys.modules)
before = attributes() | process() | loggers()
import paceline
after = attributes() | process() | loggers()
changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
print(json.dumps([changed, sorted(set(sys.modules) - modules), {{name: after[name] for name in loggers()}}]))
"""
# What the package's docstring says, as it is seen from inside.
EFFECTS = {
    # The finder.
    "sys.meta_path",
    # The backend "shm".
    *(
        f"torch.distributed.distributed_c10d.Backend.{name}"
        for name in ("SHM", "_plugins", "backend_capability", "backend_list", "backend_type_map")
    ),
    # Our operators, and that two of them are there for their effect.
    "torch.fx.experimental.proxy_tensor._side_effectful_functions",
    "torch.fx.node._side_effectful_functions",
    "torch.jit._builtins._builtin_table",
    "torch.library._defs",
    "torch.library._impls",
    "torch.ops._dir",
    # That our class counts as torch's.
    "registered subclasses",
    # The end of our threads.
    "functions at exit",
}


def _import(*, with_compiler: bool) -> tuple[list[str], list[str], dict[str, list[int]]]:
    """What importing changes, the modules that it brings, and how loggers are set up afterwards."""
    code = SNAPSHOTS.format(with_compiler=with_compiler)
    # The environment that this process began with, since this process has imported the package, too.
    begun = Path("/proc/self/environ").read_text(encoding="utf-8").split("\0")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        # Without the entry point, so that what it does at the end of ``import torch`` is left to the package.
        env=dict(entry.split("=", 1) for entry in begun if "=" in entry) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()  # importing says nothing
    changed, modules, loggers = json.loads(line)
    return changed, modules, loggers


def test_importing_changes_what_the_package_says_and_nothing_else() -> None:
    changed, modules, loggers = _import(with_compiler=False)
    assert {name for name in changed if not name.startswith("logger paceline")} == EFFECTS
    unconfigured = [0, 0, 0, False, True]
    assert [name for name in loggers if name.startswith("logger paceline") and loggers[name] != unconfigured] == []
    assert "paceline.ddp.module" in modules
    unneeded = ("unittest", "pytest", "rich", "matplotlib", "paceline.testing", "paceline.run.cli", "torch._dynamo")
    assert [name for name in modules if name.startswith(unneeded)] == []


@pytest.mark.full
def test_importing_after_the_compiler_changes_none_of_its_settings() -> None:
    changed, _, _ = _import(with_compiler=True)
    assert not {"settings", "environment", "signals", "threads", "warnings.filters"} & set(changed)


def test_the_package_says_what_importing_changes() -> None:
    _, _, told = (paceline.__doc__ or "").partition("Importing the package changes five things")
    places = ("sys.meta_path", "torch.distributed.Backend", "torch.library", "isinstance", "atexit")
    for effect in (f"``{place}``" for place in places):
        assert effect in told
