"""Which parameters a graph is called with.

[Note: graphs do not know their parameters]
Dynamo compares shapes, not identities: blocks of one class run the same graph, and a parameter may be replaced. So a
tap names entries in the list of the graph's parameters. Which parameters they are is told by one more input: a
number that goes with the call through forward to its backward. Compiled code knows nothing of a wrapper, so it is the
same for any block, for any wrapper, and in the caches of any rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Binding:
    """The parameters of a call, in the order of the list. It holds them weakly, since graphs outlive wrappers."""

    def __init__(self, params: Sequence[Tensor], on_death: Callable[[object], None]) -> None:
        self._params = [weakref.ref(param, on_death) for param in params]
        number = next(_numbers)
        # It is a tensor, since compilers turn integers into constants, and on the CPU, since every report reads it.
        self.number = torch.tensor(number, device="cpu")
        _bindings[number] = self

    def params(self, entries: Sequence[int]) -> list[Tensor] | None:
        """The parameters of these entries; None if one of them is gone."""
        found = [param for param in (self._params[entry]() for entry in entries) if param is not None]
        return found if len(found) == len(entries) else None


_numbers = itertools.count()
_bindings: weakref.WeakValueDictionary[int, Binding] = weakref.WeakValueDictionary()


def find(number: int) -> Binding | None:
    """The binding with this number; None if its graph or one of its parameters is gone."""
    return _bindings.get(number)


class Bindings:
    """The bindings of one graph, whose inputs at ``positions`` are parameters."""

    def __init__(self, positions: Sequence[int]) -> None:
        self._positions = positions
        self._known: dict[tuple[int, ...], Binding] = {}

    def number(self, args: Sequence[Any]) -> Tensor:
        """The number for a call with these arguments: the same for the same parameters."""
        params = [args[position] for position in self._positions]
        ids = tuple(map(id, params))
        known = self._known.get(ids)
        if known is None:
            known = self._known[ids] = Binding(params, self._forgetting(ids))
        return known.number

    def _forgetting(self, ids: tuple[int, ...]) -> Callable[[object], None]:
        """A callback that forgets a binding, since another tensor may get the id of a parameter that is gone."""
        ref = weakref.ref(self)

        def forget(_: object) -> None:
            bindings = ref()
            if bindings is not None:
                bindings._known.pop(ids, None)

        return forget
