"""Samplers of all ranks in one process, and what they give out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from paceline.data import Sampler


def samplers_of(size: int, ranks: int, **options: Any) -> list[Sampler]:
    return [Sampler(range(size), num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def going_on(size: int, ranks: int, state: dict[str, int], **options: Any) -> list[Sampler]:
    samplers = samplers_of(size, ranks, **options)
    for sampler in samplers:
        sampler.load_state_dict(state)
    return samplers


def flat(shares: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(shares))
