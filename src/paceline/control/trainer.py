"""Where a rank trains: the thread that calls the wrapper, and the user's function at the bottom of its stack.

That is the main thread in a plain script. Frameworks train in a thread of their own (Ray does), or call the user's
function from a main thread that goes on afterwards. They also catch what the function raises, so that no hook of the
interpreter hears of it. A rank whose training function has ended will not come to the next collective, and here is how
that shows: no frame of the user's is left on the thread.

Nothing here costs a step more than the thread's number; the stack is looked at by the watch (`control.hang`).
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType

from paceline.control.user_code import is_user_code

# Between two calls into the user's code a framework may be at its own for a moment.
_LOOKS = 2


class Trainer:
    """The thread that trains, as the watch sees it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._entry = _entry_of(inspect.currentframe())
        """The code of the outermost function of the user's. None if the thread has not run any yet."""
        self._looks_without = 0

    def note(self) -> None:
        """The calling thread trains."""
        self.thread = threading.get_ident()

    def frame(self) -> FrameType | None:
        """What the thread runs; None if it has ended."""
        return sys._current_frames().get(self.thread)

    def look(self) -> bool:
        """Look at the thread; returns whether it has just been found to have left the user's code."""
        entry = _entry_of(self.frame())
        if entry is not None:
            self._entry, self._looks_without = entry, 0
        elif self._entry is not None:
            self._looks_without += 1
        return self._looks_without == _LOOKS

    def where(self) -> str:
        """Where the thread is, if it is no longer in the user's code; empty otherwise."""
        if self._entry is None:
            return ""
        if (frame := self.frame()) is None:
            return "no code of its program: the thread that trained has ended"
        return "" if _entry_of(frame) else "no code of its program: the function that trained has returned or raised"

    def held_exception(self) -> Exception | None:
        """What the training function has raised, if whoever caught it still holds it."""
        for item in gc.get_objects():
            # ``isinstance`` would ask proxies for their class, which may raise.
            if issubclass(type(item), Exception) and self._has_ended_training(item):
                return item
        return None

    def _has_ended_training(self, error: Exception) -> bool:
        """Whether ``error`` has left the user's outermost function, and was not caught in it."""
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        # A traceback begins with the frame that has caught the exception. It is not the user's, if it left that one.
        return any(frame.f_code is self._entry and not _is_running(frame) for frame in frames[1:])


def _entry_of(frame: FrameType | None) -> CodeType | None:
    if frame is None:
        return None
    codes = [entry.f_code for entry, _ in walk_stack(frame) if is_user_code(entry.f_code.co_filename)]
    return codes[-1] if codes else None


def _is_running(frame: FrameType) -> bool:
    return any(frame is other for top in sys._current_frames().values() for other, _ in walk_stack(top))
