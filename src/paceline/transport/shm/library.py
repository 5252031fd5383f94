"""Finds and loads the C kernel, and says why there is none."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from ctypes import c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from paceline.errors import StateError
from paceline.transport.shm import codes

_MODULE = f"{__package__}._kernel"


def library() -> ctypes.CDLL:
    """The loaded kernel; its functions are those of ``csrc/pl.h``."""
    loaded = _load()
    if isinstance(loaded, str):
        raise StateError(f"the shared-memory transport cannot be used: {loaded}")
    return loaded


@cache
def functions() -> Any:
    """What is called without ``ctypes``: ``all_reduce`` and ``interruption`` of ``csrc/module.c``."""
    library()  # says what is missing, if anything is
    module = importlib.import_module(_MODULE)
    module.know_tensors(Tensor, Parameter)
    return module


def reason_unavailable() -> str | None:
    """Why the kernel cannot be used in this installation, or None if it can."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@cache
def _load() -> ctypes.CDLL | str:
    """The loaded kernel, or why there is none."""
    if not sys.platform.startswith("linux"):
        return f"the shared-memory transport is written for Linux, and this is {sys.platform}"
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return (
            "its C kernel was not compiled when paceline was installed; install a C compiler (gcc) and Python's "
            "headers (python3-dev) and reinstall paceline"
        )
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        return f"its C kernel does not load: {error}"
    library.pl_abi.restype = c_int
    if library.pl_abi() != codes.ABI:
        return f"its C kernel is of another version ({library.pl_abi()}, needed {codes.ABI}); reinstall paceline"
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    signatures: dict[str, tuple[object, list[object]]] = {
        "pl_control_bytes": (c_uint64, [c_int]),
        "pl_open": (
            c_void_p,
            [c_void_p, c_uint64, c_int, c_int, c_int, c_int, c_void_p, c_char_p, c_uint64],
        ),
        "pl_all_reduce": (
            c_void_p,
            [c_void_p, c_void_p, c_void_p, c_uint64, c_int, c_int, c_double, c_int],
        ),
        "pl_exchange": (
            c_void_p,
            [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_double, c_int],
        ),
        "pl_reduce_exchange": (
            c_void_p,
            [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_double, c_int],
        ),
        "pl_gather_unequal": (c_void_p, [c_void_p, c_void_p, c_uint64, c_int, c_int, c_double]),
        "pl_barrier": (c_void_p, [c_void_p, c_double, c_int]),
        "pl_send": (c_void_p, [c_void_p, c_void_p, c_uint64, c_int, c_int64, c_double]),
        "pl_recv": (c_void_p, [c_void_p, c_void_p, c_uint64, c_int, c_int64, c_double]),
        "pl_register_arena": (c_int, [c_void_p, c_uint64, c_void_p, c_uint64]),
        "pl_unregister_arena": (None, [c_void_p, c_uint64]),
        "pl_poison": (None, [c_void_p, c_char_p, c_int, c_int]),
        "pl_close": (None, [c_void_p]),
        "pl_abort": (None, [c_void_p]),
        "pl_free": (None, [c_void_p]),
        "pl_job_wait": (c_int, [c_void_p, c_double]),
        "pl_job_status": (c_int, [c_void_p]),
        "pl_job_message": (c_char_p, [c_void_p]),
        "pl_job_rank": (c_int, [c_void_p]),
        "pl_job_source": (c_int, [c_void_p]),
        "pl_job_part": (c_void_p, [c_void_p, c_int, c_void_p]),
        "pl_job_release": (None, [c_void_p]),
        "pl_fail_at": (None, [c_int, c_int, c_int]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
