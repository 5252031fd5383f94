"""Finds what some releases of torch call by another name.

To replace a method that torch does not call is the worst that can happen: nothing fails, and what the method was to do
is not done. So a name is looked up before it is replaced, and it is an error if no candidate is there.
"""

from __future__ import annotations

from typing import Any


def name_in(owner: Any, *names: str) -> str:
    """The first of ``names`` that ``owner``, a module or a class, has."""
    for name in names:
        if hasattr(owner, name):
            return name
    raise AttributeError(f"{owner.__name__} has no {' or '.join(names)}")


def found_in(owner: Any, *names: str) -> Any:
    """What ``owner`` has by the first of ``names`` that it has."""
    return getattr(owner, name_in(owner, *names))
