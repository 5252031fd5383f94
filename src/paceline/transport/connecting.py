"""Making a backend, which waits for other ranks in C++, with an ear for those that will never come.

A rank that dies meanwhile would be waited for until the group's time-out is over, half an hour say. So a thread makes
the backend, and the caller listens to the lines.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.transport.lines import Lines

# Nearly always all come at once, and nobody has to be asked: that starts a thread a rank.
_PATIENCE_S = 1.0
_PAUSE_S = 0.05


def connect(make: Callable[[], Any], lines: Lines) -> Any:
    """What ``make`` gives or raises; or the error of a rank that is gone, or has told why it failed.

    Then the thread is left behind, and ends with the time-out of what it waits for.
    """
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=_run, args=(make, outcome), name="paceline-connecting", daemon=True).start()
    began = time.monotonic()
    while True:
        try:
            made, error = outcome.get(timeout=_PAUSE_S)
        except queue.Empty:
            found = lines.find(0) if time.monotonic() - began > _PATIENCE_S else None
            if found is not None:
                raise found.error() from None
            continue
        if error is not None:
            raise error
        return made


def _run(make: Callable[[], Any], outcome: queue.SimpleQueue[tuple[Any, BaseException | None]]) -> None:
    try:
        outcome.put((make(), None))
    except BaseException as error:
        outcome.put((None, error))
