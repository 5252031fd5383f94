"""A channel's part of the store: messages that are put up under a key, and read where they are expected."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.control import wire
from paceline.control.store_thread import StoreThread
from paceline.control.wire import Field, MessageKind

T = TypeVar("T")

# How often a message is put up against bytes that are none. Each time, somebody must have written new ones.
_ATTEMPTS = 5


class Board:
    """Sealed messages by key. Bytes that are not a message, or not the one for this key, count as absent."""

    def __init__(
        self, store: dist.Store, *, name: str, store_thread: StoreThread | None = None, own_connection: bool = False
    ) -> None:
        """``name`` tells this board from others of the job, so that a message of one is refused by another."""
        self.store: Any = store  # torch's stubs know text only, and stores take bytes
        self.name = name
        self._store_thread = store_thread or StoreThread()
        self._own_connection = own_connection
        self._reader = wire.Reader()

    def on_another_connection(self, store_thread: StoreThread) -> Board:
        """The same board for another thread, which must not wait while this one does.

        It connects when it is first used: torch asks the name server about every connection, and that may take seconds.
        """
        return Board(self.store, name=self.name, store_thread=store_thread, own_connection=True)

    def in_one_go(self, call: Callable[..., T], *args: Any) -> T:
        """Run ``call(*args)``, which asks the board several things, with one hand-over to the store's thread."""
        return self._store_thread.run(call, *args)

    def _ask(self, what: str, *args: Any) -> Any:
        """Call a method of the store; raises ``StoreSilentError`` if the store does not answer."""
        return self._store_thread.run(self._call, what, *args)

    def _call(self, what: str, *args: Any) -> Any:
        if self._own_connection:
            # Not every store can be cloned. If this one cannot, the threads take turns.
            self._own_connection = False
            with contextlib.suppress(RuntimeError):
                self.store = self.store.clone()
        return getattr(self.store, what)(*args)

    def put(self, key: str, kind: MessageKind, *fields: Field) -> None:
        """Put up a message, in place of what was there."""
        self.set(key, wire.encode(kind, *fields, place=f"{self.name}/{key}"))

    def set(self, key: str, message: bytes) -> None:
        """Put up a message that is encoded already."""
        self._ask("set", key, message)

    def get(self, key: str) -> bytes | None:
        """The bytes under ``key``; None if there are none, or the message was taken back."""
        return (self.has(key) and self._ask("get", key)) or None

    def put_first(self, key: str, kind: MessageKind, *fields: Field) -> tuple[Field, ...] | None:
        """Put up a message, unless there is one already, which then stays. Returns the one that is there.

        Bytes that are refused do not count as a message, and give way. It returns None if others come all the time.
        """
        place = f"{self.name}/{key}"
        mine = wire.encode(kind, *fields, place=place)
        there = b""
        for _ in range(_ATTEMPTS):
            there = self._ask("compare_set", key, there, mine)
            found = self._reader.read(kind, there, place=place)
            if found is not None:
                return found
        return None

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter ``key``, and return its new value."""
        return int(self._ask("add", key, amount))

    def blank(self, key: str) -> None:
        """Take a message back. The key stays, because another rank may be about to read it, and would wait for it."""
        self._ask("set", key, "")

    def is_blank(self, key: str) -> bool:
        """Whether there was a message that was taken back."""
        return self.has(key) and not self._ask("get", key)

    def delete(self, key: str) -> None:
        """Remove what nobody will read any more, if the store can."""
        with contextlib.suppress(RuntimeError):
            self._ask("delete_key", key)

    def has(self, *keys: str) -> bool:
        """Whether there is something under every key."""
        return bool(self._ask("check", list(keys)))

    def read(self, key: str, kind: MessageKind) -> tuple[Field, ...] | None:
        """The message under ``key``; None if there is none, it was taken back, or it is refused."""
        return self.in_one_go(self._read, key, kind)

    def _read(self, key: str, kind: MessageKind) -> tuple[Field, ...] | None:
        data = self.get(key)
        return self._reader.read(kind, data, place=f"{self.name}/{key}") if data else None
