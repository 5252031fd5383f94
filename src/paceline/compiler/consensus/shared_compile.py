"""One rank compiles a graph, and the others load what it made.

torch loads artifacts by unpickling them, and kernels are programs. So a rank takes bytes only from rank 0 of its own
group, and only if rank 0 has put their SHA-256 into the group's store, in a message that is sealed with the job's
secret. Without a secret anybody who can write to the store could do so, and every rank compiles by itself. What is
taken is written only where no other user can put something in its place before it is loaded.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import logging
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import _torch, settings, threads
from paceline.compiler.consensus import shapes
from paceline.compiler.consensus.compile_exchange import CompileExchange, NoteKind
from paceline.compiler.consensus.fingerprint import Fingerprint
from paceline.errors import DisagreementError, PeerFailedError

NOTHING, FAILED = 0, -1
# Every rank makes room for as many bytes as rank 0 announces.
_LIMIT_BYTES = 4 * 2**30
COMPILED, LOADED = "compiled here", "loaded from rank 0"
# Where Inductor keeps a library: two letters of its key, and the key. Those without "main" are trials of what the
# processor can do, and not loaded as kernels are.
_KERNEL = re.compile(r"[a-z0-9]{2}/[a-z0-9]{8,80}(\.main)?\.so")
TRIAL = "trial"
NO_SECRET = (
    f"the ranks have no {settings.SECRET}, so that anybody who can write to the process group's store could have them "
    "run programs of his own; `paceline train` sets one, and with other launchers you set the same one on all ranks"
)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
KINDS = ("ctypes", "bindings", TRIAL)
logger = logging.getLogger("paceline.compiler")


class Kernel(NamedTuple):
    """A library of compiled C++."""

    kind: str
    data: bytes


class Artifacts(NamedTuple):
    """What a rank has made of a graph: torch's cache entries, and libraries of kernels by their file's name."""

    cache: bytes
    kernels: dict[str, Kernel]

    def encode(self) -> bytes:
        listed = [[name, kernel.kind, len(kernel.data)] for name, kernel in self.kernels.items()]
        head = json.dumps([len(self.cache), listed]).encode()
        data = (kernel.data for kernel in self.kernels.values())
        return b"".join([len(head).to_bytes(8, "little"), head, self.cache, *data])

    @staticmethod
    def decode(data: bytes) -> Artifacts:
        """The artifacts in rank 0's message. Raises if the message does not have the form that `encode` makes."""
        at = 8 + int.from_bytes(data[:8], "little")
        cache, kernels = b"", dict[str, Kernel]()
        match shapes.read_json(data[8:at], 0):
            case [int(n_cache), [*listed]] if 0 <= n_cache <= len(data):
                cache, at = data[at : at + n_cache], at + n_cache
            case _:
                raise _refusal("is not a list of artifacts")
        for entry in listed:
            match entry:
                case [str(name), str(kind), int(length)] if (
                    0 <= length <= len(data) and kind in KINDS and _KERNEL.fullmatch(name)
                ):
                    kernels[name], at = Kernel(kind, data[at : at + length]), at + length
                case _:
                    told = (
                        f": {entry[0][:200]!r}"
                        if isinstance(entry, list) and entry and isinstance(entry[0], str)
                        else ""
                    )
                    raise _refusal(f"has a kernel of a kind, a length or a name that Inductor does not give{told}")
        if at != len(data):
            raise _refusal(f"has {len(data)} bytes instead of {at}")
        return Artifacts(cache, kernels)


def _refusal(why: str) -> DisagreementError:
    return DisagreementError(f"What rank 0 sent as its artifacts {why}. None of it was loaded.")


class SharedCompile:
    """Compiles graphs on rank 0 for all ranks of an exchange."""

    def __init__(self, exchange: CompileExchange) -> None:
        self._exchange = exchange
        self._sent: set[str] = set()
        self._offers = 0
        self._has_warned = False

    def compile(self, frame: str, graph: Fingerprint, compile_: Callable[[], Any], *, kernels: bool) -> tuple[Any, str]:
        """The compiled graph, and where it came from. ``kernels`` says whether Inductor writes C++ for it."""
        reason = self._obstacle(frame, graph)
        with _torch.trials_on_demand() if kernels else contextlib.nullcontext():
            if reason:
                return self._compile_here(frame, compile_, reason)
            self._offers += 1
            lead = self._lead if self._exchange.rank == 0 else self._follow
            return lead(frame, compile_, kernels)

    def _obstacle(self, frame: str, graph: Fingerprint) -> str:
        """The reason why ranks cannot use the same compiled graph; empty if they can."""
        # Ranks that have talked have the same secret, or all of them have none.
        if not settings.secret():
            if self._exchange.rank == 0 and not self._has_warned:
                self._has_warned = True
                logger.warning("once=True has no effect, and every rank compiles by itself: %s.", NO_SECRET)
            return NO_SECRET
        mine = {**environment(), "graph": graph.exact_digest}
        body = json.dumps(mine).encode()
        notes = self._exchange.gather_alike(NoteKind.OFFER, body=body, doing=f"the comparison of {frame}")
        ours, *others = (shapes.read_texts(note.body, rank) for rank, note in enumerate(notes))
        for rank, theirs in enumerate(others, start=1):
            for name in mine:
                if theirs.get(name) != ours.get(name):
                    told = "" if name == "graph" else f" ({ours.get(name)} and {theirs.get(name)})"
                    return f"the {name} of rank {rank} is not that of rank 0{told}"
        return ""

    def _compile_here(self, frame: str, compile_: Callable[[], Any], reason: str) -> tuple[Any, str]:
        logger.info("Every rank compiles %s by itself: %s.", frame, reason)
        return compile_(), f"{COMPILED}: {reason}"

    def _lead(self, frame: str, compile_: Callable[[], Any], kernels: bool) -> tuple[Any, str]:
        # The others wait to hear how this went, so they are told of any error.
        try:
            with contextlib.ExitStack() as stack:
                found = stack.enter_context(_torch.artifacts_of_this())
                if kernels:
                    stack.enter_context(_preparations_beside())
                    stack.enter_context(_torch.kernels_beside())
                compiled = compile_()
            data = Artifacts(found[0], self._new_kernels()).encode() if found else b""
            if found:
                self._exchange.put(self._key, hashlib.sha256(data).hexdigest())
        except Exception:
            self._announce(FAILED, frame)
            raise
        if not found:
            self._announce(NOTHING, frame)
            return compiled, f"{COMPILED}: the backend leaves no artifacts"
        self._announce(len(data), frame)
        self._exchange.broadcast(data, n_bytes=len(data), doing=f"the exchange of artifacts of {frame}")
        return compiled, COMPILED

    def _follow(self, frame: str, compile_: Callable[[], Any], kernels: bool) -> tuple[Any, str]:
        if kernels:
            # There is time for it while rank 0 compiles.
            _torch.import_inductor()
        n_bytes = self._announce(NOTHING, frame)
        if n_bytes == FAILED:
            raise PeerFailedError(f"rank 0 raised while it compiled {frame} for all ranks.", rank=0)
        if n_bytes == NOTHING:
            return self._compile_here(frame, compile_, "the backend leaves no artifacts")
        data = self._exchange.broadcast(b"", n_bytes=n_bytes, doing=f"the exchange of artifacts of {frame}")
        announced = self._exchange.read(self._key)
        if announced != (hashlib.sha256(data).hexdigest(),):
            raise DisagreementError(
                f"The artifacts of {frame} that rank {self._exchange.rank} received are not those that rank 0 "
                f"announced (SHA-256 {', '.join(map(str, announced))}); none of them were loaded."
            )
        problem = _install(Artifacts.decode(data))
        if problem:
            logger.warning("Rank %d compiles %s by itself: %s.", self._exchange.rank, frame, problem)
            return compile_(), f"{COMPILED}: {problem}"
        hits = _torch.cache_hits()
        compiled = compile_()
        if _torch.cache_hits() == hits:
            reason = "torch did not find the artifacts of rank 0 in its cache"
            logger.info("Rank %d compiled %s by itself: %s.", self._exchange.rank, frame, reason)
            return compiled, f"{COMPILED}: {reason}"
        return compiled, LOADED

    @property
    def _key(self) -> str:
        return f"artifacts/{self._offers}"

    def _announce(self, n_bytes: int, frame: str) -> int:
        """The number of bytes that rank 0 announces; that of the other ranks does not count."""
        doing = f"the compilation of {frame} by rank 0"
        announced = self._exchange.gather_alike(NoteKind.ARTIFACTS, flag=n_bytes, doing=doing, patient=True)[0].flag
        if (announced < 0 and announced != FAILED) or announced > _LIMIT_BYTES:
            raise _refusal(f"would take {announced} bytes, and {_LIMIT_BYTES} are the most that are accepted")
        return announced

    def _new_kernels(self) -> dict[str, Kernel]:
        """The libraries of kernels that were not sent before."""
        folder = Path(_torch.kernel_folder())
        trials = (path.relative_to(folder).as_posix() for path in folder.glob("??/*.so"))
        kinds = dict.fromkeys((name for name in trials if ".main." not in name), TRIAL) | _torch.kernel_files()
        new = {name: kind for name, kind in kinds.items() if name not in self._sent and _KERNEL.fullmatch(name)}
        kernels = {}
        for name, kind in new.items():
            # A library that was deleted meanwhile is not sent, and the others make it themselves.
            with contextlib.suppress(OSError):
                kernels[name] = Kernel(kind, (folder / name).read_bytes())
        self._sent.update(kernels)
        return kernels


def _install(artifacts: Artifacts) -> str:
    """Put artifacts, which must be trusted, where torch looks for them; or say why they cannot be safe there."""
    folder = Path(_torch.kernel_folder())
    paths = {name: folder / name for name in artifacts.kernels}
    for directory in dict.fromkeys([folder, *(path.parent for path in paths.values())]):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory != folder:
            _close_to_others(directory)
        if not _is_ours(directory.stat()):
            return (
                f"another user can write to {directory}, and so could replace what it holds before it is loaded; make "
                "it yours alone (chmod go-w), or set TORCHINDUCTOR_CACHE_DIR to a directory that is"
            )
    for name, kernel in artifacts.kernels.items():
        # A file that is there already may be of anybody who could write here before. In a folder of ours nobody can
        # exchange it between this look and the moment at which it is loaded.
        if not _holds(paths[name], kernel.data):
            _write(paths[name], kernel.data)
        if kernel.kind != TRIAL:
            _torch.adopt_kernel(name, kernel.kind)
    torch.compiler.load_cache_artifacts(artifacts.cache)
    return ""


def _close_to_others(directory: Path) -> None:
    """Keep others from writing to a directory that torch has made, as it may with a permissive umask.

    What others have put there before does no harm, because every file is compared before it is loaded.
    """
    info = directory.lstat()
    if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and info.st_mode & _WRITABLE_BY_OTHERS:
        directory.chmod(stat.S_IMODE(info.st_mode) & ~_WRITABLE_BY_OTHERS)


def _is_ours(info: os.stat_result) -> bool:
    """Whether a file or directory belongs to this user, and nobody else may write to it."""
    return info.st_uid == os.geteuid() and not info.st_mode & _WRITABLE_BY_OTHERS


def _holds(path: Path, data: bytes) -> bool:
    """Whether the file is ours and has exactly these bytes."""
    try:
        info = path.lstat()
        is_sound = stat.S_ISREG(info.st_mode) and _is_ours(info) and info.st_size == len(data)
        return is_sound and path.read_bytes() == data
    except OSError:
        return False


def _write(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all, since ranks of a host share the folder."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.chmod(temporary, 0o755)
    os.replace(temporary, path)


@contextlib.contextmanager
def _preparations_beside() -> Iterator[None]:
    """Let a thread run the C++ compiler for what every kernel needs, while the code inside runs in Python."""

    def prepare() -> None:
        # An error comes again where its cause matters.
        with contextlib.suppress(Exception):
            _torch.prepare_kernels()

    # It needs Inductor's settings, since the result of a trial is kept for good. A copy of this context has them.
    context = contextvars.copy_context()
    thread = threads.start(context.run, prepare, name="headers", stop=lambda: None, within_s=threads.MOMENT_S)
    yield
    # After an error nobody waits here.
    thread.join()


def environment() -> dict[str, str]:
    """What compiled code depends on besides its graph, in words."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "none"
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        device = f"{accelerator.type} {module.get_device_name() if hasattr(module, 'get_device_name') else ''}"
    return {
        "version of torch": f"{torch.__version__} {torch.version.git_version}",
        "version of Python": sys.version.split()[0],
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_flags()}",
        "accelerator": device,
    }


def _cpu_flags() -> str:
    """A digest of the instructions that the processor says it has; empty where they cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:12]
