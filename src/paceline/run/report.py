"""``paceline env``: what a bug report should say about the machine and what is installed on it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.control.jobs import base_refusal
from paceline.run import cores
from paceline.settings import SECRET, job_directory
from paceline.transport.shm import kernel

_MEMORY = Path("/dev/shm")
_PREFIXES = ("PACELINE_", "OMP_", "MKL_", "TORCH", "GLOO_", "NCCL_", "MASTER_", "SLURM_N", "OMPI_COMM_WORLD_S")
_EXACT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


def report() -> int:
    """Print it, and return an exit code."""
    for name, value in facts().items():
        print(f"{name + ':':<16}{value}")
    return 0


def facts() -> dict[str, str]:
    """What is known, by what it is about."""
    found = cores.usable_cores()
    cpus = sum(map(len, found))
    limit = cores.quota()
    threads = f"{len(found)} cores, {cpus} CPUs" + ("" if limit > cpus else f", of which {limit:g} may be used")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator is not None else 0
    reason = kernel.reason_unavailable()
    return {
        "paceline": f"{version('paceline')}, in {Path(__file__).parents[1]}",
        "torch": f"{torch.__version__}, backends {', '.join(_backends())}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.platform()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
        "cores": f"{threads}; torch uses {torch.get_num_threads()} threads",
        "accelerators": f"{count} of {accelerator.type}" if accelerator is not None else "none",
        "shm kernel": f"not usable: {reason}" if reason else "compiled",
        "/dev/shm": _room(_MEMORY),
        "job files": base_refusal() or str(job_directory()),
        "environment": _environment() or "nothing that matters here",
    }


def _backends() -> list[str]:
    return [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]


def _room(path: Path) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return f"not usable: {error}"
    return f"{usage.free / 2**20:,.0f} MB of {usage.total / 2**20:,.0f} MB are free"


def _environment() -> str:
    """The variables that change what happens. That there is a secret is told, and what it is is not."""
    told = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) or name in _EXACT}
    if SECRET in told:
        told[SECRET] = "(set)"
    return ", ".join(f"{name}={value}" for name, value in sorted(told.items()))
