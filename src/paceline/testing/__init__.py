"""Tools for testing data-parallel code: a pool of live ranks, and faults that follow a script.

- ``pool``: ``RankPool`` keeps rank processes alive between tests, so that torch is imported once and a
  run of a small function on two ranks takes milliseconds.
- ``faults``: ``fail_at(rank=1, step=2, phase="backward")`` makes one rank fail at one point.
"""

from __future__ import annotations

from paceline.testing.faults import Fault, InjectedFaultError, fail_at
from paceline.testing.pool import RankError, RankFailure, RankPool

__all__ = ["Fault", "InjectedFaultError", "RankError", "RankFailure", "RankPool", "fail_at"]
