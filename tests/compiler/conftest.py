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
# Under load the machine takes its time. This is less than pytest allows, so that the stacks of stuck ranks are shown.
TIMEOUT_S = 170


@pytest.fixture
def ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    def run(
        fn: Callable[..., Any],
        *args: Any,
        allow_warnings: tuple[Any, ...] = (),
        timeout: float = TIMEOUT_S,
        **options: Any,
    ) -> list[Any]:
        return rank_pool.run(fn, *args, allow_warnings=WARNINGS + allow_warnings, timeout=timeout, **options)

    return run
