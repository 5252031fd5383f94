"""A channel's part of the store: messages that are put up under a key, and read where they are expected."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.control import wire
from paceline.control.errands import Errands
from paceline.control.wire import BadMessageError, Field, Kind

T = TypeVar("T")

_log = logging.getLogger("paceline.control")


class Board:
    """Sealed messages by key. What is no message, or not the one that belongs under a key, counts as not there."""

    def __init__(
        self, store: dist.Store, *, name: str, errands: Errands | None = None, own_connection: bool = False
    ) -> None:
        """``name`` tells this board from others of the job, so that a message of one is refused by another."""
        self.store: Any = store  # torch's stubs know text only, and stores take bytes
        self.name = name
        self._errands = errands or Errands()
        self._own_connection = own_connection
        self._refused: set[str] = set()

    def on_another_connection(self, errands: Errands) -> Board:
        """The same board for another thread, which must not wait while this one does.

        It connects when it is first used: torch asks the name server about every connection, and that may take seconds.
        """
        return Board(self.store, name=self.name, errands=errands, own_connection=True)

    def in_one_go(self, call: Callable[..., T], *args: Any) -> T:
        """``call(*args)``, which asks the board several things: together they cost the hand-over of one."""
        return self._errands.run(call, *args)

    def _ask(self, what: str, *args: Any) -> Any:
        """Every call of the store's; raises ``StoreSilentError`` if it does not answer."""
        return self._errands.run(self._call, what, *args)

    def _call(self, what: str, *args: Any) -> Any:
        if self._own_connection:
            # Not every store can; then the threads take turns.
            self._own_connection = False
            with contextlib.suppress(RuntimeError):
                self.store = self.store.clone()
        return getattr(self.store, what)(*args)

    def put(self, key: str, kind: Kind, *fields: Field) -> None:
        self._ask("set", key, wire.encode(kind, *fields, place=f"{self.name}/{key}"))

    def put_first(self, key: str, kind: Kind, *fields: Field) -> None:
        """Put it up unless there is something already, which then stays."""
        self._ask("compare_set", key, "", wire.encode(kind, *fields, place=f"{self.name}/{key}"))

    def add(self, key: str, amount: int) -> int:
        """Count ``key`` up, and return what it is then."""
        return int(self._ask("add", key, amount))

    def blank(self, key: str) -> None:
        """Take a message back. Not deleted: another rank may be about to read it, and would wait for it."""
        self._ask("set", key, "")

    def is_blank(self, key: str) -> bool:
        """Whether there was a message, which was taken back."""
        return self.has(key) and not self._ask("get", key)

    def delete(self, key: str) -> None:
        """Remove what nobody will read any more, if the store can."""
        with contextlib.suppress(RuntimeError):
            self._ask("delete_key", key)

    def has(self, *keys: str) -> bool:
        """Whether there is something under every key."""
        return bool(self._ask("check", list(keys)))

    def read(self, key: str, kind: Kind) -> tuple[Field, ...] | None:
        """The message under ``key``; None if there is none, it was taken back, or it is refused."""
        return self.in_one_go(self._read, key, kind)

    def _read(self, key: str, kind: Kind) -> tuple[Field, ...] | None:
        if not self.has(key):
            return None
        data: bytes = self._ask("get", key)
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
