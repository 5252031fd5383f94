"""What Inductor makes of graphs and keeps: cache artifacts, and libraries of C++ kernels.

Nothing here imports the compiler by itself: the functions are called when somebody else has imported it, or is about
to use it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from paceline._torch.compilation import original_backend


def kernel_files() -> dict[str, str]:
    """The libraries of C++ kernels that this process has loaded, below :func:`kernel_folder`; and of which kind.

    They are not part of ``torch.compiler.save_cache_artifacts``: who loads those compiles them anew, which is most of
    the time that compiling for the CPU takes.
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

    It looks for the file only after it has compiled the headers, at the price of a kernel.
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
    """Fills the list with the cache artifacts of what is compiled meanwhile; nothing is put in if there are none.

    ``torch.compiler.save_cache_artifacts`` has all since the process began.
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
    """What a first compilation begins with: imports, and a digest of torch's sources, which is part of cache keys."""
    from torch._inductor import codecache, compile_fx  # noqa: F401

    codecache.torch_key()


class _Tried:
    """The instruction sets that work, in Inductor's order; each is tried when somebody comes to it, by one thread."""

    def __init__(self, sets: list[Any]) -> None:
        self._sets = sets
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        for one in self._sets:
            with self._lock:
                # Compiles a library and loads it, the first time.
                works = bool(one)
            if works:
                yield one

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __getitem__(self, index: int) -> Any:
        return list(itertools.islice(self, index + 1))[index]


@contextlib.contextmanager
def trials_on_demand() -> Iterator[None]:
    """Inside, Inductor tries a set of vector instructions only if it comes to it, on the way to the one it uses.

    Before its first C++ kernel it tries all that the processor has, one after the other, and takes the first that
    works: on x86 a third of the time that a small model takes. There is no setting but to believe that all work.
    """
    from torch._inductor import cpu_vec_isa

    module: Any = cpu_vec_isa
    torchs = module.valid_vec_isa_list
    named = set(module.x86_isa_checker()) if sys.platform == "linux" else set()
    sets = [one for one in module.supported_vec_isa_list if named.issuperset(str(one).split())]
    if not sets:
        # Elsewhere nothing is tried.
        yield
        return
    tried = _Tried(sets)
    module.valid_vec_isa_list = lambda: tried
    try:
        yield
    finally:
        module.valid_vec_isa_list = torchs


@contextlib.contextmanager
def headers_beside() -> Iterator[None]:
    """Beside what runs inside, Inductor makes ready what every C++ kernel needs: trials, and compiled headers.

    Both are calls of the compiler, and come only when its first kernel is written. They are kept where Inductor looks.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    def compile_headers() -> None:
        # They come before a kernel, which is not compiled itself. What goes wrong will go wrong where it is needed.
        CppPythonBindingsCodeCache.load_pybinding_async([], "", submit_fn=lambda _: None)

    pool = ThreadPoolExecutor(max_workers=1)
    # In this context: Inductor's settings are variables of it, and what a trial finds out is kept for good.
    pool.submit(contextvars.copy_context().run, compile_headers)
    try:
        yield
    except BaseException:
        # Whoever is to hear of it does not wait for headers.
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@contextlib.contextmanager
def kernels_beside() -> Iterator[None]:
    """Beside what this thread does inside, C++ kernels are compiled: Inductor waits for them at the end of it.

    Its threads compile the kernels of a graph while it waits for them. The forward's are not needed before the backward
    is compiled, too, which begins with as much Python. It has no setting for it. Dynamo compiles on one thread at a
    time; others may still load what is compiled.
    """
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile
    before, thread = compiler.wait, threading.get_ident()
    # Inside another one, too, the end of this one waits.
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
