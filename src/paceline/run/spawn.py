"""``paceline.spawn(fn, nproc)``: ranks for a notebook, or for a program that needs no launcher.

Each rank is a child of this process, with torchrun's variables, so that ``fn`` calls ``paceline.init()`` like any
script. The store at which ranks meet lives here, in the parent.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import BadArgumentError, BadTypeError, PeerError, PeerFailedError, RankLostError, StateError
from paceline.run import cores
from paceline.run.init import shutdown
from paceline.run.launch import LOOPBACK, rank_variables, serve
from paceline.settings import SECRET, environment

# A rank that lost a peer raises within seconds and says why. It should not be ended before that.
_SETTLE_S = 5.0
_END_S = 5.0
# The parent reads what a rank has to say when all have ended, and a pipe holds 64 KiB until then.
_TOLD_CHARACTERS = 15_000
# What a rank sends first: it has raised by itself, or because of another rank.
_CAUSE, _ECHO = b"!", b"~"


def spawn(fn: Callable[..., object], nproc: int, *args: Any) -> None:
    """Call ``fn(*args)`` on ``nproc`` ranks of this host, and return when all have returned.

    Each rank is a new process, in which ``paceline.init()`` joins the group of all. If a rank raises or dies, the
    others hear of it as always, and this raises an error with the traceback of the first cause.

    A function that lives in a module is started in fresh processes. One of a notebook, which no other process can
    import, is started in forks of this process, which compute with one thread each.

    Example::

        def train(steps):
            world = paceline.init()
            ...

        paceline.spawn(train, 2, 100)
    """
    if not callable(fn):
        raise BadTypeError(f"fn must be a function, got {type(fn).__name__}")
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise BadTypeError(f"nproc must be a whole number, got {type(nproc).__name__}")
    if nproc < 1:
        raise BadArgumentError(f"nproc must be at least 1, got {nproc}")
    forks = _is_of_notebook(fn)
    if forks and dist.is_initialized():
        raise StateError(
            "This process has a process group, which the ranks would inherit: they are forks of it, because "
            "no other process can import a function of a notebook. Call paceline.shutdown() first"
        )
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    secret = environment(SECRET) or secrets.token_hex(32)
    # The threads of OpenMP do not survive a fork, and whoever waits for them waits for ever.
    threads = 1 if forks else cores.threads_each(cores.usable_cores(), nproc, limit=cores.quota())
    with socket.create_server((LOOPBACK, 0)) as listener:
        port, run_id = listener.getsockname()[1], uuid.uuid4().hex
        store = serve(listener)
        processes, pipes = [], []
        try:
            for rank in range(nproc):
                variables = rank_variables(rank=rank, nproc=nproc, port=port, run_id=run_id) | {SECRET: secret}
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run_rank, args=(theirs, variables, threads, fn, args))
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(mine)
            _wait_for(processes)
        finally:
            _end(processes)
            told = [_read(pipe) for pipe in pipes]
        del store
    _raise_first([process.exitcode for process in processes], told)


def _is_of_notebook(fn: Callable[..., object]) -> bool:
    main = getattr(sys.modules["__main__"], "__file__", None)
    # What is typed or piped in has no file, or one called "<stdin>".
    return getattr(fn, "__module__", "") == "__main__" and not (main and os.path.isfile(main))


def _run_rank(pipe: Connection, variables: dict[str, str], threads: int, fn: Callable[..., object], args: Any) -> None:
    """What a rank does, in its process."""
    os.environ.update(variables)
    torch.set_num_threads(threads)
    try:
        fn(*args)
        shutdown()
    except SystemExit:
        raise
    except BaseException as error:
        kind = _ECHO if isinstance(error, PeerError) else _CAUSE
        text = "".join(traceback.format_exception(error))[-_TOLD_CHARACTERS:]
        pipe.send_bytes(kind + text.encode(errors="replace"))
        # The interpreter goes on to tell the other ranks (`control.last_words`), and to show the traceback.
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _wait_for(processes: Sequence[Any]) -> None:
    """Return when all ranks have ended, or when the others of one that failed have had their time."""
    left, deadline = list(processes), None
    while left:
        within_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        wait([process.sentinel for process in left], within_s)
        left = [process for process in left if process.exitcode is None]
        if deadline is not None and time.monotonic() > deadline:
            return
        if deadline is None and any(process.exitcode for process in processes):
            deadline = time.monotonic() + _SETTLE_S


def _end(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    deadline = time.monotonic() + _END_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


def _read(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes() if pipe.poll() else b""
    except (EOFError, OSError):
        return b""


def _raise_first(codes: Sequence[int], told: Sequence[bytes]) -> None:
    """Raise an error about the rank that failed first, if one did."""
    for rank, text in enumerate(told):
        if text.startswith(_CAUSE):
            raise PeerFailedError(f"rank {rank} raised:\n\n{text[1:].decode(errors='replace')}", rank=rank)
    for rank, code in enumerate(codes):
        if code and not told[rank]:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RankLostError(f"rank {rank} {how}, and said nothing. Look at its output.", rank=rank)
    for rank, text in enumerate(told):
        if text:
            raise PeerFailedError(f"rank {rank} raised:\n\n{text[1:].decode(errors='replace')}", rank=rank)
