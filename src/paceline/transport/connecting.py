"""Making a backend, which waits for other ranks in C++, with an ear for those that will never come.

A rank that dies meanwhile would be waited for until the group's time-out is over, half an hour say. So a thread makes
the backend, and the caller listens to the lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from paceline.transport.lines import Lines

# Nearly always all come at once, and nobody has to be asked: that starts a thread a rank.
_PATIENCE_S = 1.0
_PAUSE_S = 0.05


def connect(make: Callable[[], Any], lines: Lines) -> Any:
    """What ``make`` gives or raises; or the error of a rank that is gone, or has told why it failed.

    Then the thread is left behind, and ends with the time-out of what it waits for.
    """
    outcome: futures.Future[Any] = futures.Future()
    # Not one of an executor, which the end of the program would wait for.
    threading.Thread(target=_run, args=(make, outcome), name="paceline-connecting", daemon=True).start()
    began = time.monotonic()
    while not futures.wait([outcome], _PAUSE_S).done:
        found = lines.find(0) if time.monotonic() - began > _PATIENCE_S else None
        if found is not None:
            raise found.error()
    return outcome.result()


def _run(make: Callable[[], Any], outcome: futures.Future[Any]) -> None:
    try:
        outcome.set_result(make())
    except BaseException as error:
        outcome.set_exception(error)
