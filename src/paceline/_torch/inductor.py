"""What Inductor makes of graphs and keeps: cache artifacts, and libraries of C++ kernels.

Nothing here imports the compiler by itself: the functions are called when somebody else has imported it, or is about
to use it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from paceline._torch.compilation import original_backend


def kernel_files() -> dict[str, str]:
    """The libraries of C++ kernels that this process has loaded, by path in :func:`kernel_folder`, and their kind.

    ``torch.compiler.save_cache_artifacts`` leaves them out: whoever loads its artifacts compiles the kernels anew,
    which is most of the time that compiling for the CPU takes.
    """
    from torch._inductor import codecache

    found = {}
    for kind, cache in _kernel_caches().items():
        for key in cache.cache:
            path = codecache.get_path(key, "main.so")[2]
            if os.path.exists(path):
                found[os.path.relpath(path, kernel_folder())] = kind
    return found


def adopt_kernel(path: str, kind: str) -> None:
    """Have Inductor use a library at ``path``, below the folder, without looking at how it would compile it.

    Otherwise it looks for the file only after it has compiled the headers, which takes as long as a kernel.
    """
    cache = _kernel_caches()[kind]
    key = os.path.basename(path).partition(".")[0]
    full = os.path.join(kernel_folder(), path)
    cache.cache.setdefault(key, functools.cache(lambda: cache._load_library(full, key)))


def _kernel_caches() -> dict[str, Any]:
    from torch._inductor import codecache

    return {"ctypes": codecache.CppCodeCache, "bindings": codecache.CppPythonBindingsCodeCache}


def kernel_folder() -> str:
    """Where Inductor keeps what it compiles."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


@contextlib.contextmanager
def artifacts_of_this() -> Iterator[list[bytes]]:
    """Fill the list with the cache artifacts of what is compiled meanwhile, if there are any.

    ``torch.compiler.save_cache_artifacts`` by itself returns all artifacts since the process began.
    """
    from torch.compiler._cache import CacheArtifactManager as Manager

    found: list[bytes] = []
    new: dict[str, list[Any]] = {}
    try:
        with Manager.with_fresh_cache():
            yield found
            new = {kind: list(artifacts) for kind, artifacts in Manager._new_cache_artifacts.items()}
            saved = torch.compiler.save_cache_artifacts()
            if saved is not None:
                found.append(saved[0])
    finally:
        # They belong to what the user may save later, too.
        for kind, artifacts in new.items():
            for artifact in artifacts:
                if artifact not in Manager._seen_artifacts:
                    Manager._new_cache_artifacts[kind].append(artifact)
                    Manager._seen_artifacts.add(artifact)


def cache_hits() -> int:
    """How many graphs AOTAutograd has found in its cache so far."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"])


def is_inductor(backend: Any) -> bool:
    """Whether ``backend``, as a graph is given to it, is Inductor."""
    return isinstance(original_backend(backend), torch._TorchCompileInductorWrapper)


def import_inductor() -> None:
    """Do what a first compilation begins with: imports, and a digest of torch's sources for cache keys."""
    from torch._inductor import codecache, compile_fx  # noqa: F401

    codecache.torch_key()


class _Tried:
    """The instruction sets that work, in Inductor's order. Each is tried by one thread, when it is first asked for."""

    def __init__(self, sets: list[Any]) -> None:
        self._sets = sets
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        for one in self._sets:
            with self._lock:
                # The first time, this compiles a library and loads it.
                works = bool(one)
            if works:
                yield one

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __getitem__(self, index: int) -> Any:
        return list(itertools.islice(self, index + 1))[index]


@contextlib.contextmanager
def trials_on_demand() -> Iterator[None]:
    """Let Inductor try sets of vector instructions only up to the first one that works, which is the one it uses.

    Before its first C++ kernel it would try all that the processor has. On x86 that is a third of the time that a small
    model takes to compile. The only setting is to try none, and to believe that all work.
    """
    from torch._inductor import cpu_vec_isa

    module: Any = cpu_vec_isa
    torchs = module.valid_vec_isa_list
    named = set(module.x86_isa_checker()) if sys.platform == "linux" else set()
    sets = [one for one in module.supported_vec_isa_list if named.issuperset(str(one).split())]
    if not sets:
        # On other processors nothing is tried.
        yield
        return
    tried = _Tried(sets)
    module.valid_vec_isa_list = lambda: tried
    try:
        yield
    finally:
        module.valid_vec_isa_list = torchs


def prepare_kernels() -> None:
    """Prepare what every C++ kernel needs: trials of the compiler, and compiled headers.

    Inductor does so only when its first kernel is written. The results are kept where Inductor looks.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    # Headers come before a kernel, and the kernel itself is not compiled.
    CppPythonBindingsCodeCache.load_pybinding_async([], "", submit_fn=lambda _: None)


@contextlib.contextmanager
def kernels_beside() -> Iterator[None]:
    """Let C++ kernels be compiled while this thread runs the code inside, and wait for them only at the end.

    Inductor's threads compile the kernels of a graph while Inductor waits for them. But the kernels of the forward are
    not needed before the backward is compiled, and that begins with just as much work in Python. There is no setting
    for this. Dynamo compiles on one thread at a time, but other threads may still load what is compiled.
    """
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile
    before, thread = compiler.wait, threading.get_ident()
    # If this is inside another context of this kind, its end still waits, by torch's own function.
    torchs = getattr(before, "torchs", before)
    postponed: list[tuple[Any, dict[str, Any]]] = []

    def wait(self: Any, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            postponed.append((self, scope))
        else:
            torchs(self, scope)

    wait.torchs = torchs  # type: ignore[attr-defined]
    compiler.wait = wait
    try:
        yield
    finally:
        compiler.wait = before
    for waiting, scope in postponed:
        torchs(waiting, scope)
