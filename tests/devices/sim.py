"""The device of sim.cpp from Python: building it, loading it into a rank, and looking at what it did."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("sim.cpp")
NAME_BYTES = 200
DEVICE = "sim:0"

_calls: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()


def build() -> Path:
    """Compile the device, unless this source was compiled before for this torch; takes half a minute."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(sys.prefix) / "paceline-tests" / f"sim-{key}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        # Another worker may be building it at the same time.
        made = library.with_suffix(f".{os.getpid()}")
        folders = [f"-I{folder}" for folder in cpp_extension.include_paths()]
        flags = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", *folders]
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *flags, str(SOURCE), "-o", str(made), *libraries], check=True)
        made.rename(library)
    return library


def can_be_built() -> bool:
    return shutil.which("g++") is not None


@cache
def load(library: Path) -> ctypes.CDLL:
    """Make ``torch.device("sim")`` one of this process."""
    sim = ctypes.CDLL(str(library))
    sim.sim_host_syncs.restype = sim.sim_ran.restype = sim.sim_count_ran.restype = ctypes.c_int64
    sim.sim_last_sync.restype = ctypes.c_char_p
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module._library = sim
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return sim


def library() -> ctypes.CDLL:
    loaded: ctypes.CDLL = torch.sim._library  # type: ignore[attr-defined]
    return loaded


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _run_call(number: int) -> None:
    _calls.pop(number)()


def call(queue: int, name: str, function: Callable[[], None]) -> None:
    """Have a queue call ``function``, which must not raise."""
    number = next(_numbers)
    _calls[number] = function
    library().sim_call(ctypes.c_int64(queue), name.encode(), _run_call, ctypes.c_int64(number))


def delay(seconds: float) -> None:
    """Keep the current stream busy for so long."""
    queue = torch.accelerator.current_stream().stream_id
    library().sim_delay(ctypes.c_int64(queue), ctypes.c_int64(int(seconds * 1e6)))


def kernels_take(seconds: float) -> None:
    library().sim_set_kernel_us(ctypes.c_int64(int(seconds * 1e6)))


def host_syncs() -> int:
    """How often the host has waited for the device so far."""
    return int(library().sim_host_syncs())


def last_sync() -> str:
    """Why the host has waited for the device most recently."""
    text: bytes = library().sim_last_sync()
    return text.decode()


def on_cpu(tensor: Tensor) -> Tensor:
    """The memory of a tensor of the device, for functions that a queue calls."""
    with torch.no_grad():
        return torch.ops.sim.on_cpu(tensor)  # type: ignore[no-any-return]


class Ran(NamedTuple):
    """Something that a queue has done, by the device's clock."""

    queue: int
    name: str
    begun: float
    ended: float

    def overlaps(self, other: Ran) -> bool:
        return self.begun < other.ended and other.begun < self.ended


def timeline(start: int = 0) -> list[Ran]:
    """What the device has done, from a number on."""
    name, begun, ended = ctypes.create_string_buffer(NAME_BYTES), ctypes.c_double(), ctypes.c_double()
    found = []
    for number in range(start, library().sim_count_ran()):
        queue = library().sim_ran(
            ctypes.c_int64(number), name, ctypes.c_int64(NAME_BYTES), ctypes.byref(begun), ctypes.byref(ended)
        )
        found.append(Ran(queue, name.value.decode(), begun.value, ended.value))
    return found
