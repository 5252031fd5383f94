"""Which thread runs the backward of a wrapper: two threads must not run two of its backwards at the same time.

[Note: two backwards at a time]
Autograd adds the gradients of both to the same ``param.grad``, and the wrapper takes it away into a bucket meanwhile.
What came of which backward cannot be told apart then, so the thread that comes second raises, and the backward of the
first one raises at its end, since some of its gradients may be those of the other. Backwards that follow one another
may each be on a thread of their own.

Autograd runs the nodes of the CPU on the thread that called ``backward()``. Those of an accelerator run on a thread of
that device, whoever called, so this is checked only if all parameters are on the CPU.
"""

from __future__ import annotations

import threading

from paceline.errors import StateError


class OneThread:
    """The thread that runs the backward of one wrapper."""

    def __init__(self) -> None:
        self.applies = False
        """Whether a backward brings all its gradients on the thread that called it."""
        self.ident = 0
        """The thread whose backward runs; 0 between backwards."""
        self.crossed = ""
        """What to say about two threads that were in a backward at the same time. The text is empty as a rule."""

    def enter(self) -> None:
        """The thread that runs now takes part in a backward. It must be the only one."""
        if not self.applies:
            return
        ident = threading.get_ident()
        if not self.ident:
            self.ident = ident
        elif ident != self.ident and (name := _name_of(ident)):
            self.crossed = (
                "Two backwards went through this wrapper at the same time, on the threads "
                f"{_name_of(self.ident)!r} and {name!r}. Their gradients cannot be told apart, and those of both are "
                "lost. Run one after the other, for example with a threading.Lock() around each backward()."
            )
            raise StateError(self.crossed)

    def check(self) -> None:
        """Raise if another thread has come meanwhile."""
        if self.crossed:
            raise StateError(self.crossed)

    def leave(self) -> None:
        """The backward has ended. It raises if another thread has come meanwhile."""
        self.ident = 0
        self.check()


def _name_of(ident: int) -> str:
    """The name of a thread that Python started. It is empty for one that autograd made for deeply nested backwards."""
    # Python calls threads that it has not started itself "Dummy-1" and so on, if it knows them at all.
    found = (each.name for each in threading.enumerate() if each.ident == ident)
    return next((name for name in found if not name.startswith("Dummy-")), "")
