"""The public names, and that importing them changes nothing in the process."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import paceline
import paceline.control
import paceline.hooks
import paceline.testing

PACKAGES = [paceline, paceline.hooks, paceline.control, paceline.testing]
# Modules that are public names of the package, in contrast to those that merely lie in it.
PUBLIC_MODULES = {"errors", "hooks", "tracing", "transport"}


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
    # As ruff sorts it: constants, classes, the rest.
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def test_a_star_import_brings_exactly_all() -> None:
    namespace: dict[str, Any] = {}
    exec("from paceline import *", namespace)
    namespace.pop("__builtins__")
    assert namespace.keys() == set(paceline.__all__)


def test_the_names_are_what_they_say() -> None:
    assert paceline.DDP is paceline.DistributedDataParallel
    assert issubclass(paceline.DistributedDataParallel, torch.nn.Module)
    assert issubclass(paceline.SyncBatchNorm, torch.nn.Module)
    assert callable(paceline.init)
    assert callable(paceline.shutdown)
    assert issubclass(paceline.errors.PacelineError, Exception)


def test_everything_public_is_documented() -> None:
    for package in PACKAGES:
        assert package.__doc__
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
                assert inspect.getdoc(value), f"{package.__name__}.{name}"


def test_the_layout_at_the_top_names_files_that_exist() -> None:
    assert paceline.__doc__ is not None
    told = [part for part in paceline.__doc__.split("``")[1::2] if part.isidentifier() and part.islower()]
    assert "plan" in told
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

# Runs in a process of its own, in which torch is there and paceline is not yet.
SNAPSHOTS = """
import json, logging, os, signal, sys, threading, warnings
import torch, torch.distributed, torch.distributed.rpc, torch.utils.checkpoint
# Decorators of torch.compiler bring it, and it brings warning filters of its own.
import torch._dynamo, torch._inductor.config

def snapshot():
    backends = {
        f"{kind}.{name}": repr(getattr(getattr(torch.backends, kind), name))
        for kind, names in {
            "cudnn": ["enabled", "benchmark", "deterministic", "allow_tf32"],
            "mkldnn": ["enabled", "deterministic"], "opt_einsum": ["enabled", "strategy"],
        }.items()
        for name in names
    }
    loggers = {
        name: [logger.level, len(logger.handlers), logger.disabled, logger.propagate]
        for name, logger in [("", logging.getLogger()), *logging.root.manager.loggerDict.items()]
        if isinstance(logger, logging.Logger) and (name.split(".")[0] in ("", "paceline", "torch"))
    }
    return {
        "loggers": loggers,
        "paceline loggers configured": [
            name for name, facts in loggers.items()
            if name.split(".")[0] == "paceline" and (facts[0] or facts[1])
        ],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "torch": [
            torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype()),
            str(torch.get_default_device()), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.is_anomaly_enabled(), torch.initial_seed(),
            torch.distributed.is_initialized(), str(torch.distributed.get_debug_level()),
            torch.random.get_rng_state().sum().item(), backends,
        ],
        "compiler": [repr(c.get_config_copy()) for c in (torch._dynamo.config, torch._inductor.config)],
        "functions": [
            id(torch.nn.parallel.DistributedDataParallel), id(torch.nn.Module.__call__), id(torch.Tensor.backward),
            id(torch.autograd.backward), id(torch.distributed.all_reduce), id(torch.nn.SyncBatchNorm),
        ],
        "environment": dict(os.environ),
        "warnings": [str(entry) for entry in warnings.filters],
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "hooks": [id(sys.excepthook), id(threading.excepthook), id(sys.unraisablehook)],
        "path": list(sys.path),
        "directory": os.getcwd(),
    }

before = snapshot()
modules = set(sys.modules)
import paceline
print(json.dumps([before, snapshot(), sorted(set(sys.modules) - modules)]))
"""


@pytest.fixture(scope="module")
def snapshots() -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SNAPSHOTS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()  # importing says nothing
    return json.loads(line)


@pytest.mark.parametrize(
    "what", ["torch", "compiler", "functions", "environment", "warnings", "signals", "hooks", "path", "directory"]
)
def test_importing_changes_nothing(snapshots: list[Any], what: str) -> None:
    before, after, _ = snapshots
    assert after[what] == before[what]


def test_importing_configures_no_logging(snapshots: list[Any]) -> None:
    before, after, _ = snapshots
    assert {name: after["loggers"][name] for name in before["loggers"]} == before["loggers"]
    assert after["paceline loggers configured"] == []


def test_importing_starts_no_threads(snapshots: list[Any]) -> None:
    before, after, _ = snapshots
    assert after["threads"] == before["threads"]
    assert after["tasks"] == before["tasks"]


def test_importing_brings_no_tools_that_training_does_not_need(snapshots: list[Any]) -> None:
    _, _, modules = snapshots
    assert "paceline.module" in modules
    assert not [name for name in modules if name.split(".")[0] in ("unittest", "pytest", "rich", "matplotlib")]
    assert not [name for name in modules if name.startswith(("paceline.testing", "paceline.cli"))]
