"""Being told how a backward ends: by reaching its end, or by an exception."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from paceline import _torch


class Watcher(Protocol):
    def end_backward(self) -> None:
        """The outermost backward has ended."""

    def interrupt_backward(self) -> None:
        """The backward raised."""


class BackwardWatch:
    """Called by the engine when a backward has ended; dropped by it uncalled when that backward raised."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = weakref.ref(watcher)
        self._dropped = weakref.finalize(self, _interrupted, self._watcher)
        self._dropped.atexit = False

    def start(self) -> None:
        """Watch the backward that runs now; must be called from inside it."""
        _torch.queue_callback(self)

    @_torch.unseen_by_compiler
    def __call__(self) -> None:
        outer = _torch.current_node()
        if outer is not None:
            # This backward ran inside a node of another one (reentrant checkpointing): wait for that one.
            # The node's own hook runs in the outer backward, where the engine takes our callback.
            @_torch.unseen_by_compiler
            def requeue(*_: object) -> None:
                handle.remove()
                _torch.queue_callback(self)

            handle: RemovableHandle = outer.register_hook(requeue)
            return
        self._dropped.detach()
        watcher = self._watcher()
        if watcher is not None:
            watcher.end_backward()


@_torch.unseen_by_compiler
def _interrupted(ref: weakref.ref[Watcher]) -> None:
    watcher = ref()
    if watcher is not None:
        watcher.interrupt_backward()
