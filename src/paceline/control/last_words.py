"""What a rank says when an exception ends its program, wherever it came from.

The wrapper itself sees exceptions in forward and in backward. One in the loss function, the data loader or the
optimizer it never meets; but if nobody catches it the interpreter calls ``sys.excepthook``, and from there the
other ranks hear of it at once instead of when the process, which may take its time, has ended.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from paceline.errors import PeerError

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Speaker(Protocol):
    def report(self, where: str, error: BaseException | None, *, final: bool = False) -> None:
        """Tell the other ranks that this one raised."""


_speakers: weakref.WeakSet[Speaker] = weakref.WeakSet()


_hook: ExceptHook | None = None


def speak_for(speaker: Speaker) -> None:
    """Have ``speaker`` report the exception that ends this program, if one does while it is alive."""
    global _hook
    _speakers.add(speaker)
    # Not at import: a program that wraps nothing keeps its hook. And once only: torch chains one of its own for every
    # process group, so that ours is rarely the outermost.
    if _hook is None:
        _hook = sys.excepthook = _chain(sys.excepthook)


def _chain(before: ExceptHook) -> ExceptHook:
    """``before`` with the news sent first."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # An error that another rank caused is an echo; and whoever pressed Ctrl-C means every rank.
        if not issubclass(kind, (PeerError, KeyboardInterrupt)):
            for speaker in list(_speakers):
                # The person must get to read the first cause, whatever happens here.
                with contextlib.suppress(Exception):
                    speaker.report("its program", error, final=True)
        before(kind, error, traceback)

    return hook
