"""What a rank says when an exception ends its program, wherever it came from.

The wrapper itself sees exceptions in forward and in backward. It never sees one in the loss function, the data loader
or the optimizer. If nobody catches such an exception, the interpreter calls ``sys.excepthook``, and from there the
other ranks hear of it at once. They need not wait until the process has ended, which may take a while.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from paceline.control import own_files
from paceline.control.user_code import user_frames
from paceline.errors import PeerError
from paceline.settings import environment

END_S = 5.0
"""How long a program may take to end when another rank's failure ends it."""
LINGER_S = 3.0
"""How long it waits at most, over all its wrappers, for the process that failed first to end."""

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Speaker(Protocol):
    def report(self, where: str, error: BaseException | None, *, final: bool = False) -> None:
        """Tell the other ranks that this one raised."""

    def linger(self, rank: int | None, *, deadline: float) -> None:
        """Return when the process of ``rank`` has ended, or at ``deadline`` on the monotonic clock."""


_speakers: weakref.WeakSet[Speaker] = weakref.WeakSet()


_hook: ExceptHook | None = None


def speak_for(speaker: Speaker) -> None:
    """Have ``speaker`` report the exception that ends this program, if one does while it is alive."""
    global _hook
    _speakers.add(speaker)
    # The hook is not set at import, so that a program that wraps nothing keeps its own. It is set only once. Whether it
    # is set cannot be seen in ``sys.excepthook``: torch chains a hook for every process group, so that ours is rarely
    # the outermost.
    if _hook is None:
        _hook = sys.excepthook = _chain(sys.excepthook)


def _tell_torchrun(error: BaseException) -> None:
    """Have torchrun's summary, which is what a person reads first, show the first cause and not only an exit code."""
    if environment("TORCHELASTIC_ERROR_FILE"):
        traceback = error.__traceback__
        try:
            # ``ErrorHandler`` asks Python for the exception that is being handled.
            raise error
        except BaseException:
            with contextlib.suppress(Exception):
                from torch.distributed.elastic.multiprocessing.errors import ErrorHandler  # here: seldom needed

                ErrorHandler().record_exception(error)
        error.__traceback__ = traceback


def _end_soon() -> None:
    """Make sure that the process ends: a backend that is destroyed waits for its collectives, even if they never end.

    This uses faulthandler, whose thread does not need the interpreter. The stacks that it writes are thrown away.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(END_S, exit=True, file=nowhere)


def _chain(before: ExceptHook) -> ExceptHook:
    """A hook that sends the news, then calls ``before``.

    If another rank caused the error, its traceback is shortened and shown when that rank has ended or after `LINGER_S`.
    """

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        own_files.keep = True
        # Whoever pressed Ctrl-C means every rank.
        if not issubclass(kind, (PeerError, KeyboardInterrupt)):
            for speaker in list(_speakers):
                # The person must get to read the first cause, whatever happens here.
                with contextlib.suppress(Exception):
                    speaker.report("its program", error, final=True)
        if isinstance(error, PeerError):
            # The others are not told, because this error is an echo. Frames of torch and of Paceline help nobody here.
            error.__cause__, error.__suppress_context__ = None, True
            traceback = error.__traceback__ = user_frames(traceback)
            deadline = time.monotonic() + LINGER_S
            for speaker in list(_speakers):
                # The rank that failed first should print first and end first.
                with contextlib.suppress(Exception):
                    speaker.linger(error.rank, deadline=deadline)
        before(kind, error, traceback)
        if isinstance(error, PeerError):
            # This waits until the program does end, because an interactive prompt calls this hook too, and goes on.
            atexit.register(_end_soon)
        else:
            _tell_torchrun(error)

    return hook
