"""Tests that torch's class passes here and ours does not, on purpose: name -> reason.

The run fails when a test of this list starts to pass, so the list can't go stale.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {}
