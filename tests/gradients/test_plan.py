"""Bucket plans: capacities, kinds, order, fingerprints, and agreement with torch's bucket assignment."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
import torch.distributed as dist

from paceline.gradients.plan import (
    DEFAULT_CAP_BYTES,
    DEFAULT_FIRST_CAP_BYTES,
    MB,
    ParameterSpec,
    default_caps_bytes,
    make_plan,
)

ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2}


def _spec(index: int, numel: int, *, dtype: str = "float32", device: str = "cpu", **flags: bool) -> ParameterSpec:
    return ParameterSpec(f"p{index}", (numel,), (1,), dtype, ITEMSIZES[dtype], device, **flags)


def _specs(*numels: int) -> list[ParameterSpec]:
    return [_spec(i, numel) for i, numel in enumerate(numels)]


def _members(plan: object) -> list[tuple[int, ...]]:
    return [bucket.params for bucket in plan.buckets]  # type: ignore[attr-defined]


# -- capacities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numels", "caps_bytes", "members"),
    [
        # 40 bytes each: two reach 80 exactly, and a third would have to wait.
        pytest.param((10, 10, 10, 10), (80, 80), [(3, 2), (1, 0)], id="closed when it reaches its capacity"),
        pytest.param((10, 10, 10, 10), (81, 81), [(3, 2, 1), (0,)], id="a byte more takes one more"),
        pytest.param((1, 1000, 1, 1), (8, 8), [(3, 2), (1,), (0,)], id="larger than the capacity"),
        pytest.param((1, 1000, 1), (8, 8), [(2, 1), (0,)], id="a large one fills the open bucket"),
        # The rest, which is smaller, is at the end of the module: it leaves first.
        pytest.param((1, 1, 1, 1, 1), (8,), [(4,), (3, 2), (1, 0)], id="one capacity fills from the front"),
        pytest.param((1, 1, 1, 1, 1), (8, 8), [(4, 3), (2, 1), (0,)], id="two fill from the back"),
        pytest.param((1,) * 6, (4, 8, 12), [(5,), (4, 3), (2, 1, 0)], id="a list is used in turn"),
        pytest.param((1,) * 5, (4, 8), [(4,), (3, 2), (1, 0)], id="the last repeats"),
        # The parameters have 1, 2 and 32 MiB, and the capacities are 1 and 8.75.
        pytest.param((8 * MB, MB // 2, MB // 4), None, [(2,), (1, 0)], id="a large one joins a bucket just begun"),
        pytest.param((8 * MB, MB, MB // 4), None, [(2,), (1,), (0,)], id="but does not wait for one half full"),
        pytest.param((8 * MB, 10, MB // 4), None, [(2,), (1, 0)], id="and joins one that is nearly empty"),
    ],
)
def test_capacities(
    numels: tuple[int, ...], caps_bytes: tuple[int, ...] | None, members: list[tuple[int, ...]]
) -> None:
    assert _members(make_plan(_specs(*numels), caps_bytes=caps_bytes)) == members


def test_the_first_bucket_is_small_by_default() -> None:
    specs = _specs(*[MB // 4] * 40)  # 1 MiB each
    plan = make_plan(specs)
    # A quarter of 40 MiB.
    assert plan.caps_bytes == (DEFAULT_FIRST_CAP_BYTES, 10 * MB)
    assert [len(bucket.params) for bucket in plan.buckets] == [1, 10, 10, 10, 9]
    assert plan.buckets[0].params == (39,)


def test_the_default_capacity_has_an_upper_and_a_lower_end() -> None:
    assert default_caps_bytes(400 * MB) == (DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES)
    assert default_caps_bytes(28 * MB) == (DEFAULT_FIRST_CAP_BYTES, 8 * MB)
    assert default_caps_bytes(24 * MB) == (DEFAULT_CAP_BYTES,)  # goes in one piece


@pytest.mark.parametrize("fraction", [0.5, 0.001, 1e-9])
def test_a_fraction_of_a_mebibyte_is_a_capacity(fraction: float) -> None:
    cap = max(1, int(fraction * MB))
    plan = make_plan(_specs(*[MB // 16] * 8), caps_bytes=(cap,))  # 256 KiB each
    each = max(1, cap // (MB // 4))
    assert [len(bucket.params) for bucket in plan.buckets] == [each] * (8 // each)


def test_each_kind_counts_its_own_buckets() -> None:
    specs = [_spec(i, 1, dtype=dtype) for i, dtype in enumerate(["float32", "float64"] * 4)]
    plan = make_plan(specs, caps_bytes=(1, 10**6))
    # Both kinds begin with a small first bucket.
    assert _members(plan) == [(7,), (6,), (5, 3, 1), (4, 2, 0)]


# -- kinds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "sizes_bytes"),
    [
        ([{"dtype": "float32"}, {"dtype": "bfloat16"}], [12, 24]),
        ([{"device": "cuda:0"}, {"device": "cuda:1"}], [24, 24]),
    ],
)
def test_a_bucket_holds_one_dtype_of_one_device(kinds: list[dict[str, str]], sizes_bytes: list[int]) -> None:
    plan = make_plan([_spec(i, 3, **kinds[i % 2]) for i in range(4)])
    assert _members(plan) == [(3, 1), (2, 0)]
    assert [bucket.size_bytes for bucket in plan.buckets] == sizes_bytes
    for bucket, kind in zip(plan.buckets, reversed(kinds), strict=True):
        assert {name: getattr(bucket, name) for name in kind} == kind


def test_a_sparse_gradient_travels_alone_and_has_no_flat_size() -> None:
    specs = [_spec(0, 4), _spec(1, 4, sparse=True), _spec(2, 4), _spec(3, 4, sparse=True)]
    plan = make_plan(specs, caps_bytes=(10**6,))
    # The dense ones wait for parameter 0.
    assert _members(plan) == [(3,), (1,), (2, 0)]
    assert [(b.sparse, b.numel, b.size_bytes) for b in plan.buckets] == [(True, 0, 0), (True, 0, 0), (False, 8, 32)]


@pytest.mark.parametrize("caps_bytes", [(4,), (4, 4)])
def test_delayed_parameters_go_last_in_one_bucket(caps_bytes: tuple[int, ...]) -> None:
    specs = [_spec(i, 1, delayed=i in (1, 3, 4)) for i in range(6)]
    plan = make_plan(specs, caps_bytes=caps_bytes)
    assert _members(plan) == [(5,), (2,), (0,), (4, 3, 1)]
    assert [bucket.delayed for bucket in plan.buckets] == [False, False, False, True]


def test_delayed_parameters_of_two_kinds_do_not_mix_and_sparse_ones_go_last_too() -> None:
    specs = [_spec(0, 1, delayed=True), _spec(1, 1, dtype="float64", delayed=True), _spec(2, 1)]
    assert _members(make_plan(specs)) == [(2,), (1,), (0,)]
    specs = [_spec(0, 1), _spec(1, 1), _spec(2, 1, sparse=True, delayed=True)]
    plan = make_plan(specs)
    assert _members(plan) == [(1, 0), (2,)]
    assert (plan.buckets[1].delayed, plan.buckets[1].sparse) == (True, True)


# -- which take part, in which order -------------------------------------------------------------------


def test_frozen_and_left_out_parameters_are_in_no_bucket() -> None:
    specs = [_spec(i, 1, requires_grad=i != 2) for i in range(5)]
    plan = make_plan(specs, leave_out=frozenset({0}))
    assert _members(plan) == [(4, 3, 1)]
    assert plan.order == (4, 3, 1)
    assert len(plan.specs) == 5


def test_nothing_to_reduce_is_an_empty_plan() -> None:
    plan = make_plan([_spec(0, 1, requires_grad=False)])
    assert plan.buckets == ()
    assert plan.size_bytes == 0
    assert make_plan([]).buckets == ()


def test_an_order_that_was_seen_is_followed() -> None:
    plan = make_plan(_specs(1, 1, 1, 1, 1), caps_bytes=(8,), order=[2, 0, 4, 1, 3])
    assert _members(plan) == [(2, 0), (4, 1), (3,)]
    assert plan.order == (2, 0, 4, 1, 3)
    # It may name parameters that were left out.
    assert _members(make_plan(_specs(1, 1, 1), order=[2, 0, 1], leave_out=frozenset({0}))) == [(2, 1)]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 2, 2], [0, 1, 1]])
def test_an_order_that_is_not_one_is_refused(order: list[int]) -> None:
    with pytest.raises(AssertionError, match="once"):
        make_plan(_specs(1, 1, 1), order=order)


def test_buckets_leave_in_the_order_in_which_they_become_complete() -> None:
    # float64 closes first by size, but its bucket is still completed after float32's rest.
    specs = [_spec(0, 1), _spec(1, 1, dtype="float64"), _spec(2, 100), _spec(3, 100, dtype="float64")]
    plan = make_plan(specs, caps_bytes=(10**6, 10**6), order=[3, 0, 2, 1])
    assert _members(plan) == [(0, 2), (3, 1)]


def test_indices_and_offsets_follow_from_the_members() -> None:
    shapes = [(2, 3), (), (0, 5), (4,)]
    specs = [ParameterSpec(f"p{i}", s, (1,) * len(s), "float32", 4, "cpu") for i, s in enumerate(shapes)]
    plan = make_plan(specs)
    (bucket,) = plan.buckets
    assert bucket.index == 0
    assert bucket.params == (3, 2, 1, 0)
    assert bucket.offsets == (0, 4, 4, 5)
    assert bucket.numel == 11
    assert plan.size_bytes == 44
    assert plan.names(bucket.params) == ["p3", "p2", "p1", "p0"]


def test_a_plan_cannot_be_changed() -> None:
    plan = make_plan(_specs(1, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.buckets = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.buckets[0].index = 3  # type: ignore[misc]


# -- fingerprint ---------------------------------------------------------------------------------------


def test_equal_plans_have_equal_fingerprints() -> None:
    assert make_plan(_specs(1, 2, 3)).fingerprint == make_plan(_specs(1, 2, 3)).fingerprint
    # The device index is each rank's own, and capacities that give the same buckets are no difference.
    ours, theirs = ([_spec(i, 4, device=f"cuda:{rank}") for i in range(3)] for rank in range(2))
    assert make_plan(ours).fingerprint == make_plan(theirs).fingerprint
    plans = [make_plan(_specs(1, 2), caps_bytes=caps_bytes) for caps_bytes in ((100, 100), (200,))]
    assert plans[0].fingerprint == plans[1].fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"shape": (3, 2)},
        {"stride": (1, 2)},
        {"dtype": "int32"},
        {"device": "cuda:0"},
        {"requires_grad": False},
        {"sparse": True},
        {"delayed": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_ranks_must_agree_on_changes_the_fingerprint(change: dict[str, object]) -> None:
    facts = {"shape": (2, 3), "stride": (3, 1), "dtype": "float32", "itemsize": 4, "device": "cpu"}
    specs, changed = (
        [ParameterSpec(**{"name": f"p{i}", **facts, **(change if i == where else {})}) for i in range(3)]  # type: ignore[arg-type]
        for where in (None, 1)
    )
    assert make_plan(specs).fingerprint != make_plan(changed).fingerprint


def test_other_buckets_change_the_fingerprint() -> None:
    specs = _specs(1, 1, 1, 1)
    plans = [
        make_plan(specs),
        make_plan(specs, caps_bytes=(4,)),
        make_plan(specs, order=[0, 1, 2, 3]),
        make_plan(specs, leave_out=frozenset({1})),
        make_plan([specs[1], specs[0], *specs[2:]]),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)


# -- agreement with torch ------------------------------------------------------------------------------


def _random_case(seed: int) -> tuple[list[ParameterSpec], list[torch.Tensor], int]:
    rng = random.Random(seed)
    dtypes = rng.sample(sorted(ITEMSIZES), rng.randint(1, 3))
    specs = [
        _spec(i, rng.choice([0, 1, 2, 7, rng.randint(1, 60)]), dtype=rng.choice(dtypes), sparse=rng.random() < 0.1)
        for i in range(rng.randint(1, 25))
    ]
    tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
    return specs, tensors, rng.choice([1, 16, 50, 200, 10**6])


def _sets(buckets: list[tuple[int, ...]] | list[list[int]]) -> list[frozenset[int]]:
    return [frozenset(members) for members in buckets]


@pytest.mark.parametrize("seed", range(300))
def test_one_capacity_gives_torchs_buckets_in_torchs_order(seed: int) -> None:
    specs, tensors, cap = _random_case(seed)
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [cap], [spec.sparse for spec in specs])
    assert _sets(_members(make_plan(specs, caps_bytes=(cap,)))) == _sets(theirs[::-1])


@pytest.mark.parametrize("several", [False, True], ids=["one capacity", "several"])
@pytest.mark.parametrize("seed", range(200))
def test_a_ready_order_gives_torchs_buckets(seed: int, several: bool) -> None:
    specs, tensors, cap = _random_case(seed)
    rng = random.Random(seed + 1)
    order = rng.sample(range(len(specs)), len(specs))
    caps = sorted(rng.randint(1, 200) for _ in range(rng.randint(2, 4))) if several else [cap]
    sparse = [spec.sparse for spec in specs]
    theirs, _ = dist._compute_bucket_assignment_by_size([tensors[i] for i in order], caps, sparse, order)
    ours = _members(make_plan(specs, caps_bytes=caps, order=order))
    assert set(_sets(ours)) == set(_sets(theirs))
    assert sorted(i for members in ours for i in members) == list(range(len(specs)))


def test_one_kind_and_a_ready_order_give_torchs_order_too() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        specs = _specs(*(rng.randint(1, 50) for _ in range(20)))
        order = rng.sample(range(20), 20)
        tensors = [torch.empty(specs[i].shape) for i in order]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [150], [False] * 20, order)
        ours = _members(make_plan(specs, caps_bytes=(150,), order=order))
        assert ours == [tuple(members) for members in theirs]
