"""What ``import torch`` does if Paceline is installed: little, lazily, and never with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import paceline
import paceline_autoload
from paceline.ddp.replace import replace_torch_ddp

REGISTERED = """
import sys, torch, torch.distributed as dist
assert dist.is_backend_available("shm")
assert [name for name in sys.modules if name.partition(".")[0] == "paceline"] == []
dist.init_process_group("cpu:shm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
assert "paceline" in sys.modules
dist.destroy_process_group()
print("good")
"""
SWAPPED = """
import sys, torch
assert "paceline" not in sys.modules
import torch.distributed.checkpoint.state_dict as torchs
from torch.nn.parallel.distributed import DistributedDataParallel as DDP
assert DDP.__module__ == "paceline.ddp.module", DDP
assert torch.nn.parallel.DistributedDataParallel is DDP
assert torchs.DDP.__module__ == "torch.nn.parallel.distributed"
assert issubclass(DDP, torchs.DDP)
print("good")
"""
SWITCHED_OFF = """
import torch, torch.distributed as dist
assert not dist.is_backend_available("shm")
import paceline
assert dist.is_backend_available("shm")
print("good")
"""


def _run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("code", "environ"),
    [
        (REGISTERED, {}),
        (SWAPPED, {"PACELINE_SWAP": "1"}),
        pytest.param(SWITCHED_OFF, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, marks=pytest.mark.full),
    ],
    ids=["registered", "swapped", "switched off"],
)
def test_what_a_program_finds_after_importing_torch(code: str, environ: dict[str, str]) -> None:
    done = _run(code, **environ)
    assert (done.stdout, done.stderr) == ("good\n", "")


BROKEN = """
import torch
print("imported")
try:
    torch.nn.parallel.DistributedDataParallel
except ImportError as error:
    print(error)
"""


def test_a_broken_installation_breaks_only_what_needs_it(tmp_path: Path) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "__init__.py").write_text("raise ImportError('half of it is gone')", encoding="utf-8")
    done = _run(BROKEN, PYTHONPATH=str(tmp_path), PACELINE_SWAP="1")
    assert (done.stdout, done.stderr) == ("imported\nhalf of it is gone\n", "")


def test_whatever_goes_wrong_is_a_line_and_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no such method")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", fail)
    paceline_autoload.register()
    assert capsys.readouterr().err == (
        "paceline: could not be set up in `import torch`: RuntimeError('no such method')\n"
    )


def test_it_can_be_made_the_default_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", dict(dist.Backend.default_device_backend_map))
    monkeypatch.setenv("PACELINE_CPU_BACKEND", "shm")
    paceline_autoload.register()
    assert dist.get_default_backend_for_device("cpu") == "shm"


# -- replacing torch's class in a running process ------------------------------------------------------


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that has imported torch's class under another name."""
    module = ModuleType("a_framework")
    module.Wrapper = TorchDDP  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_framework", module)
    # This file has bound torch's class, too, and wants to keep it.
    monkeypatch.delitem(sys.modules, __name__)
    others = [name for name, found in sys.modules.items() if _has_bound(found) and "torch" not in name]
    for name in others:
        if name != "a_framework":
            monkeypatch.delitem(sys.modules, name)
    yield module
    paceline_autoload.swap_back()


def _has_bound(module: object) -> bool:
    return any(value is TorchDDP for value in getattr(module, "__dict__", {}).values())


def test_modules_that_have_bound_the_name_get_ours_and_are_named(user: ModuleType) -> None:
    replaced = replace_torch_ddp()
    assert replaced == [
        "torch.nn.parallel.DistributedDataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "a_framework.Wrapper",
    ]
    assert user.Wrapper is torch.nn.parallel.DistributedDataParallel is paceline.DDP
    # Torch's own functions go on with their class.
    assert vars(torch.nn.parallel.distributed)["DistributedDataParallel"] is TorchDDP
    assert replace_torch_ddp() == []


def test_whoever_sets_the_name_afterwards_gets_what_they_set(user: ModuleType) -> None:
    replace_torch_ddp()
    mine = type("Mine", (), {})
    parallel = torch.nn.parallel
    try:
        parallel.DistributedDataParallel = mine  # type: ignore[misc]
        assert parallel.DistributedDataParallel is mine
    finally:
        parallel.DistributedDataParallel = TorchDDP  # type: ignore[misc]
