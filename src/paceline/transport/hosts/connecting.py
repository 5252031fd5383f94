"""Makes a backend on a thread, while the caller listens for reports of ranks that will never come.

torch makes a backend in C++, and waits there for all ranks. It would wait for a rank that dies meanwhile until the
group's time-out is over, which may be half an hour. So a thread makes the backend, and the caller listens for reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from paceline import threads
from paceline.transport.hosts.peer_reports import PeerReports

# Nearly always all ranks come at once. Listening takes a thread for each rank, so it begins only after this time.
_PATIENCE_S = 1.0
_PAUSE_S = 0.05
# A backend that is being made cannot be told to stop. If all ranks come, making it takes less than this.
_END_S = 1.0


def connect(make: Callable[[], Any], reports: PeerReports) -> Any:
    """Return what ``make`` returns, or raise the error of a rank that is gone or has told why it failed.

    If such an error is raised, the thread is left behind. It ends with the time-out of what it waits for.
    """
    outcome = threads.outcome_of(make, name="connecting", within_s=_END_S)
    began = time.monotonic()
    while not futures.wait([outcome], _PAUSE_S).done:
        found = reports.find(0) if time.monotonic() - began > _PATIENCE_S else None
        if found is not None:
            raise found.error()
    return outcome.result()
