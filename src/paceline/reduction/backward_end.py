"""The moment at which a backward ends: the engine has come to its end, or an exception has ended it."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from paceline import _torch


class Owner(Protocol):
    """The object that runs each backward, and hears of its end."""

    def backward_ended(self) -> None:
        """No more gradients will come."""

    def backward_raised(self) -> None:
        """An exception ended the backward."""


class BackwardEnd:
    """The engine calls it when a backward has ended, and drops it uncalled when that backward raised."""

    def __init__(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)
        self._dropped = weakref.finalize(self, _interrupted, self._owner)
        self._dropped.atexit = False

    def wait_for(self) -> None:
        """Wait for the end of the backward that runs now; must be called from inside it."""
        _torch.queue_callback(self)

    @_torch.unseen_by_compiler
    def __call__(self) -> None:
        outer = _torch.current_node()
        if outer is not None:
            # This backward ran inside a node of another one (reentrant checkpointing): wait for the outer one. The
            # node's own hook runs in the outer backward, where the engine takes our callback.
            @_torch.unseen_by_compiler
            def requeue(*_: object) -> None:
                handle.remove()
                _torch.queue_callback(self)

            handle: RemovableHandle = outer.register_hook(requeue)
            return
        self._dropped.detach()
        owner = self._owner()
        if owner is not None:
            owner.backward_ended()


@_torch.unseen_by_compiler
def _interrupted(ref: weakref.ref[Owner]) -> None:
    owner = ref()
    if owner is not None:
        owner.backward_raised()
