"""Which of several wrappers of one parameter reduces it: the one in use.

A module may be wrapped anew, or a wrapper wrapped again; each has hooks on the parameters they share, and only one of
them may take a gradient.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

from paceline.reducer import Reducer

# By order of creation, so that all ranks go through them alike.
_live: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enter(reducer: Reducer) -> None:
    """A wrapper has been made: from now on it has the parameters that it shares with others."""
    _live[next(_numbers)] = reducer
    take_over(reducer)
    weakref.finalize(reducer, _give_back).atexit = False


def live() -> Sequence[Reducer]:
    """The reducers of all wrappers that there are, by order of creation."""
    return list(_live.values())


def take_over(reducer: Reducer) -> None:
    """This wrapper is the one in use: others that share parameters with it leave those to it."""
    for other in list(_live.values()):
        if other is not reducer:
            other.slots.yield_to(reducer.slots)


def _give_back() -> None:
    """A wrapper is gone: parameters that it had taken over go to one that is left."""
    taken: set[int] = set()
    for reducer in list(_live.values()):
        taken |= reducer.slots.owned_ids()
    for reducer in list(_live.values()):
        taken |= reducer.slots.own_all_but(taken)
