"""Samplers and loaders that go on from a state, with as many ranks as before or with others."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.data import Loader, Sampler
from paceline.errors import StateError
from tests.data.shares import flat, going_on, samplers_of

# -- going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_nothing_is_lost_or_repeated_wherever_ranks_stop(shuffle: bool) -> None:
    for size in (1, 2, 3, 5, 8, 12, 13, 21):
        for before in range(1, 6):
            for taken in range(-(-size // before) + 1):
                samplers = samplers_of(size, before, shuffle=shuffle, even="uneven")
                passes = [iter(sampler) for sampler in samplers]
                first = [list(islice(indices, taken)) for indices in passes]
                state = samplers[0].state_dict()
                over = len(flat(first)) == size
                assert state["epoch"] == int(over)
                for after in range(1, 6):
                    resumed = going_on(size, after, state, shuffle=shuffle, even="uneven")
                    rest = [list(sampler) for sampler in resumed]
                    if over:
                        assert Counter(flat(rest)) == Counter(range(size))
                    else:
                        assert Counter(flat(first + rest)) == Counter(range(size)), (size, before, taken, after)
                    # Then comes the next epoch, whole, on all ranks.
                    following = [list(sampler) for sampler in resumed]
                    assert Counter(flat(following)) == Counter(range(size))
                    assert {sampler.epoch for sampler in resumed} == {1 + int(over)}


def test_ranks_that_come_and_go_take_each_sample_once() -> None:
    random_numbers = random.Random(15)
    for _ in range(100):
        size, in_batch = random_numbers.randint(1, 200), random_numbers.randint(1, 7)
        epochs: dict[int, list[int]] = {}
        state: dict[str, int] | None = None
        while state is None or state["epoch"] < 2:
            ranks = random_numbers.randint(1, 6)
            samplers = samplers_of(size, ranks, even="uneven")
            loaders = [Loader(range(size), in_batch, sampler=sampler) for sampler in samplers]
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
            epoch = loaders[0].state_dict()["epoch"]
            steps = random_numbers.randint(0, 12)
            for loader in loaders:
                epochs.setdefault(epoch, []).extend(i for batch in islice(loader, steps) for i in batch.tolist())
            state = loaders[0].state_dict()
        for epoch in range(2):
            assert Counter(epochs[epoch]) == Counter(range(size))


@pytest.mark.parametrize("even", ["pad", "drop"])
def test_equal_shares_when_going_on(even: Any) -> None:
    for size in range(8, 30):
        for before, after in ((4, 2), (2, 4), (3, 5), (5, 3)):
            samplers = samplers_of(size, before, even=even)
            first = [list(islice(sampler, 1)) for sampler in samplers]
            state = samplers[0].state_dict()
            rest = [list(sampler) for sampler in going_on(size, after, state, even=even)]
            assert len({len(share) for share in rest}) == 1
            counts = Counter(flat(first + rest)) if state["taken"] else Counter(flat(rest))
            extra = sum(counts.values()) - size
            if even == "pad":
                assert len(counts) == size
                assert 0 <= extra < after
            else:
                assert max(counts.values()) == 1
                assert -after < extra <= 0


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_fetch_ahead_are_not_counted(persistent: bool) -> None:
    loaders = [
        Loader(range(64), 2, sampler=sampler, num_workers=2, prefetch_factor=4, persistent_workers=persistent)
        for sampler in samplers_of(64, 2)
    ]
    for epoch in range(2):
        taken: list[int] = []
        passes = [iter(loader) for loader in loaders]
        assert loaders[0].state_dict()["taken"] == 0
        for step in range(1, 6):
            taken += flat(next(batches).tolist() for batches in passes)
            states = [loader.state_dict() for loader in loaders]
            assert states[0] == states[1] == {"epoch": epoch, "taken": 4 * step, "samples": 64, "seed": 0, "shuffle": 1}
        rest = [list(sampler) for sampler in going_on(64, 3, states[0], even="uneven")]
        assert sorted(taken + flat(rest)) == list(range(64))
        for batches in passes:
            list(batches)


def test_a_loader_with_workers_that_does_not_count_is_refused() -> None:
    sampler = Sampler(range(64))
    batches = iter(DataLoader(range(64), 2, sampler=sampler, num_workers=1))  # type: ignore[arg-type]
    next(batches)
    with pytest.raises(StateError, match=r"DataLoader with workers draws samples ahead.*paceline.data.Loader"):
        sampler.state_dict()
    batches._shutdown_workers()  # type: ignore[attr-defined]


def test_torchs_loader_without_workers_counts_by_drawing() -> None:
    sampler = Sampler(range(20), shuffle=False)
    batches = iter(DataLoader(range(20), 4, sampler=sampler))  # type: ignore[arg-type]
    next(batches)
    next(batches)
    assert sampler.state_dict()["taken"] == 8


def test_an_epoch_that_is_asked_for_after_workers_have_begun_comes_next() -> None:
    loader = Loader(range(8), batch_size=2, shuffle=True, num_workers=1)
    batches = iter(loader)
    loader.set_epoch(3)
    assert len(list(batches)) == 4
    assert loader.state_dict()["epoch"] == 3
    other = Sampler(range(8))
    other.set_epoch(3)
    assert [index for batch in loader for index in batch.tolist()] == list(other)


def test_the_last_batch_ends_the_epoch() -> None:
    # Frameworks that know the length of a loader do not ask for more than its last batch.
    for drop_last in (False, True):
        loader = Loader(range(10), batch_size=4, shuffle=True, drop_last=drop_last)
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        assert (loader.state_dict()["epoch"], loader.state_dict()["taken"]) == (1, 0)
        assert len(list(loader)) == len(loader)
        assert loader.state_dict()["epoch"] == 2


def test_a_look_at_one_batch_keeps_the_place() -> None:
    loader = Loader(range(10), batch_size=2)
    loader.load_state_dict({"epoch": 3, "taken": 4, "samples": 10, "seed": 0, "shuffle": 0})
    next(iter(loader))
    assert [index for batch in loader for index in batch.tolist()] == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("first", [0, 3])
def test_frameworks_that_count_from_zero_again_go_on(first: int) -> None:
    whole = Sampler(range(12))
    orders = [list(whole) for _ in range(6)]
    sampler = Sampler(range(12))
    sampler.load_state_dict({"epoch": 3, "taken": 4, "samples": 12, "seed": 0, "shuffle": 1})
    sampler.set_epoch(first)
    assert list(sampler) == orders[3][4:]
    sampler.set_epoch(first + 1)
    assert list(sampler) == orders[4]
    sampler.set_epoch(first + 2)
    assert list(sampler) == orders[5]


def test_set_epoch_may_come_late_after_a_load() -> None:
    sampler = Sampler(range(12))
    sampler.load_state_dict({"epoch": 3, "taken": 4, "samples": 12, "seed": 0, "shuffle": 1})
    list(sampler)
    sampler.set_epoch(4)
    list(sampler)
    assert sampler.state_dict()["epoch"] == 5


def test_the_saved_seed_counts() -> None:
    before = Sampler(range(20), seed=3)
    first = list(islice(before, 8))
    after = Sampler(range(20), seed=4)
    after.load_state_dict(before.state_dict())
    assert sorted(first + list(after)) == list(range(20))


def _trained(rank: int, world_size: int, state: dict[str, int] | None, steps: int) -> tuple[list[int], dict[str, int]]:
    """Train for some steps, and say which samples this rank has seen."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.arange(96.0)[:, None])
    loader = Loader(data, batch_size=3, shuffle=True)
    if state is not None:
        loader.load_state_dict(state)
    model = paceline.DDP(torch.nn.Linear(1, 1))
    seen: list[int] = []
    for (batch,) in islice(loader, steps):
        model(batch / 96).sum().backward()
        model.zero_grad()
        seen += batch.flatten().int().tolist()
    return seen, loader.state_dict()


def test_a_training_goes_on_with_fewer_ranks_in_mid_epoch(ranks: Any) -> None:
    first = ranks(_trained, None, 3, world_size=4)
    states = [state for _, state in first]
    assert states == [states[0]] * 4
    assert states[0]["taken"] == 36
    second = ranks(_trained, states[0], 100, world_size=2)
    assert sorted(flat(seen for seen, _ in first + second)) == list(range(96))
    assert [state["epoch"] for _, state in second] == [1, 1]


def _uneven(rank: int, world_size: int) -> list[float]:
    loader = Loader(torch.arange(7.0)[:, None], batch_size=2, shuffle=True, even="uneven")
    model = paceline.DDP(torch.nn.Linear(1, 1))
    seen: list[float] = []
    for _ in range(3):
        with model.join():
            for batch in loader:
                model(batch).sum().backward()
                seen += batch.flatten().tolist()
    return seen


def test_uneven_shares_train_in_join(ranks: Any) -> None:
    shares = ranks(_uneven, world_size=3)
    assert sorted(flat(shares)) == sorted([*map(float, range(7))] * 3)
