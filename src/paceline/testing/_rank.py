"""What runs inside a rank process of ``RankPool``: a loop of set up, call, answer, clean up."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from paceline import _torch
from paceline.settings import SECRET

# The answer of a rank that was told to clean up and has done so.
CLEAN = "clean"
# A rank is told this once every rank of the run has answered.
CLEAN_UP = "clean up"


@dataclass(frozen=True)
class RankJob:
    """One run, as the parent sends it to a rank."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    # The store keys of a run have a prefix of their own, so that each run has a fresh store on the same server.
    store_prefix: str
    backend: str | None
    group_timeout_s: float
    seed: int
    # Warnings that are let through, as `warnings.filterwarnings` takes them. All others are errors.
    allowed_warnings: tuple[tuple[str, type[Warning]], ...]


@dataclass(frozen=True)
class Answer:
    """What a rank made of its job: a pickled value, or an exception as text."""

    value: bytes | None = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""

    @property
    def ok(self) -> bool:
        return self.value is not None


def freeze() -> None:
    """Let later garbage collections pass over the objects that exist now."""
    gc.collect()
    gc.freeze()


def rank_main(conn: Connection, store_host: str, store_port: int, secret: str, log_path: str) -> None:
    """Serve jobs until the parent hangs up. Everything printed goes to ``log_path``."""
    os.environ[SECRET] = secret
    # Ctrl-C reaches the whole terminal group; the parent decides what becomes of its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # A rank that crashes, or that the parent aborts because it is stuck, writes the stacks of its threads.
    faulthandler.enable(file=log_fd, all_threads=True)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    store = dist.TCPStore(  # public, but not in torch's stubs
        store_host, store_port, is_master=False, wait_for_workers=False
    )
    # The collection after each run should look at the objects of that run, and not at all of torch.
    freeze()
    while True:
        try:
            sys_path, payload = pickle.loads(conn.recv_bytes())
        except EOFError:
            return
        sys.path[:] = sys_path
        conn.send_bytes(pickle.dumps(_do(payload, store)))
        if pickle.loads(conn.recv_bytes()) == CLEAN_UP:
            conn.send_bytes(pickle.dumps(_clean_up()))


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _do(payload: bytes, store: Any) -> Answer:
    environ = dict(os.environ)
    try:
        # This is inside the try because it imports the function's module, which may fail.
        job: RankJob = pickle.loads(payload)
        with _strict_warnings(job):
            _seed(job.seed)
            if job.backend is not None:
                dist.init_process_group(
                    job.backend,
                    store=dist.PrefixStore(job.store_prefix, store),
                    rank=job.rank,
                    world_size=job.world_size,
                    timeout=timedelta(seconds=job.group_timeout_s),
                )
            value = job.fn(job.rank, job.world_size, *job.args)
            return Answer(value=pickle.dumps(value))
    except BaseException as error:
        return Answer(error_type=type(error).__name__, message=str(error), traceback=_describe(error))
    finally:
        if environ != dict(os.environ):
            os.environ.clear()
            os.environ.update(environ)


def _describe(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, AssertionError):
        return text
    # pytest's assertion rewriting does not reach into ranks, so the values that the assertion saw are shown instead.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The innermost frame may be of a helper of torch.testing. The test's own frame is wanted.
    ours = [frame for frame in frames if "site-packages" not in frame.f_code.co_filename]
    lines = [f"  {name} = {_short_repr(value)}" for name, value in ours[-1].f_locals.items()]
    return text + "\n".join(["Where it was raised:", *lines, ""])


def _short_repr(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr raised {type(error).__name__}>"
    return text if len(text) <= 400 else text[:400] + "..."


@contextlib.contextmanager
def _strict_warnings(job: RankJob) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for message, category in job.allowed_warnings:
            warnings.filterwarnings("ignore", message, category)
        yield


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _clean_up() -> str:
    """Leave the rank as it was before the job, or say why that failed (the parent then replaces it)."""
    try:
        # This comes before the group goes, as a wrapper in a reference cycle holds the group and may use it as it dies.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        # What earlier jobs have compiled counts towards the limit after which Dynamo compiles a function no more.
        if _torch.COMPILER in sys.modules:
            torch.compiler.reset()
        # Later collections need not look again at what this run has imported, such as the compiler.
        freeze()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        # The question comes first because the call imports the compiler, which takes a second.
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return traceback.format_exc()
    return CLEAN
