"""What a test of the transport needs of the machine, asked once and said in the reason for a skip."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def _why_not() -> str | None:
    from paceline.transport.shm import kernel

    return kernel.reason_unavailable()


def needs_shm() -> None:
    """Skip where the kernel could not be built: the package promises to install and work there, over gloo."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(f"no shared-memory transport here: {reason}")


def needs_hosts() -> None:
    """Skip where no hosts can be made of namespaces, or their ranks could not share memory."""
    from tests.transport._hosts import why_no_hosts

    needs_shm()
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(f"no hosts to test with: {reason}")
