"""Kernels of Inductor's that are compiled beside what else is to be done."""

from __future__ import annotations

import concurrent.futures
import threading

from torch._inductor.async_compile import AsyncCompile

from paceline import _torch


def _scopes(n):
    """Names of Inductor's whose kernels are compiled, but were not waited for."""
    scopes = [{"kernel": concurrent.futures.Future()} for _ in range(n)]
    for scope in scopes:
        scope["kernel"].set_result("compiled")
    return scopes


def test_only_the_thread_that_compiles_postpones_to_wait_for_kernels():
    mine, theirs = _scopes(2)
    with _torch.kernels_beside():
        AsyncCompile().wait(mine)
        other = threading.Thread(target=AsyncCompile().wait, args=(theirs,))
        other.start()
        other.join()
        assert theirs == {"kernel": "compiled"}
        assert mine != {"kernel": "compiled"}
    assert mine == {"kernel": "compiled"}


def test_a_context_that_postpones_inside_another_waits_for_its_own():
    outer, inner, late = _scopes(3)
    torchs = AsyncCompile.wait
    with _torch.kernels_beside():
        AsyncCompile().wait(outer)
        with _torch.kernels_beside():
            AsyncCompile().wait(inner)
        assert inner == {"kernel": "compiled"}
        AsyncCompile().wait(late)
        assert outer != {"kernel": "compiled"} != late
    assert outer == late == {"kernel": "compiled"}
    assert AsyncCompile.wait is torchs
