"""``ddp.stats()``: a typed value that is also a mapping, with one rank and with two."""

from __future__ import annotations

import dataclasses

import pytest

from paceline import DDP, Stats
from tests.on_ranks import on_ranks
from tests.reference import batch, mlp


def _trained(rank):
    ddp = DDP(mlp().double())
    for step in range(3):
        ddp(batch(rank, step)).sum().backward()
    return ddp


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_fields_are_items_too(ranks, backend, world_size):
    ranks(_fields, backend=backend, world_size=world_size)


def _fields(rank, world_size):
    ddp = _trained(rank)
    stats = ddp.stats()
    assert isinstance(stats, Stats)
    names = [known.name for known in dataclasses.fields(stats)]
    assert list(stats) == names
    assert dict(**stats) == {name: getattr(stats, name) for name in names}
    assert stats["plan"] is stats.plan is ddp.plan
    assert (stats.world_size, stats.buckets, stats.get("other"), "other" in stats) == (world_size, 1, None, False)
    with pytest.raises(KeyError):
        stats["__str__"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.steps = 7
    # The figures are of that moment, and later steps do not change them.
    ddp(batch(rank)).sum().backward()
    assert stats.steps == (3 if world_size > 1 else 0)
    assert ddp.stats().steps == (4 if world_size > 1 else 0)


@on_ranks()
def test_the_table(rank, world_size):
    told = str(_trained(rank).stats())
    assert "synchronised steps" in told
    assert "2.bias, 2.weight, 0.bias, 0.weight" in told
    assert "alone" not in told


@on_ranks(world_size=1)
def test_a_rank_that_is_alone_says_so(rank, world_size):
    ddp = _trained(rank)
    assert "One rank is alone, so nothing is sent." in str(ddp.stats())
    # The mean over several weighted backwards needs buckets, and counts.
    with ddp.weighted(2.0):
        ddp(batch(rank)).sum().backward()
    assert ddp.stats().steps == 1
    assert "alone" not in str(ddp.stats())
