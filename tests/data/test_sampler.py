"""``paceline.data.Sampler``: each sample once, over any number of ranks, also if they stop and go on as others."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from paceline.data import Loader, Sampler
from paceline.errors import BadArgumentError, BadTypeError, StateError
from tests.data.shares import flat, samplers_of

# -- one epoch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_comes_once(shuffle: bool) -> None:
    for size in range(30):
        for ranks in range(1, 6):
            shares = [list(sampler) for sampler in samplers_of(size, ranks, shuffle=shuffle, even="uneven")]
            assert Counter(flat(shares)) == Counter(range(size))
            lengths = [len(share) for share in shares]
            assert sorted(lengths, reverse=True) == lengths  # rank 0 never has fewer than others
            assert lengths[0] - lengths[-1] <= 1


def test_an_evaluation_is_not_padded() -> None:
    samplers = samplers_of(7, 3, shuffle=False)
    assert [sampler.even for sampler in samplers] == ["uneven"] * 3
    assert [list(sampler) for sampler in samplers] == [[0, 3, 6], [1, 4], [2, 5]]


def test_training_is_padded_with_the_beginning_of_the_order() -> None:
    for size in range(1, 30):
        for ranks in range(1, 6):
            samplers = samplers_of(size, ranks)
            shares = [list(sampler) for sampler in samplers]
            assert {len(share) for share in shares} == {-(-size // ranks)} == {len(sampler) for sampler in samplers}
            order = [index for turn in zip(*shares, strict=True) for index in turn]
            assert Counter(order[:size]) == Counter(range(size))
            assert order[size:] == (order[:size] * ranks)[: len(order) - size]


def test_the_last_samples_are_dropped() -> None:
    for size in range(5, 30):
        for ranks in range(1, 6):
            for options in ({"even": "drop"}, {"drop_last": True}):
                shares = [list(sampler) for sampler in samplers_of(size, ranks, **options)]
                assert {len(share) for share in shares} == {size // ranks}
                assert max(Counter(flat(shares)).values()) == 1


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
    return [flat(batch.tolist() for batch in loader) for _ in range(2)]


def test_each_sample_comes_once_over_real_ranks(ranks: Any) -> None:
    for epoch in zip(*ranks(_of_the_group, world_size=3), strict=True):
        assert sorted(flat(epoch)) == list(range(11))


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
    samplers = samplers_of(12, 3)
    orders = []
    for epoch in range(4):
        shares = [list(sampler) for sampler in samplers]
        assert sorted(flat(shares)) == list(range(12))
        orders.append(shares)
        assert all(sampler.state_dict()["epoch"] == epoch + 1 for sampler in samplers)
    assert len({str(order) for order in orders}) == 4
    for epoch, order in enumerate(orders):
        other = samplers_of(12, 3)
        for sampler in other:
            sampler.set_epoch(epoch)
        assert [list(sampler) for sampler in other] == order


def test_another_seed_is_another_order() -> None:
    assert len({str(list(Sampler(range(20), seed=seed))) for seed in range(10)}) == 10


def test_a_pass_that_was_broken_off_begins_again() -> None:
    # One rank may look at a batch for itself; the ranks must not part over it.
    samplers = samplers_of(10, 2)
    whole = [list(sampler) for sampler in samplers_of(10, 2)]
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
