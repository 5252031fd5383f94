"""``paceline.data.Sampler``: each sample once, over any number of ranks, also if they stop and go on as others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from paceline.data import Loader, Sampler
from paceline.errors import BadArgumentError, BadTypeError, StateError


def _samplers(size: int, ranks: int, **options: Any) -> list[Sampler]:
    return [Sampler(range(size), num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def _resumed(size: int, ranks: int, state: dict[str, int], **options: Any) -> list[Sampler]:
    samplers = _samplers(size, ranks, **options)
    for sampler in samplers:
        sampler.load_state_dict(state)
    return samplers


def _flat(shares: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(shares))


# -- one epoch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_comes_once(shuffle: bool) -> None:
    for size in range(30):
        for ranks in range(1, 6):
            shares = [list(sampler) for sampler in _samplers(size, ranks, shuffle=shuffle, even="uneven")]
            assert Counter(_flat(shares)) == Counter(range(size))
            lengths = [len(share) for share in shares]
            assert sorted(lengths, reverse=True) == lengths  # rank 0 never has fewer than others
            assert lengths[0] - lengths[-1] <= 1


def test_an_evaluation_is_not_padded() -> None:
    samplers = _samplers(7, 3, shuffle=False)
    assert [sampler.even for sampler in samplers] == ["uneven"] * 3
    assert [list(sampler) for sampler in samplers] == [[0, 3, 6], [1, 4], [2, 5]]


def test_training_is_padded_with_the_beginning_of_the_order() -> None:
    for size in range(1, 30):
        for ranks in range(1, 6):
            samplers = _samplers(size, ranks)
            shares = [list(sampler) for sampler in samplers]
            assert {len(share) for share in shares} == {-(-size // ranks)} == {len(sampler) for sampler in samplers}
            order = [index for turn in zip(*shares, strict=True) for index in turn]
            assert Counter(order[:size]) == Counter(range(size))
            assert order[size:] == (order[:size] * ranks)[: len(order) - size]


def test_the_last_samples_are_dropped() -> None:
    for size in range(5, 30):
        for ranks in range(1, 6):
            for options in ({"even": "drop"}, {"drop_last": True}):
                shares = [list(sampler) for sampler in _samplers(size, ranks, **options)]
                assert {len(share) for share in shares} == {size // ranks}
                assert max(Counter(_flat(shares)).values()) == 1


def test_a_large_dataset_is_not_listed() -> None:
    sampler = Sampler(range(10**15), num_replicas=3, rank=1)
    first = list(islice(sampler, 10_000))
    assert len(set(first)) == 10_000
    assert min(first) < 10**15 // 100
    assert max(first) > 10**15 * 0.99


def test_ranks_come_from_the_process_group() -> None:
    assert (Sampler(range(3)).num_replicas, Sampler(range(3)).rank) == (1, 0)


def _of_the_group(rank: int, world_size: int) -> list[list[int]]:
    loader = Loader(range(11), batch_size=2)
    return [_flat(batch.tolist() for batch in loader) for _ in range(2)]


def test_each_sample_comes_once_over_real_ranks(ranks: Any) -> None:
    for epoch in zip(*ranks(_of_the_group, world_size=3), strict=True):
        assert sorted(_flat(epoch)) == list(range(11))


def _made_too_soon(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    from paceline.data import sampler as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: False)
        early = module.Sampler(range(4))
    with pytest.raises(StateError, match=r"made before the process group.*after paceline.init"):
        iter(early)


def test_a_sampler_that_does_not_know_the_ranks_is_refused(ranks: Any) -> None:
    ranks(_made_too_soon, world_size=2)


# -- epochs --------------------------------------------------------------------------------------------


def test_every_pass_is_a_new_epoch_and_all_ranks_have_the_same() -> None:
    samplers = _samplers(12, 3)
    orders = []
    for epoch in range(4):
        shares = [list(sampler) for sampler in samplers]
        assert sorted(_flat(shares)) == list(range(12))
        orders.append(shares)
        assert all(sampler.state_dict()["epoch"] == epoch + 1 for sampler in samplers)
    assert len({str(order) for order in orders}) == 4
    for epoch, order in enumerate(orders):
        other = _samplers(12, 3)
        for sampler in other:
            sampler.set_epoch(epoch)
        assert [list(sampler) for sampler in other] == order


def test_another_seed_is_another_order() -> None:
    assert len({str(list(Sampler(range(20), seed=seed))) for seed in range(10)}) == 10


def test_a_pass_that_was_broken_off_begins_again() -> None:
    # One rank may look at a batch for itself; the ranks must not part over it.
    samplers = _samplers(10, 2)
    whole = [list(sampler) for sampler in _samplers(10, 2)]
    next(iter(samplers[0]))
    assert [list(sampler) for sampler in samplers] == whole


def test_set_epoch_moves_on_from_a_pass_that_was_broken_off() -> None:
    sampler = Sampler(range(100))
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen.append(tuple(islice(sampler, 5)))
    assert len(set(seen)) == 3


def test_an_epoch_can_be_asked_for_again() -> None:
    sampler = Sampler(range(10))
    orders = []
    for _ in range(2):
        sampler.set_epoch(5)
        orders.append(list(sampler))
    assert orders[0] == orders[1]


def test_a_loader_is_as_long_as_an_epoch() -> None:
    for drop_last in (False, True):
        loader = Loader(range(11), batch_size=2, drop_last=drop_last)
        assert [len(list(loader)) for _ in range(2)] == [len(loader)] * 2 == [5 if drop_last else 6] * 2


# -- going on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_nothing_is_lost_or_repeated_wherever_ranks_stop(shuffle: bool) -> None:
    for size in (1, 2, 3, 5, 8, 12, 13, 21):
        for before in range(1, 6):
            for taken in range(-(-size // before) + 1):
                samplers = _samplers(size, before, shuffle=shuffle, even="uneven")
                passes = [iter(sampler) for sampler in samplers]
                first = [list(islice(indices, taken)) for indices in passes]
                state = samplers[0].state_dict()
                over = len(_flat(first)) == size
                assert state["epoch"] == int(over)
                for after in range(1, 6):
                    resumed = _resumed(size, after, state, shuffle=shuffle, even="uneven")
                    rest = [list(sampler) for sampler in resumed]
                    if over:
                        assert Counter(_flat(rest)) == Counter(range(size))
                    else:
                        assert Counter(_flat(first + rest)) == Counter(range(size)), (size, before, taken, after)
                    # Then comes the next epoch, whole, on all ranks.
                    following = [list(sampler) for sampler in resumed]
                    assert Counter(_flat(following)) == Counter(range(size))
                    assert {sampler.epoch for sampler in resumed} == {1 + int(over)}


def test_ranks_that_come_and_go_take_each_sample_once() -> None:
    random_numbers = random.Random(15)
    for _ in range(100):
        size, in_batch = random_numbers.randint(1, 200), random_numbers.randint(1, 7)
        epochs: dict[int, list[int]] = {}
        state: dict[str, int] | None = None
        while state is None or state["epoch"] < 2:
            ranks = random_numbers.randint(1, 6)
            samplers = _samplers(size, ranks, even="uneven")
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
            samplers = _samplers(size, before, even=even)
            first = [list(islice(sampler, 1)) for sampler in samplers]
            state = samplers[0].state_dict()
            rest = [list(sampler) for sampler in _resumed(size, after, state, even=even)]
            assert len({len(share) for share in rest}) == 1
            counts = Counter(_flat(first + rest)) if state["taken"] else Counter(_flat(rest))
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
        for sampler in _samplers(64, 2)
    ]
    for epoch in range(2):
        taken: list[int] = []
        passes = [iter(loader) for loader in loaders]
        assert loaders[0].state_dict()["taken"] == 0
        for step in range(1, 6):
            taken += _flat(next(batches).tolist() for batches in passes)
            states = [loader.state_dict() for loader in loaders]
            assert states[0] == states[1] == {"epoch": epoch, "taken": 4 * step, "samples": 64, "seed": 0, "shuffle": 1}
        rest = [list(sampler) for sampler in _resumed(64, 3, states[0], even="uneven")]
        assert sorted(taken + _flat(rest)) == list(range(64))
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
    assert sorted(_flat(seen for seen, _ in first + second)) == list(range(96))
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
    assert sorted(_flat(shares)) == sorted([*map(float, range(7))] * 3)


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_replicas": 2, "rank": 2}, "rank is 2, but num_replicas is 2"),
        ({"even": "odd"}, "even is 'odd', but must be one of 'pad', 'drop', 'uneven'"),
        ({"drop_last": True, "even": "pad"}, "drop_last=True means even='drop'"),
        ({"num_replicas": 9, "rank": 0, "even": "drop"}, "leaves none for 9 ranks"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgumentError, match=words):
        Sampler(range(5), **options)


def test_a_dataset_without_a_length() -> None:
    with pytest.raises(BadTypeError, match="has a length; generator has none"):
        Sampler(n for n in range(3))  # type: ignore[arg-type]


GOOD = {"epoch": 1, "taken": 4, "samples": 10, "seed": 0, "shuffle": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 11}, "dataset of 11 samples, and this one has 10"),
        ({"shuffle": 0}, "saved with shuffle=False"),
        ({"taken": 11}, "damaged"),
        ({"epoch": -1}, "damaged"),
        ({"taken": "4"}, "taken is missing or no number"),
    ],
)
def test_a_state_that_does_not_fit(change: dict[str, Any], words: str) -> None:
    sampler = Sampler(range(10))
    before = sampler.state_dict()
    with pytest.raises(BadArgumentError, match=words):
        sampler.load_state_dict({**GOOD, **change})
    assert sampler.state_dict() == before
    sampler.load_state_dict(GOOD)
    assert sampler.state_dict() == GOOD


def test_a_loader_takes_only_a_sampler_that_it_can_count() -> None:
    with pytest.raises(BadTypeError, match="not a RandomSampler"):
        Loader(range(4), sampler=torch.utils.data.RandomSampler(range(4)))
    with pytest.raises(BadTypeError, match="IterableDataset decides by itself"):
        Loader(_Stream())
    with pytest.raises(BadArgumentError, match="Give shuffle, seed and even to the Sampler"):
        Loader(range(4), sampler=Sampler(range(4)), even="drop")
    with pytest.raises(BadArgumentError, match="in_order=False lets batches overtake"):
        Loader(range(4), num_workers=1, in_order=False)


class _Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_batches_of_no_fixed_size_have_no_state() -> None:
    class OfAnySize(torch.utils.data.BatchSampler):
        batch_size = None

        def __init__(self, sampler: Sampler) -> None:
            self.sampler = sampler

        def __iter__(self) -> Any:
            yield list(self.sampler)

    loader = Loader(range(4), batch_sampler=OfAnySize(Sampler(range(4), shuffle=False)))
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
    with pytest.raises(StateError, match="OfAnySize have no fixed size"):
        loader.state_dict()


def test_batches_that_are_divided_again_are_refused() -> None:
    class BatchSamplerShard:
        """Divides batches as Accelerate's class of this name does."""

        num_processes, process_index = 2, 0

        def __init__(self, batch_sampler: Any) -> None:
            self.batch_sampler = batch_sampler

        def __iter__(self) -> Any:
            yield from islice(self.batch_sampler, 0, None, 2)

    def batches(sampler: Sampler) -> Any:
        return iter(BatchSamplerShard(torch.utils.data.BatchSampler(sampler, 2, False)))

    with pytest.raises(StateError, match=r"divided among the ranks twice.*BatchSamplerShard.*paceline.data.Loader"):
        next(batches(Sampler(range(8), num_replicas=2, rank=0)))
    # Whoever wants Accelerate to divide them gives all samples to each rank.
    sampler = Sampler(range(8), num_replicas=1, rank=0, shuffle=False)
    assert list(batches(sampler)) == [[0, 1], [4, 5]]
    with pytest.raises(StateError, match=r"BatchSamplerShard \(Accelerate\) draws samples ahead"):
        sampler.state_dict()


def test_frameworks_take_it_for_torchs_sampler() -> None:
    # Lightning puts a sampler of its own in the place of any other.
    sampler = Sampler(range(7), num_replicas=2, rank=1)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_samples, sampler.total_size, sampler.drop_last, sampler.shuffle) == (4, 8, False, True)
