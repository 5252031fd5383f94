"""What a test of the transport needs of the machine; a test that is skipped says what is missing."""

from __future__ import annotations

import pytest


def needs_shm() -> None:
    """Skip where the kernel could not be built: the package promises to install and work there, over gloo."""
    from paceline.transport.shm import kernel

    reason = kernel.reason_unavailable()
    if reason is not None:
        pytest.skip(f"no shared-memory transport here: {reason}")


def needs_hosts() -> None:
    """Skip where no hosts can be made of namespaces, or their ranks could not share memory."""
    from tests.transport._hosts import why_no_hosts

    needs_shm()
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(f"no hosts to test with: {reason}")
