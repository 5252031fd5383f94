"""A process that a rank forks is not the rank, although it has a copy of all its objects.

It has none of the rank's threads, but shares its connections and whatever memory it maps as a file. So it takes part in
nothing that ranks do together. It hears of the fork here before it runs anything else, so that no step has to ask.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from paceline.errors import StateError


class Owned(Protocol):
    """What belongs to the process that made it."""

    def become_fork(self) -> None:
        """This process is a fork of the owner. Only the thread that forked is running."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def tell(owned: Owned) -> None:
    """Have ``owned`` hear of it in every process that this one forks while it is alive."""
    _owned.add(owned)


def refusal(who: str) -> StateError:
    """The error of a fork that is about to act as ``who``, whom it is a fork of."""
    return StateError(
        f"This process ({os.getpid()}) is a fork of {who}, and not a rank itself: what ranks do together, and their "
        "store, are not for it. It may call the wrapped module itself (`ddp.module`) without gradients. To train here, "
        "start the process afresh (multiprocessing's 'spawn') and have it join a group of its own."
    )


def _become_fork() -> None:
    global _owned
    # A fork of this fork hears only of what this one makes itself: the rest has heard already.
    owned, _owned = list(_owned), weakref.WeakSet()
    for each in owned:
        each.become_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_fork)
