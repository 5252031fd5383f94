"""Ranks that let through what torch's compiler warns of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.testing import RankPool

# Its inductor imports a part of torch that is deprecated; its graphs after a break look at .grad of their inputs.
WARNINGS = (
    ("`torch.jit", DeprecationWarning),
    ("The .grad attribute of a Tensor that is not a leaf", UserWarning),
)


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    def run(
        fn: Callable[..., Any],
        *args: Any,
        allow_warnings: tuple[Any, ...] = (),
        timeout: float = 180,
        **options: Any,
    ) -> list[Any]:
        return rank_pool.run(fn, *args, allow_warnings=WARNINGS + allow_warnings, timeout=timeout, **options)

    return run
