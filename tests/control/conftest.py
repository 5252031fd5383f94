"""Fixtures of the control plane's tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that any signal of ours would end."""
    with subprocess.Popen(["sleep", "600"]) as started:
        try:
            yield started
        finally:
            started.kill()
