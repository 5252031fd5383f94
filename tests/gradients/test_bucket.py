"""Buckets: storage and views, gradients that are kept, absorbing and scaling, and what a comm hook sees."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.gradients.bucket import Bucket, absorb, absorb_early, empty_flat
from paceline.gradients.grad_bucket import GradBucket
from paceline.gradients.plan import ParameterSpec, make_plan
from paceline.gradients.slots import Slot
from paceline.gradients.strides import is_dense
from tests.on_ranks import on_ranks


def _param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def _bucket(
    params: list[Any],
    *,
    deferred: Collection[int] = (),
    tail_numel: int = 0,
    allocate: bool = True,
    sparse: bool = False,
) -> Bucket:
    """One bucket with ``params`` in their order; ``deferred`` holds positions."""
    specs = []
    for i, p in enumerate(params):
        dtype = str(p.dtype).removeprefix("torch.")
        specs.append(ParameterSpec(f"p{i}", p.shape, p.stride(), dtype, p.element_size(), "cpu", sparse=sparse))
    (spec,) = make_plan(specs, caps_bytes=(10**9, 10**9), order=range(len(params))).buckets
    slots = []
    for position, param in enumerate(params):
        slot = Slot(f"p{position}", param)
        slot.index = slot.position = position
        slot.bucket = 0
        slot.deferred = position in deferred
        slots.append(slot)
    bucket = Bucket(spec, slots)
    if allocate:
        bucket.allocate(empty_flat, tail_numel=tail_numel)
    return bucket


def _flat(bucket: Bucket) -> list[float]:
    return bucket.payload.tolist()


def _views(bucket: Bucket) -> list[Tensor]:
    return [slot.view for slot in bucket.slots]


def _absorb(slot: Slot, grad: Tensor, scale: float = 1.0) -> None:
    slot.param.grad = grad
    assert absorb([slot], [0.0] * 9, scale=scale) == [slot]
    assert slot.filled
    assert slot.param.grad is None


# -- storage -------------------------------------------------------------------------------------------


def test_views_lie_one_behind_the_other_in_the_flat_buffer() -> None:
    bucket = _bucket([_param(2, 3), _param(), _param(4)])
    assert bucket.flat.shape == (11,)
    assert bucket.tail is None
    for n, view in enumerate(_views(bucket)):
        view.fill_(n)
    assert _flat(bucket) == [0.0] * 6 + [1.0] + [2.0] * 4
    assert [view.shape for view in _views(bucket)] == [(2, 3), (), (4,)]


def test_the_tail_lies_behind_the_gradients() -> None:
    bucket = _bucket([_param(2), _param(3)], tail_numel=4)
    assert (bucket.flat.numel(), bucket.payload.numel(), bucket.tail.numel()) == (9, 5, 4)
    bucket.flat.zero_()
    bucket.tail.fill_(7)
    assert bucket.flat.tolist() == [0.0] * 5 + [7.0] * 4


def test_an_allocator_of_ones_own_is_used() -> None:
    # A transport may hand out a part of a larger block, which does not begin at its beginning.
    block = torch.zeros(100, dtype=torch.float64)
    allocator = mock.Mock(side_effect=lambda numel, *_: block[10 : 10 + numel])
    bucket = _bucket([_param(2, dtype=torch.float64), _param(3, dtype=torch.float64)], allocate=False)
    bucket.allocate(allocator, tail_numel=1)
    allocator.assert_called_once_with(6, torch.float64, torch.device("cpu"))
    _views(bucket)[1].fill_(5)
    assert block.nonzero().flatten().tolist() == [12, 13, 14]


DENSE = {
    "contiguous": torch.randn(4, 3, 2, 2),
    "channels_last": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    # With images of size 1 it is contiguous in either format, but the strides differ.
    "channels_last of size 1": torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "transposed": torch.randn(2, 3).t(),
    "scalar": torch.randn(()),
}
WITH_HOLES = {
    "slice": torch.randn(4, 6)[:, :3],
    "step": torch.randn(8)[::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("tensor", DENSE.values(), ids=DENSE)
def test_a_view_has_the_strides_of_its_parameter(tensor: Tensor) -> None:
    param = nn.Parameter(tensor)
    assert is_dense(param)
    bucket = _bucket([_param(5), param])
    view = _views(bucket)[1]
    assert view.stride() == param.stride()
    # This holds whatever strides the gradient has.
    for grad in (torch.randn_like(param), torch.randn(param.shape)):
        bucket.slots[1].forget()
        _absorb(bucket.slots[1], grad.clone())
        assert torch.equal(view, grad)
        # The bytes lie as they lie in the parameter, so an optimizer reads both in one pass.
        assert torch.equal(bucket.payload[5:].as_strided(param.shape, param.stride(), 5), grad)


@pytest.mark.parametrize("tensor", WITH_HOLES.values(), ids=WITH_HOLES)
def test_a_parameter_with_holes_gets_a_view_without(tensor: Tensor) -> None:
    param = nn.Parameter(tensor)
    bucket = _bucket([param, _param(3)])
    first, second = _views(bucket)
    assert not is_dense(param)
    assert is_dense(first)
    assert first.shape == param.shape
    first.fill_(1)
    second.fill_(2)
    assert _flat(bucket) == [1.0] * param.numel() + [2.0] * 3


def test_an_empty_parameter_takes_no_room() -> None:
    bucket = _bucket([_param(0, 3), _param(2), _param(3, 0)])
    assert [view.numel() for view in _views(bucket)] == [0, 2, 0]
    assert len(_flat(bucket)) == 2


def test_a_gradient_on_a_bucket_is_no_view_to_autograd() -> None:
    view = _views(_bucket([_param(3)]))[0]
    assert not view._is_view()
    view.detach_()
    view.requires_grad_()


def test_a_sparse_bucket_has_no_storage() -> None:
    bucket = _bucket([_param(4, 2)], sparse=True)
    assert (bucket.flat, bucket.slots[0].view, bucket.is_kept_by_somebody()) == (None, None, False)


def test_what_overlaps_is_not_dense() -> None:
    assert not is_dense(torch.empty(6).as_strided((3, 2), (1, 1)))


def test_a_bucket_is_described_by_its_first_parameters() -> None:
    assert _bucket([_param(1)] * 2).describe() == "bucket 0 (p0, p1)"
    assert _bucket([_param(1)] * 5).describe() == "bucket 0 (p0, p1, p2, ...)"


# -- gradients that are kept ---------------------------------------------------------------------------


def _at_rest(bucket: Bucket) -> list[nn.Parameter]:
    """As after a step: gradients handed out."""
    for slot in bucket.slots:
        slot.param.grad = slot.view
    return [slot.param for slot in bucket.slots]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("keep", "keeps"),
    [
        (lambda grad: grad, True),
        (lambda grad: grad.view(-1), True),
        (lambda grad: grad.detach(), True),
        (lambda grad: grad[:1], True),
        (lambda grad: [{"deep": grad}], True),
        (lambda grad: grad.data, True),
        (lambda grad: None, False),
        (lambda grad: (grad.clone(), grad.norm()), False),
    ],
    ids=["itself", "view", "detached", "part", "in a container", "data", "nothing", "copies"],
)
def test_a_gradient_that_somebody_keeps_is_noticed(keep: Any, keeps: bool) -> None:
    bucket = _bucket([_param(2), _param(3)], tail_numel=1)
    params = _at_rest(bucket)
    kept = keep(params[1].grad)
    assert not bucket.is_kept_by_somebody()  # its parameter has not let go of it: it is the gradient itself
    params[1].grad = None
    assert bucket.is_kept_by_somebody() == keeps
    del kept
    assert not bucket.is_kept_by_somebody()


def test_renewing_leaves_kept_gradients_and_moves_those_in_use() -> None:
    bucket = _bucket([_param(2), _param(3)], tail_numel=1)
    _views(bucket)[0].fill_(4)
    _views(bucket)[1].fill_(5)
    first, second = _at_rest(bucket)
    kept, first.grad = first.grad, None
    bucket.renew(empty_flat)
    assert first.grad is None
    assert second.grad is bucket.slots[1].view
    assert second.grad.tolist() == [5.0, 5.0, 5.0]
    assert bucket.tail.numel() == 1
    assert not bucket.is_kept_by_somebody()
    _views(bucket)[0].fill_(9)
    assert kept.tolist() == [4.0, 4.0]


# After the first step the buckets are laid out anew, and after the third no more.
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("dropped", ["all", "some"])
@on_ranks()
def test_a_kept_gradient_does_not_change_in_the_next_step(rank: int, size: int, dropped: str, steps: int) -> None:
    """``zero_grad`` of an optimizer that has some of the parameters must be enough."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = paceline.DistributedDataParallel(module)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
    kept = module[0].weight.grad
    before = kept.clone()
    (module if dropped == "all" else module[0]).zero_grad()
    ddp(torch.full((1, 2), 5.0)).sum().backward()
    assert torch.equal(kept, before)
    assert kept is not module[0].weight.grad


# -- absorbing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_a_gradient_is_moved_into_the_bucket_and_scaled(scale: float, dtype: torch.dtype) -> None:
    bucket = _bucket([_param(2, dtype=dtype), _param(2, dtype=dtype)])
    bucket.payload.zero_()  # type: ignore[union-attr]
    grad = torch.tensor([4.0, 8.0], dtype=dtype)
    _absorb(bucket.slots[1], grad, scale)
    assert _flat(bucket) == [0.0, 0.0, 4.0 * scale, 8.0 * scale]
    assert grad.tolist() == [4.0, 8.0]
    # A second contribution is added.
    _absorb(bucket.slots[1], grad, scale)
    assert _flat(bucket) == [0.0, 0.0, 8.0 * scale, 16.0 * scale]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_gradient_that_is_in_the_bucket_already_is_only_scaled(scale: float) -> None:
    bucket = _bucket([_param(2)])
    _absorb(bucket.slots[0], _views(bucket)[0].fill_(4), scale)
    assert _flat(bucket) == [4.0 * scale] * 2


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_sparse_gradient_in_a_dense_bucket(scale: float) -> None:
    bucket = _bucket([_param(3, 2)])
    for _ in range(2):
        grad = torch.sparse_coo_tensor([[1]], [[2.0, 4.0]], (3, 2), check_invariants=True)
        _absorb(bucket.slots[0], grad, scale)
    assert _flat(bucket) == [0.0, 0.0, 4.0 * scale, 8.0 * scale, 0.0, 0.0]


def test_forgetting_leaves_a_slot_for_the_next_backward() -> None:
    slot = _bucket([_param(2)]).slots[0]
    _absorb(slot, torch.ones(2))
    slot.late = slot.saved = torch.ones(2)
    slot.forget()
    assert (slot.filled, slot.late, slot.saved) == (False, None, None)


@pytest.mark.parametrize("deferred", [range(5), ()], ids=["deferred", "at once"])
def test_absorbing_many_gradients(deferred: Collection[int]) -> None:
    bucket = _bucket([_param(2) for _ in range(5)], deferred=deferred)
    slots, used = bucket.slots, [0.0] * 5
    _absorb(slots[4], torch.full((2,), 1.0))
    slots[0].param.grad = torch.full((2,), 1.0)
    slots[1].param.grad = _views(bucket)[1].fill_(2)
    slots[2].param.grad = torch.sparse_coo_tensor([[0]], [3.0], (2,), check_invariants=True)
    slots[4].param.grad = torch.full((2,), 4.0)
    # Autograd may announce a gradient that is undefined, as that of slot 3.
    assert absorb(slots, used) == [slots[0], slots[1], slots[2], slots[4]]
    assert used == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert [slot.filled for slot in slots] == [True, True, True, False, True]
    assert all(slot.param.grad is None for slot in slots)
    flat = _flat(bucket)
    assert flat[:6] + flat[8:] == [1.0, 1.0, 2.0, 2.0, 3.0, 0.0, 5.0, 5.0]


@pytest.mark.parametrize(("deferred", "scale"), [((), 0.5), ((0, 1, 2), 1.0)], ids=["at once", "deferred"])
def test_an_early_gradient_is_added_to_what_is_there(deferred: Collection[int], scale: float) -> None:
    bucket = _bucket([_param(2) for _ in range(3)], deferred=deferred)
    slots = bucket.slots
    slots[1].param.grad = torch.full((2,), 2.0)
    _absorb(slots[2], torch.full((2,), 6.0), 0.5)
    before = _views(bucket)[2][0].item()
    absorb_early([(slot, torch.full((2,), 4.0)) for slot in slots], scale=0.5)
    assert all(slot.filled for slot in slots)
    assert slots[1].param.grad is None
    assert _flat(bucket) == [4.0 * scale] * 2 + [6.0 * scale] * 2 + [before + 4.0 * scale] * 2


# -- completing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [set(), {0, 1, 2, 3}, {0}, {3}, {1, 2}, {0, 2}, {1, 3}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_every_gradient_is_scaled_once_whichever_way_it_came(deferred: set[int], scale: float) -> None:
    bucket = _bucket([_param(2), _param(1), _param(3), _param(2)], deferred=deferred, tail_numel=1)
    bucket.tail.fill_(8)  # type: ignore[union-attr]
    used = [1.0] * 4
    for position, slot in enumerate(bucket.slots):
        slot.param.grad = torch.full_like(slot.param, 2.0 * (position + 1))
    # It goes as in a step: some gradients come in batches, and others are left to the end.
    absorb(bucket.slots[:2], used, scale=scale)
    bucket.complete(scale, used)
    expected = [2.0] * 2 + [4.0] + [6.0] * 3 + [8.0] * 2
    assert _flat(bucket) == [value * scale for value in expected]
    assert bucket.tail.tolist() == [8.0]  # type: ignore[union-attr]
    assert all(slot.param.grad is None for slot in bucket.slots)


@pytest.mark.parametrize("deferred", [set(), {0, 1}], ids=["at once", "deferred"])
def test_what_got_no_gradient_counts_as_zero(deferred: set[int]) -> None:
    bucket = _bucket([_param(2), _param(2)], deferred=deferred)
    bucket.payload.fill_(float("nan"))  # type: ignore[union-attr]
    bucket.slots[1].param.grad = torch.ones(2)
    bucket.complete(0.5, [0.0, 1.0])
    assert _flat(bucket) == [0.0, 0.0, 0.5, 0.5]
    assert not bucket.slots[0].filled


@pytest.mark.parametrize("deferred", [set(), {0}], ids=["at once", "deferred"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_value_from_before_is_saved_when_nothing_came(deferred: set[int], in_place: bool) -> None:
    bucket = _bucket([_param(2)], deferred=deferred)
    slot = bucket.slots[0]
    slot.param.grad = _views(bucket)[0].fill_(6) if in_place else torch.full((2,), 6.0)
    bucket.complete(0.5, [0.0])
    assert _flat(bucket) == [3.0, 3.0]
    # Nobody used it: it is as it was.
    slot.hand_out(used=False)
    assert slot.param.grad.tolist() == [6.0, 6.0]
    # It is not saved when something came.
    slot.forget()
    bucket.complete(0.5, [1.0])
    assert slot.saved is None


def test_a_parameter_that_another_wrapper_uses_is_left_alone() -> None:
    bucket = _bucket([_param(2), _param(2)])
    other = torch.ones(2)
    bucket.slots[0].owned = False
    bucket.slots[0].param.grad = other
    bucket.slots[1].param.grad = torch.ones(2)
    bucket.complete(1.0, [0.0, 1.0])
    assert bucket.slots[0].param.grad is other
    assert _flat(bucket) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("numels", "deferred", "runs"),
    [((2, 1, 3, 2, 4), {0, 1, 3}, [(0, 3), (6, 2)]), ((2, 3), {1}, [(2, 3)]), ((2,), (), [])],
)
def test_deferred_runs_are_the_stretches_of_deferred_slots(
    numels: tuple[int, ...], deferred: Collection[int], runs: list[tuple[int, int]]
) -> None:
    bucket = _bucket([_param(numel) for numel in numels], deferred=deferred, tail_numel=2)
    assert [(run.storage_offset(), run.numel()) for run in bucket._deferred_runs] == runs


@pytest.mark.parametrize(("base", "value"), [(None, 3.0), (10.0, 13.0)])
def test_a_hand_out_gives_the_reduced_gradient_and_what_was_to_stay_unscaled(base: float | None, value: float) -> None:
    bucket = _bucket([_param(2)])
    slot = bucket.slots[0]
    slot.hand_out(used=False)
    assert slot.param.grad is None, "nobody used it and nobody had one"
    _views(bucket)[0].fill_(3)
    slot.base = None if base is None else torch.full((2,), base)
    slot.hand_out(used=True)
    assert slot.param.grad is slot.view
    assert _flat(bucket) == [value] * 2


def test_late_contributions_are_laid_out_as_the_bucket_is() -> None:
    last = nn.Parameter(torch.randn(2, 2).t())
    bucket = _bucket([_param(2), _param(3), last], tail_numel=1)
    bucket.flat.fill_(9)  # type: ignore[union-attr]
    bucket.slots[0].late = torch.tensor([2.0, 4.0])
    bucket.slots[2].late = torch.tensor([[2.0, 4.0], [6.0, 8.0]])
    scratch = bucket.late_contributions(0.5)
    assert scratch.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 1.0, 3.0, 2.0, 4.0]
    assert _flat(bucket) == [9.0] * 9


# -- what a comm hook sees -----------------------------------------------------------------------------


def test_a_comm_hook_sees_the_bucket() -> None:
    bucket = _bucket([_param(2, 2), _param(3)], tail_numel=2)
    bucket.flat.copy_(torch.arange(9.0))  # type: ignore[union-attr]
    grads = GradBucket(bucket, is_last=True)
    assert grads.index() == 0
    assert grads.is_last()
    assert not GradBucket(bucket, is_last=False).is_last()
    assert grads.buffer().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [p.data_ptr() for p in grads.parameters()] == [slot.param.data_ptr() for slot in bucket.slots]
    assert [grad.tolist() for grad in grads.gradients()] == [[[0.0, 1.0], [2.0, 3.0]], [4.0, 5.0, 6.0]]
    grads.gradients()[1].fill_(0)
    assert _flat(bucket)[4:] == [0.0] * 3


def test_a_hook_may_set_another_buffer_or_resize_its_own() -> None:
    bucket = _bucket([_param(2), _param(1)])
    bucket.payload.zero_()  # type: ignore[union-attr]
    grads = GradBucket(bucket, is_last=False)
    grads.buffer().resize_(1)
    other = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    grads.set_buffer(other)
    assert grads.buffer() is other
    assert [grad.tolist() for grad in grads.gradients()] == [[1.0, 2.0], [3.0]]
    assert _flat(bucket) == [0.0] * 3
    shown = GradBucket(bucket, is_last=False, buffer=torch.tensor([1.0, 2.0, 3.0]))
    assert [grad.tolist() for grad in shown.gradients()] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize("tensor", (DENSE | WITH_HOLES).values(), ids=DENSE | WITH_HOLES)
def test_the_gradients_a_hook_sees_are_those_of_the_parameters(tensor: Tensor) -> None:
    param = nn.Parameter(tensor)
    bucket = _bucket([param, _param(30)])
    expected = torch.randn(param.shape)
    _absorb(bucket.slots[0], expected.clone())
    _views(bucket)[1].fill_(-1)
    first, second = GradBucket(bucket, is_last=True).gradients()
    assert first.shape == param.shape
    assert torch.equal(first, expected)
    assert second.tolist() == [-1.0] * 30
