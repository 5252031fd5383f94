"""A channel's part of the store: messages that are put up under a key, and read where they are expected."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch.distributed as dist

from paceline.control import wire
from paceline.control.wire import BadMessageError, Field, Kind

_log = logging.getLogger("paceline.control")


class Board:
    """Sealed messages by key. What is no message, or not the one that belongs under a key, counts as not there."""

    def __init__(self, store: dist.Store, *, name: str, own_connection: bool = False) -> None:
        """``name`` tells this board from others of the job, so that a message of one is refused by another."""
        self._store: Any = store
        self._own_connection = own_connection
        self.name = name
        self._refused: set[str] = set()

    @property
    def store(self) -> Any:  # torch's stubs know text only, and stores take bytes
        if self._own_connection:
            # Not every store can; then the threads take turns.
            self._own_connection = False
            with contextlib.suppress(RuntimeError):
                self._store = self._store.clone()
        return self._store

    def on_another_connection(self) -> Board:
        """The same board for another thread, which must not wait while this one does.

        It connects when it is first used, on that thread: torch asks the name server about every connection, and that
        may take seconds.
        """
        return Board(self._store, name=self.name, own_connection=True)

    def put(self, key: str, kind: Kind, *fields: Field) -> None:
        self.store.set(key, wire.encode(kind, *fields, place=f"{self.name}/{key}"))

    def put_first(self, key: str, kind: Kind, *fields: Field) -> None:
        """Put it up unless there is something already, which then stays."""
        self.store.compare_set(key, "", wire.encode(kind, *fields, place=f"{self.name}/{key}"))

    def blank(self, key: str) -> None:
        """Take a message back. Not deleted: another rank may be about to read it, and would wait for it."""
        self.store.set(key, "")

    def is_blank(self, key: str) -> bool:
        """Whether there was a message, which was taken back."""
        return self.has(key) and not self.store.get(key)

    def delete(self, key: str) -> None:
        """Remove what nobody will read any more, if the store can."""
        with contextlib.suppress(RuntimeError):
            self.store.delete_key(key)

    def has(self, *keys: str) -> bool:
        """Whether there is something under every key."""
        return bool(self.store.check(list(keys)))

    def read(self, key: str, kind: Kind) -> tuple[Field, ...] | None:
        """The message under ``key``; None if there is none, it was taken back, or it is refused."""
        if not self.has(key):
            return None
        data: bytes = self.store.get(key)
        if not data:
            return None
        try:
            return wire.decode(kind, data, place=f"{self.name}/{key}")
        except BadMessageError as error:
            # Once for a key, and for some keys only: who fills the store with garbage must not fill the log.
            if key not in self._refused and len(self._refused) < 16:
                self._refused.add(key)
                _log.warning("A message on the control channel was refused (%s): %s.", key, error)
            return None
