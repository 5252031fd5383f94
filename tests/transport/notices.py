"""``notices``: what the package warns of while a rank does something."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Notices(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def notices() -> Iterator[list[str]]:
    """What the package warns of."""
    handler = _Notices()
    logging.getLogger("paceline").addHandler(handler)
    try:
        yield handler.said
    finally:
        logging.getLogger("paceline").removeHandler(handler)
