"""``paceline.mean`` and ``paceline.total`` over real ranks."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import BadArgumentError, BadTypeError, DisagreementError, RankLostError
from tests.on_ranks import on_ranks

BACKENDS = ["gloo", "cpu:shm"]


def _values(rank: int, world_size: int) -> dict[str, Any]:
    big = 2**60 + rank
    return {
        "float": paceline.mean(0.5 + rank),
        "weighted": paceline.mean(float(rank), weight=rank + 1),
        "tensor weight": paceline.mean(float(rank), weight=torch.tensor(rank + 1)),
        "int": paceline.mean(rank),
        "dict": paceline.mean({"b": rank, "a": torch.tensor(1.0 + rank, requires_grad=True)}, weight=2),
        "total": paceline.total(rank + 1),
        "exact": paceline.total(big),
        "negative": paceline.total(-big),
        "total of floats": paceline.total(0.25),
        "mixed": paceline.total({"n": rank if rank else 0.5, "t": torch.tensor([rank, -1])}),
        "half": paceline.mean(torch.full((2, 2), 1.0 + rank, dtype=torch.bfloat16)),
        "int tensor": paceline.mean(torch.tensor(rank)),
        "large": paceline.total(torch.arange(1000) * (rank + 1)),
        "large mean": paceline.mean({"x": torch.arange(100.0), "y": 3 * rank}),
        "bool": paceline.total(torch.tensor([True, rank == 0])),
        "nan": paceline.mean(float("nan") if rank else 1.0, weight=0 if rank else 1),
        "no weight": paceline.mean(1.0, weight=0),
        "not finite": paceline.total(math.inf if rank else 1),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_values(ranks: Any, backend: str) -> None:
    for rank, found in enumerate(ranks(_values, world_size=3, backend=backend)):
        assert found["float"] == 1.5
        assert found["weighted"] == found["tensor weight"] == pytest.approx(8 / 6)
        assert (found["int"], type(found["int"])) == (1.0, float)
        assert list(found["dict"]) == ["b", "a"]
        assert found["dict"]["b"] == 1.0
        assert found["dict"]["a"].item() == 2.0
        assert not found["dict"]["a"].requires_grad
        assert (found["total"], type(found["total"])) == (6, int)
        assert found["exact"] == 3 * 2**60 + 3 == -found["negative"]
        assert found["total of floats"] == 0.75
        assert found["mixed"]["n"] == 3.5
        assert found["mixed"]["t"].tolist() == [3, -3]
        assert torch.equal(found["half"], torch.full((2, 2), 2.0, dtype=torch.bfloat16))
        assert (found["int tensor"].item(), found["int tensor"].dtype) == (1.0, torch.float32)
        assert torch.equal(found["large"], torch.arange(1000) * 6)
        assert torch.equal(found["large mean"]["x"], torch.arange(100.0))
        assert found["large mean"]["y"] == 3.0
        assert found["bool"].tolist() == [3, 1]
        assert found["nan"] == 1.0
        assert math.isnan(found["no weight"])
        assert found["not finite"] == math.inf, rank


@on_ranks(world_size=2)
def test_all_ranks_get_the_same_bits(rank, world_size):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        value = torch.randn(50, generator=generator)
        found = paceline.mean(value)
        told = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(told, found)
        assert torch.equal(*told)


@on_ranks(world_size=2)
def test_one_exchange_for_all_numbers(rank, world_size):
    model = paceline.DDP(torch.nn.Linear(1, 1))
    before = model.channel.progress.started
    paceline.mean({f"value {n}": n for n in range(50)})
    paceline.total({f"value {n}": n for n in range(30)})
    assert model.channel.progress.started == before + 2
    paceline.total(torch.arange(100))
    assert model.channel.progress.started == before + 4


@on_ranks(world_size=3)
def test_a_group_of_some_ranks(rank, world_size):
    group = dist.new_group([0, 2])
    if rank != 1:
        assert paceline.total(rank, group=group) == 2
    else:
        with pytest.raises(BadArgumentError, match="Rank 1 is not in the process group"):
            paceline.total(rank, group=group)


def _differing(rank: int, world_size: int, case: str) -> str:
    ddp = paceline.DDP(torch.nn.Linear(1, 1)) if case == "with a wrapper" else None
    call, value = paceline.mean, {"loss" if rank < 2 else "accuracy": 1.0}
    if case == "mean and total":
        call, value = (paceline.mean if rank else paceline.total), 1.0
    elif case in ("shapes", "large"):
        value = {"x": torch.zeros(2 + rank * (1 if case == "shapes" else 100))}
    with pytest.raises(DisagreementError) as told:
        call(value)
    # It is over: the next ones meet again.
    assert paceline.total(1) == world_size
    del ddp
    return str(told.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("names", "rank 0 called paceline.mean('loss'), and rank 2 called paceline.mean('accuracy')"),
        ("with a wrapper", "rank 0 called paceline.mean('loss'), and rank 2 called paceline.mean('accuracy')"),
        ("mean and total", "rank 0 called paceline.total(a value), and rank 1 called paceline.mean(a value)"),
        (
            "shapes",
            "called paceline.mean('x' of shape (2,)), and rank 1 called paceline.mean('x' of shape (3,))",
        ),
        ("large", "and rank 1 called paceline.mean('x' of shape (102,))"),
    ],
)
def test_ranks_that_ask_for_different_numbers_get_an_error(ranks: Any, case: str, words: str) -> None:
    for told in ranks(_differing, case, world_size=3):
        assert words in told


def _not_called(rank: int, world_size: int, wrapped: bool) -> str:
    ddp = paceline.DDP(torch.nn.Linear(1, 1)) if wrapped else None
    paceline.mean(1.0)
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    if rank:
        store.wait(["told"], timedelta(seconds=120))
        return ""
    try:
        with pytest.raises(RankLostError) as told:
            paceline.mean({"loss": 1.0})
    finally:
        store.set("told", "")
    assert told.value.rank == 1
    del ddp
    return str(told.value)


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_rank_that_does_not_call_is_named(ranks: Any, wrapped: bool) -> None:
    told, _ = ranks(_not_called, wrapped, group_timeout_s=3, clean_s=1, timeout=120)
    assert "waited 3 s (the group's time-out) in the all-reduce of paceline.mean('loss')" in told
    assert "Rank 1 has not started all-reduce of paceline.mean('loss')" in told


def test_without_a_group_this_process_is_alone() -> None:
    assert paceline.mean({"a": 1, "b": 2.5}, weight=7) == {"a": 1.0, "b": 2.5}
    assert paceline.total(2**62) == 2**62
    assert paceline.total(1.5) == 1.5
    assert torch.equal(paceline.total(torch.tensor([1, 2])), torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: paceline.mean("1"), BadTypeError, "must be a number or a tensor, not a str"),
        (lambda: paceline.mean({"x": None}), BadTypeError, "The value 'x' must be a number"),
        (lambda: paceline.mean({1: 2}), BadTypeError, "texts that are not empty"),
        (lambda: paceline.total({}), BadTypeError, "must have names"),
        (lambda: paceline.mean(torch.zeros(2, dtype=torch.complex64)), BadTypeError, "real numbers"),
        (lambda: paceline.total(2**63), BadArgumentError, "does not fit into 64 bits"),
        (lambda: paceline.mean(1.0, weight=-1), BadArgumentError, "weight is -1.0"),
        (lambda: paceline.mean(1.0, weight=math.nan), BadArgumentError, "weight is nan"),
        (lambda: paceline.mean(1.0, weight=torch.ones(2)), BadArgumentError, "must be one number"),
    ],
)
def test_bad_values(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
