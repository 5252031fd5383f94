"""Ranks compile together over a group whose ``wait()`` returns at once, as those of accelerators do."""

from __future__ import annotations

import pytest
import torch

import paceline
from tests.control._streams import join_streams
from tests.on_ranks import on_ranks


@pytest.mark.timeout(300)
@on_ranks(timeout=180)
def test_ranks_compile_together(rank: int, size: int) -> None:
    """Ranks that see different sizes agree on what is dynamic, over a group of the agreement's own."""
    torch._dynamo.reset()
    group = join_streams()
    compiled = torch.compile(lambda x: x.sin().sum(), backend="eager")
    with paceline.compiler.agreement(True, group=group) as agreed:
        for n in ([3, 3, 7], [4, 9, 9])[rank]:
            compiled(torch.ones(n))
    (made,) = agreed.compilations
    assert not made.difference
