"""Orders that are computed place by place."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from paceline.data.permutation import STORED, Permutation


@pytest.mark.parametrize("size", [*range(1, 40), 1000, STORED, STORED + 1, 5000, 2**13])
def test_every_thing_comes_once(size: int) -> None:
    for key in range(2):
        order = Permutation(size, key=(key, 1)).at(torch.arange(size))
        assert torch.equal(order.sort().values, torch.arange(size))


def test_a_place_is_the_same_whoever_asks() -> None:
    for size in (100, 10_000, 10**12):
        order = Permutation(size, key=(7,))
        some = torch.tensor([3, 99, 0, 41])
        whole = order.at(torch.arange(100))
        assert torch.equal(order.at(some), whole[some])


def test_the_orders_are_those_that_were_saved_before() -> None:
    # A position in an order is kept in checkpoints: these lines may never change.
    assert Permutation(10, key=(0, 0)).at(torch.arange(10)).tolist() == [1, 0, 4, 8, 3, 2, 9, 7, 6, 5]
    assert Permutation(10**6, key=(0, 0)).at(torch.arange(5)).tolist() == [90303, 93367, 825795, 919320, 655519]


def _chi_squared(counts: torch.Tensor) -> float:
    expected = counts.double().mean()
    return float(((counts - expected) ** 2 / expected).sum())


def test_small_orders_are_all_equally_likely() -> None:
    found = Counter(tuple(Permutation(4, key=(key,)).at(torch.arange(4)).tolist()) for key in range(4800))
    assert len(found) == 24
    # 23 degrees of freedom: more than 60 has a probability below 1 in 10,000.
    assert _chi_squared(torch.tensor(list(found.values()))) < 60


def test_large_orders_are_shuffled_well() -> None:
    size, keys = STORED + 904, 200
    blocks, steps = torch.zeros(10, 10), torch.zeros(size)
    place = torch.arange(size) * 10 // size
    for key in range(keys):
        order = Permutation(size, key=(key, 5)).at(torch.arange(size))
        blocks.view(-1).add_(torch.bincount(place * 10 + order * 10 // size, minlength=100))
        steps += torch.bincount((order[1:] - order[:-1]) % size, minlength=size)
    # Where a thing goes does not depend on where it was: 81 degrees of freedom.
    assert _chi_squared(blocks) < 150
    # Nor does the next one follow from the one before: about 5,000 degrees of freedom, which deviate by about 100.
    assert abs(_chi_squared(steps[1:]) - size) < 500
