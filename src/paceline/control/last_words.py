"""What a rank says when an exception ends its program, wherever it came from.

The wrapper itself sees exceptions in forward and in backward. It never sees one in the loss function, the data loader
or the optimizer. If nobody catches such an exception, the interpreter calls ``sys.excepthook``, and from there the
other ranks hear of it at once. They need not wait until the process has ended, which may take a while. A program may
also train in a thread of its own; for that one the interpreter calls ``threading.excepthook``. What a framework
catches is found by the watch (`control.trainer`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from paceline.control import own_files
from paceline.control.progress import Progress
from paceline.control.user_code import has_user_frames, line_of_traceback, user_frames
from paceline.errors import DisagreementError, PacelineError, PeerError
from paceline.settings import environment

END_S = 5.0
"""How long a program may take to end when another rank's failure ends it."""
LINGER_S = 3.0
"""How long it waits at most, over all its wrappers, for the process that failed first to end."""

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Speaker(Protocol):
    @property
    def progress(self) -> Progress: ...

    def report(self, where: str, error: BaseException | None, *, final: bool = False) -> None:
        """Tell the other ranks that this one raised."""

    def linger(self, rank: int | None, *, deadline: float) -> None:
        """Return when the process of ``rank`` has ended, or at ``deadline`` on the monotonic clock."""

    def finish(self) -> None:
        """Record that this rank ends well."""


_speakers: weakref.WeakSet[Speaker] = weakref.WeakSet()


_hook: ExceptHook | None = None
_pid = os.getpid()
"""The process whose words these are. A fork of it has its hook, too."""


def speak_for(speaker: Speaker) -> None:
    """Have ``speaker`` report the exception that ends this program, if one does while it is alive."""
    global _hook, _pid
    _speakers.add(speaker)
    _pid = os.getpid()
    # The hook is not set at import, so that a program that wraps nothing keeps its own. It is set only once. Whether it
    # is set cannot be seen in ``sys.excepthook``: torch chains a hook for every process group, so that ours is rarely
    # the outermost.
    if _hook is None:
        _hook = sys.excepthook = _chain(sys.excepthook)
        threading.excepthook = _chain_of_threads(threading.excepthook)


def finish() -> None:
    """Let the other ranks see that this one ends well, and was not lost."""
    for speaker in list(_speakers):
        speaker.finish()


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


def _forget_ours(error: BaseException) -> None:
    """Leave of the exceptions that led to ``error`` only those that the user's code has seen."""
    first = earlier = _before(error)
    # An error may lead back to itself, if an exception that was raised before is raised again.
    looked_at = {id(error)}
    while earlier is not None and not has_user_frames(earlier.__traceback__):
        looked_at.add(id(earlier))
        earlier = _before(earlier)
        if id(earlier) in looked_at:
            earlier = None
    if earlier is not first:
        error.__cause__ = None
        error.__context__, error.__suppress_context__ = earlier, earlier is None


def _before(error: BaseException) -> BaseException | None:
    """The exception that Python shows before ``error``."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _chain(before: ExceptHook) -> ExceptHook:
    """A hook that sends the news, then calls ``before``.

    The traceback of an error of ours is shortened. If another rank caused it, it is shown when that rank has ended or
    after `LINGER_S`.
    """

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if os.getpid() != _pid:
            # This exception ends a fork of the rank. Neither the other ranks nor torchrun are to hear of it.
            before(kind, error, traceback)
            return
        own_files.keep = True
        is_interrupt = isinstance(error, KeyboardInterrupt)
        if not isinstance(error, PeerError):
            for speaker in list(_speakers):
                # The person must get to read the first cause, whatever happens here.
                with contextlib.suppress(Exception):
                    # A Ctrl-C mostly means every rank. News that is not final gives the others time to get their own.
                    speaker.report("its program", error, final=not is_interrupt)
        if is_interrupt:
            # One line, and no traceback: every rank says it at the same time.
            error.args = error.args or (f"at {line_of_traceback(traceback)}",)
            error.__cause__, error.__suppress_context__ = None, True
            traceback = error.__traceback__ = None
        if isinstance(error, PacelineError):
            # Frames of torch and of Paceline help nobody here.
            _forget_ours(error)
            traceback = error.__traceback__ = user_frames(traceback)
        if isinstance(error, PeerError):
            # The others are not told, because this error is an echo.
            deadline = time.monotonic() + LINGER_S
            for speaker in list(_speakers):
                # The rank that failed first should print first and end first.
                with contextlib.suppress(Exception):
                    speaker.linger(error.rank, deadline=deadline)
        if isinstance(error, DisagreementError) and error.shown_by is not None:
            before(kind, kind(f"Rank {error.shown_by} raises the same error, and shows it."), None)
        else:
            before(kind, error, traceback)
        if isinstance(error, PeerError):
            # This waits until the program does end, because an interactive prompt calls this hook too, and goes on.
            atexit.register(_end_soon)
        else:
            _tell_torchrun(error)

    return hook


def _chain_of_threads(before: Callable[[threading.ExceptHookArgs], object]) -> Callable[..., object]:
    """As `_chain`, for an exception that ends a thread: the others hear of it if the thread trains.

    The process lives on, and may train again in another thread. So this news is not final: the others wait a second,
    in which it can be taken back.
    """

    def hook(args: threading.ExceptHookArgs) -> None:
        error, thread = args.exc_value, args.thread
        trains = [each for each in list(_speakers) if thread and each.progress.trainer.thread == thread.ident]
        if os.getpid() == _pid and error is not None and not isinstance(error, (PeerError, SystemExit)):
            for speaker in trains:
                with contextlib.suppress(Exception):
                    speaker.report("its program", error)
        if trains and isinstance(error, PacelineError):
            _forget_ours(error)
            error.__traceback__ = user_frames(args.exc_traceback)
            args = threading.ExceptHookArgs((args.exc_type, error, error.__traceback__, thread))
        before(args)

    return hook
