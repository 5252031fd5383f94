"""Buckets: storage and views, gradients that are kept, absorbing and scaling, and what a comm hook sees."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.bucket import Bucket, GradBucket, Slot, absorb_together, empty_flat, is_dense
from paceline.plan import ParameterSpec, make_plan


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
    """One bucket with ``params`` in their order; ``deferred`` are places."""
    specs = [
        ParameterSpec(
            f"p{i}",
            tuple(p.shape),
            tuple(p.stride()),
            str(p.dtype).removeprefix("torch."),
            p.element_size(),
            "cpu",
            sparse=sparse,
        )
        for i, p in enumerate(params)
    ]
    (spec,) = make_plan(specs, caps_bytes=(10**9, 10**9), order=list(range(len(params)))).buckets
    slots = []
    for place, param in enumerate(params):
        slot = Slot(f"p{place}", param)
        slot.index = slot.place = place
        slot.bucket = 0
        slot.deferred = place in deferred
        slots.append(slot)
    bucket = Bucket(spec, slots)
    if allocate:
        bucket.allocate(empty_flat, tail_numel=tail_numel)
    return bucket


def _flat(bucket: Bucket) -> list[float]:
    assert bucket.payload is not None
    return bucket.payload.tolist()


def _views(bucket: Bucket) -> list[Tensor]:
    views = [slot.view for slot in bucket.slots]
    assert all(view is not None for view in views)
    return views  # type: ignore[return-value]


# -- storage -------------------------------------------------------------------------------------------


def test_views_lie_one_behind_the_other_in_the_flat_buffer() -> None:
    bucket = _bucket([_param(2, 3), _param(), _param(4)])
    assert bucket.flat is not None
    assert bucket.flat.shape == (11,)
    assert bucket.tail is None
    for n, view in enumerate(_views(bucket)):
        view.fill_(n)
    assert _flat(bucket) == [0.0] * 6 + [1.0] + [2.0] * 4
    assert [view.shape for view in _views(bucket)] == [(2, 3), (), (4,)]


def test_the_tail_lies_behind_the_gradients() -> None:
    bucket = _bucket([_param(2), _param(3)], tail_numel=4)
    assert bucket.flat is not None
    assert bucket.payload is not None
    assert bucket.tail is not None
    assert (bucket.flat.numel(), bucket.payload.numel(), bucket.tail.numel()) == (9, 5, 4)
    bucket.flat.zero_()
    bucket.tail.fill_(7)
    assert bucket.flat.tolist() == [0.0] * 5 + [7.0] * 4


def test_an_allocator_of_ones_own_is_used() -> None:
    # A transport may hand out a part of a larger block, which does not begin at its beginning.
    block = torch.zeros(100, dtype=torch.float64)
    asked: list[tuple[int, torch.dtype, torch.device]] = []

    def allocator(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        asked.append((numel, dtype, device))
        return block[10 : 10 + numel]

    bucket = _bucket([_param(2, dtype=torch.float64), _param(3, dtype=torch.float64)], allocate=False)
    bucket.allocate(allocator, tail_numel=1)
    assert asked == [(6, torch.float64, torch.device("cpu"))]
    _views(bucket)[1].fill_(5)
    assert block.nonzero().flatten().tolist() == [12, 13, 14]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"]
)
def test_a_view_has_the_strides_of_its_parameter(memory_format: torch.memory_format, size: int) -> None:
    # Of size 1 it is contiguous in either format, but the strides differ.
    param = nn.Parameter(torch.randn(4, 3, size, size).to(memory_format=memory_format))
    bucket = _bucket([_param(5), param])
    view = _views(bucket)[1]
    assert view.stride() == param.stride()
    param.grad = torch.randn_like(param)
    expected = param.grad.clone()
    assert bucket.slots[1].absorb(1.0)
    assert torch.equal(view, expected)
    # The bytes lie as they lie in the parameter, so an optimizer reads both in one pass.
    assert bucket.payload is not None
    assert torch.equal(bucket.payload[5:], torch.as_strided(expected, (expected.numel(),), (1,)))


def test_a_transposed_parameter_keeps_its_strides() -> None:
    param = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    view = _views(_bucket([param]))[0]
    assert view.stride() == (1, 3)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.randn(4, 6)[:, :3], lambda: torch.randn(8)[::2], lambda: torch.randn(1, 3).expand(4, 3)],
    ids=["slice", "step", "expanded"],
)
def test_a_parameter_with_holes_gets_a_view_without(make: Any) -> None:
    param = nn.Parameter(make())
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
    assert bucket.flat is not None
    assert bucket.flat.numel() == 2


def test_a_gradient_on_a_bucket_is_no_view_to_autograd() -> None:
    view = _views(_bucket([_param(3)]))[0]
    assert not view._is_view()
    view.detach_()
    view.requires_grad_()


def test_a_sparse_bucket_has_no_storage() -> None:
    bucket = _bucket([_param(4, 2)], sparse=True)
    assert bucket.flat is None
    assert bucket.slots[0].view is None
    assert not bucket.is_kept_by_somebody()


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(2, 3), True),
        (torch.empty(2, 3).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(5, 1, 2), True),
        (torch.empty(4, 6)[:, :3], False),
        (torch.empty(8)[::2], False),
        (torch.empty(1, 3).expand(4, 3), False),
        (torch.empty(6).as_strided((3, 2), (1, 1)), False),
    ],
)
def test_dense_means_without_holes_or_overlap(tensor: Tensor, dense: bool) -> None:
    assert is_dense(tensor) == dense


def _cast_a_part(rank: int, size: int, part: int) -> list[tuple[torch.dtype, torch.dtype]]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = paceline.DistributedDataParallel(module)
    module[0].register_forward_hook(lambda layer, args, output: output.to(module[1].weight.dtype))
    for step in range(3):
        if step == 1:
            ddp.zero_grad()
            module[part].double()
        ddp(torch.ones(1, 2, dtype=module[0].weight.dtype)).sum().backward()
    return [(param.dtype, param.grad.dtype) for param in module.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("part", [0, 1])
def test_buckets_follow_a_cast_of_a_part_of_the_module(ranks: Callable[..., list[Any]], part: int) -> None:
    wide, narrow = (torch.float64,) * 2, (torch.float32,) * 2
    expected = [wide] * 2 + [narrow] * 2 if part == 0 else [narrow] * 2 + [wide] * 2
    assert ranks(_cast_a_part, part) == [expected] * 2


def test_a_bucket_is_described_by_its_first_parameters() -> None:
    assert _bucket([_param(1)] * 2).describe() == "bucket 0 (p0, p1)"
    assert _bucket([_param(1)] * 5).describe() == "bucket 0 (p0, p1, p2, ...)"


# -- gradients that are kept ---------------------------------------------------------------------------


def _at_rest(bucket: Bucket) -> list[nn.Parameter]:
    """As after a step: gradients handed out."""
    for slot in bucket.slots:
        slot.param.grad = slot.view
    return [slot.param for slot in bucket.slots]  # type: ignore[misc]


def test_nobody_keeps_a_gradient_that_was_only_in_its_place() -> None:
    bucket = _bucket([_param(2), _param(3)], tail_numel=1)
    assert not bucket.is_kept_by_somebody()
    for param in _at_rest(bucket):
        assert not bucket.is_kept_by_somebody()
        param.grad = None
    assert not bucket.is_kept_by_somebody()


@pytest.mark.parametrize(
    "keep",
    [
        lambda grad: grad,
        lambda grad: grad.view(-1),
        lambda grad: grad.detach(),
        lambda grad: grad[:1],
        lambda grad: [{"deep": grad}],
        lambda grad: grad.data,
    ],
    ids=["itself", "view", "detached", "part", "in a container", "data"],
)
def test_a_gradient_that_somebody_keeps_is_noticed(keep: Any) -> None:
    bucket = _bucket([_param(2), _param(3)])
    params = _at_rest(bucket)
    kept = keep(params[1].grad)
    assert not bucket.is_kept_by_somebody()  # its parameter has not let go of it: it is the gradient itself
    params[1].grad = None
    assert bucket.is_kept_by_somebody()
    del kept
    assert not bucket.is_kept_by_somebody()


def test_a_copy_is_not_keeping() -> None:
    bucket = _bucket([_param(2)])
    params = _at_rest(bucket)
    copied = params[0].grad.clone()  # type: ignore[union-attr]
    norm = params[0].grad.norm()  # type: ignore[union-attr]
    params[0].grad = None
    assert not bucket.is_kept_by_somebody()
    del copied, norm


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
    assert bucket.tail is not None
    assert bucket.tail.numel() == 1
    assert not bucket.is_kept_by_somebody()
    _views(bucket)[0].fill_(9)
    assert kept is not None
    assert kept.tolist() == [4.0, 4.0]


def _keep_a_gradient(rank: int, size: int, dropped: str) -> tuple[bool, bool]:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = paceline.DistributedDataParallel(module)
    # Past the steps in which buckets may be laid out anew.
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
    kept = module[0].weight.grad
    assert kept is not None
    before = kept.clone()
    (module if dropped == "all" else module[0]).zero_grad()
    ddp(torch.full((1, 2), 5.0)).sum().backward()
    return torch.equal(kept, before), kept is module[0].weight.grad


@pytest.mark.parametrize("dropped", ["all", "some"])
def test_a_kept_gradient_does_not_change_in_the_next_step(ranks: Callable[..., list[Any]], dropped: str) -> None:
    """``zero_grad`` of an optimizer that has some of the parameters must be enough."""
    assert ranks(_keep_a_gradient, dropped) == [(True, False)] * 2


# -- absorbing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_gradient_is_moved_into_the_bucket_and_scaled(scale: float) -> None:
    bucket = _bucket([_param(2), _param(2)])
    slot = bucket.slots[1]
    bucket.payload.zero_()  # type: ignore[union-attr]
    grad = torch.tensor([4.0, 8.0])
    slot.param.grad = grad
    assert slot.absorb(scale)
    assert slot.filled
    assert slot.param.grad is None
    assert _flat(bucket) == [0.0, 0.0, 4.0 * scale, 8.0 * scale]
    assert grad.tolist() == [4.0, 8.0]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_second_contribution_is_added(scale: float) -> None:
    slot = _bucket([_param(2)]).slots[0]
    for value in (4.0, 8.0):
        slot.param.grad = torch.full((2,), value)
        assert slot.absorb(scale)
    assert slot.view is not None
    assert slot.view.tolist() == [12.0 * scale] * 2


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_gradient_that_is_in_its_place_is_only_scaled(scale: float) -> None:
    bucket = _bucket([_param(2)])
    slot = bucket.slots[0]
    _at_rest(bucket)
    slot.param.grad.fill_(4)  # type: ignore[union-attr]
    assert slot.absorb(scale)
    assert _flat(bucket) == [4.0 * scale] * 2
    assert slot.param.grad is None


def test_no_gradient_is_nothing_to_absorb() -> None:
    slot = _bucket([_param(2)]).slots[0]
    assert not slot.absorb(0.5)
    assert not slot.filled


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_sparse_gradient_in_a_dense_bucket(scale: float) -> None:
    slot = _bucket([_param(3, 2)]).slots[0]
    for _ in range(2):
        slot.param.grad = torch.sparse_coo_tensor([[1]], [[2.0, 4.0]], (3, 2), check_invariants=True)
        assert slot.absorb(scale)
    assert slot.view is not None
    assert slot.view.tolist() == [[0.0, 0.0], [4.0 * scale, 8.0 * scale], [0.0, 0.0]]


def test_a_gradient_with_other_strides_than_the_parameter() -> None:
    param = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
    slot = _bucket([param]).slots[0]
    grad = torch.randn(2, 3, 2, 2)
    param.grad = grad
    slot.absorb(0.5)
    assert slot.view is not None
    assert torch.equal(slot.view, grad * 0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    slot = _bucket([_param(2, dtype=dtype)]).slots[0]
    slot.param.grad = torch.full((2,), 4.0, dtype=dtype)
    slot.absorb(0.25)
    assert slot.view is not None
    assert slot.view.dtype == dtype
    assert torch.equal(slot.view, torch.ones(2, dtype=dtype))


def test_forgetting_leaves_a_slot_for_the_next_backward() -> None:
    slot = _bucket([_param(2)]).slots[0]
    slot.param.grad = torch.ones(2)
    slot.absorb(1.0)
    slot.late = slot.saved = torch.ones(2)
    slot.forget()
    assert (slot.filled, slot.late, slot.saved) == (False, None, None)


def test_absorbing_together_is_absorbing_one_by_one() -> None:
    bucket = _bucket([_param(2) for _ in range(5)])
    slots = bucket.slots
    used = [0.0] * 5
    slots[0].param.grad = torch.full((2,), 1.0)
    slots[1].param.grad = slots[1].view
    slots[1].view.fill_(2)  # type: ignore[union-attr]
    slots[2].param.grad = torch.sparse_coo_tensor([[0]], [3.0], (2,), check_invariants=True)
    slots[4].param.grad = torch.full((2,), 1.0)
    slots[4].absorb(1.0)
    slots[4].param.grad = torch.full((2,), 4.0)
    came = absorb_together(slots, used)
    assert came == [slots[0], slots[1], slots[2], slots[4]]
    assert used == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert [slot.filled for slot in slots] == [True, True, True, False, True]
    assert all(slot.param.grad is None for slot in slots)
    flat = _flat(bucket)
    assert flat[:6] + flat[8:] == [1.0, 1.0, 2.0, 2.0, 3.0, 0.0, 5.0, 5.0]


# -- completing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [set(), {0, 1, 2, 3}, {0}, {3}, {1, 2}, {0, 2}, {1, 3}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_every_gradient_is_scaled_once_whichever_way_it_came(deferred: set[int], scale: float) -> None:
    bucket = _bucket([_param(2), _param(1), _param(3), _param(2)], deferred=deferred, tail_numel=1)
    bucket.tail.fill_(8)  # type: ignore[union-attr]
    used = [1.0] * 4
    for place, slot in enumerate(bucket.slots):
        slot.param.grad = torch.full_like(slot.param, 2.0 * (place + 1))
    # As in a step: some come at once, some together, and one is left to the end.
    absorb_together([slot for slot in bucket.slots[:2] if slot.deferred], used)
    for slot in bucket.slots[:2]:
        if not slot.deferred:
            slot.absorb(scale)
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
    if in_place:
        slot.view.fill_(6)  # type: ignore[union-attr]
        slot.param.grad = slot.view
    else:
        slot.param.grad = torch.full((2,), 6.0)
    bucket.complete(0.5, [0.0])
    assert _flat(bucket) == [3.0, 3.0]
    assert slot.saved is not None
    assert slot.saved.tolist() == [6.0, 6.0]
    # Nobody used it: it is as it was.
    slot.hand_out(used=False)
    assert slot.param.grad is not None
    assert slot.param.grad.tolist() == [6.0, 6.0]


@pytest.mark.parametrize("deferred", [set(), {0}], ids=["at once", "deferred"])
def test_nothing_is_saved_when_something_came(deferred: set[int]) -> None:
    bucket = _bucket([_param(2)], deferred=deferred)
    bucket.slots[0].param.grad = torch.ones(2)
    bucket.complete(0.5, [1.0])
    assert bucket.slots[0].saved is None


def test_a_parameter_that_another_wrapper_uses_is_left_alone() -> None:
    bucket = _bucket([_param(2), _param(2)])
    other = torch.ones(2)
    bucket.slots[0].owned = False
    bucket.slots[0].param.grad = other
    bucket.slots[1].param.grad = torch.ones(2)
    bucket.complete(1.0, [0.0, 1.0])
    assert bucket.slots[0].param.grad is other
    assert _flat(bucket) == [0.0, 0.0, 1.0, 1.0]


def test_runs_are_the_stretches_of_deferred_slots() -> None:
    bucket = _bucket([_param(2), _param(1), _param(3), _param(2), _param(4)], deferred={0, 1, 3}, tail_numel=2)
    assert [(run.storage_offset(), run.numel()) for run in bucket._runs] == [(0, 3), (6, 2)]
    bucket = _bucket([_param(2), _param(3)], deferred={1}, tail_numel=2)
    assert [(run.storage_offset(), run.numel()) for run in bucket._runs] == [(2, 3)]
    assert _bucket([_param(2)])._runs == []


def test_a_hand_out_puts_the_reduced_gradient_in_its_place() -> None:
    slot = _bucket([_param(2)]).slots[0]
    slot.view.fill_(3)  # type: ignore[union-attr]
    slot.hand_out(used=True)
    assert slot.param.grad is slot.view


def test_a_hand_out_adds_what_was_to_stay_unscaled() -> None:
    slot = _bucket([_param(2)]).slots[0]
    slot.view.fill_(3)  # type: ignore[union-attr]
    slot.base = torch.full((2,), 10.0)
    slot.hand_out(used=True)
    assert slot.param.grad is slot.view
    assert slot.param.grad.tolist() == [13.0, 13.0]  # type: ignore[union-attr]


def test_a_hand_out_of_what_nobody_used_and_nobody_had_is_none() -> None:
    slot = _bucket([_param(2)]).slots[0]
    slot.hand_out(used=False)
    assert slot.param.grad is None


def test_late_contributions_are_laid_out_as_the_bucket_is() -> None:
    last = nn.Parameter(torch.randn(2, 2).t())
    bucket = _bucket([_param(2), _param(3), last], tail_numel=1)
    bucket.flat.fill_(9)  # type: ignore[union-attr]
    bucket.slots[0].late = torch.tensor([2.0, 4.0])
    bucket.slots[2].late = torch.tensor([[2.0, 4.0], [6.0, 8.0]])
    scratch = bucket.lay_out_late(0.5)
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


def test_a_hook_may_set_another_buffer() -> None:
    bucket = _bucket([_param(2), _param(1)])
    bucket.payload.zero_()  # type: ignore[union-attr]
    grads = GradBucket(bucket, is_last=False)
    other = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16)
    grads.set_buffer(other)
    assert grads.buffer() is other
    assert [grad.tolist() for grad in grads.gradients()] == [[1.0, 2.0], [3.0]]
    assert _flat(bucket) == [0.0] * 3


def test_a_hook_may_resize_its_buffer_without_harm() -> None:
    bucket = _bucket([_param(2), _param(1)])
    grads = GradBucket(bucket, is_last=False)
    grads.buffer().resize_(1)
    assert bucket.payload is not None
    assert bucket.payload.shape == (3,)


def test_a_bucket_can_be_shown_with_other_contents() -> None:
    bucket = _bucket([_param(2), _param(1)])
    grads = GradBucket(bucket, is_last=False, buffer=torch.tensor([1.0, 2.0, 3.0]))
    assert [grad.tolist() for grad in grads.gradients()] == [[1.0, 2.0], [3.0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 2).t(),
        lambda: torch.randn(4, 6)[:, :3],
        lambda: torch.randn(8)[::2],
        lambda: torch.randn(1, 3).expand(4, 3),
    ],
    ids=["channels_last", "transposed", "slice", "step", "expanded"],
)
def test_the_gradients_a_hook_sees_are_those_of_the_parameters(make: Any) -> None:
    param = nn.Parameter(make())
    bucket = _bucket([param, _param(30)])
    expected = torch.randn(param.shape)
    param.grad = expected.clone()
    bucket.slots[0].absorb(1.0)
    _views(bucket)[1].fill_(-1)
    first, second = GradBucket(bucket, is_last=True).gradients()
    assert first.shape == param.shape
    assert torch.equal(first, expected)
    assert second.tolist() == [-1.0] * 30
