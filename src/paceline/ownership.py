"""Which of several wrappers of one parameter reduces it: the one in use.

A module may be wrapped anew, or a wrapper wrapped again; each has hooks on the parameters they share, and only one of
them may take a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from paceline.reducer import Reducer

# By order of creation, so that all ranks go through them alike. A list, since compiled backwards look through it at
# every report: the processor's caches are cold then, and to go through a WeakValueDictionary takes 30 us.
_live: list[weakref.ref[Reducer]] = []


def enter(reducer: Reducer) -> None:
    """A wrapper has been made: from now on it has the parameters that it shares with others."""
    _live.append(weakref.ref(reducer, _live.remove))
    take_over(reducer)
    weakref.finalize(reducer, _give_back).atexit = False


def live() -> Sequence[Reducer]:
    """The reducers of all wrappers that there are, by order of creation."""
    # A copy: one that dies meanwhile takes itself out of the list.
    return [reducer for ref in tuple(_live) if (reducer := ref()) is not None]


def take_over(reducer: Reducer) -> None:
    """This wrapper is the one in use: others that share parameters with it leave those to it."""
    for other in live():
        if other is not reducer:
            other.slots.yield_to(reducer.slots)


def _give_back() -> None:
    """A wrapper is gone: parameters that it had taken over go to one that is left."""
    taken: set[int] = set()
    for reducer in live():
        taken |= reducer.slots.owned_ids()
    for reducer in live():
        taken |= reducer.slots.own_all_but(taken)
