"""Which of several wrappers of one parameter reduces it: the one in use.

A module may be wrapped anew, or a wrapper may be wrapped again. Each wrapper has hooks on the parameters that they
share, and only one of them may take a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from paceline.reduction.reducer import Reducer

# The order is that of creation, so that all ranks go through them alike. It is a list, since compiled backwards look
# through it at every report: the processor's caches are cold then, and a WeakValueDictionary would take 30 us.
_live: list[weakref.ref[Reducer]] = []


def enter(reducer: Reducer) -> None:
    """Give a new wrapper the parameters that it shares with others."""
    _live.append(weakref.ref(reducer, _live.remove))
    take_over(reducer)


def live() -> Sequence[Reducer]:
    """The reducers of all wrappers that there are, by order of creation."""
    # This goes through a copy, since a reducer that dies meanwhile takes itself out of the list.
    return [reducer for ref in tuple(_live) if (reducer := ref()) is not None]


def take_over(reducer: Reducer) -> None:
    """Give this wrapper, which is in use, the parameters that it shares with others."""
    taken = reducer.inbox.take_over()
    for other in live():
        if other is not reducer:
            other.slots.leave(taken)
