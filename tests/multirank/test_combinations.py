"""Where two features meet: weights, joining, freezing, accumulation, hooks, precision, other groups."""

from __future__ import annotations

import copy
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import MixedPrecision, SyncBatchNorm
from paceline.errors import PacelineError, ParameterMismatchError, StateError

from ._ddp import DDP, assert_in_sync, batch, ours_only

pytestmark = ours_only

LOW = torch.bfloat16


def _line():
    """A module whose gradient is its input: rank r has r + 1, and the mean of two ranks is 1.5."""
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False)


def _x(rank):
    return torch.full((1, 3), rank + 1.0)


class _Sum(nn.Module):
    """``a(x) + b(x) + c(x)``; b only if asked for."""

    def __init__(self, frozen=""):
        super().__init__()
        self.a, self.b, self.c = _line(), _line(), _line()
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x, with_b=True):
        return self.a(x) + (self.b(x) if with_b else 0) + self.c(x)


def _step(ddp, rank, *args):
    ddp(_x(rank), *args).sum().backward()


def _assert_grad(module, value):
    """Exact: all numbers in these tests are small multiples of a power of two."""
    (param,) = module.parameters()
    assert param.grad is not None
    assert param.grad.tolist() == [[value] * 3]


# -- weights -------------------------------------------------------------------------------------------------


def _weighted_unfrozen(rank, world_size):
    model = _Sum(frozen="b")
    ddp = DDP(model)
    _step(ddp, rank)
    ddp.zero_grad()
    model.b.requires_grad_(True)
    for _ in range(2):
        with ddp.weighted([1, 3][rank]):
            _step(ddp, rank)
        for part in (model.a, model.b, model.c):
            _assert_grad(part, (1 * 1 + 3 * 2) / 4)
        ddp.zero_grad()


def test_a_parameter_unfrozen_before_a_weighted_backward_is_weighted(ranks):
    ranks(_weighted_unfrozen)


def _weighted_frozen(rank, world_size):
    model = _Sum()
    ddp = DDP(model)
    model.b.requires_grad_(False)
    with ddp.weighted([1, 3][rank]):
        _step(ddp, rank)
    _assert_grad(model.a, 1.75)
    assert model.b.weight.grad is None
    ddp.zero_grad()
    # Nothing of the block is left: this one counts every rank alike.
    _step(ddp, rank)
    _assert_grad(model.a, 1.5)


def test_a_parameter_frozen_before_a_weighted_backward_leaves_no_weights_behind(ranks):
    ranks(_weighted_frozen)


def _weighted_nested(rank, world_size):
    ddp = DDP(_line())
    with ddp.weighted([1, 3][rank]):
        with pytest.raises(StateError, match="nested"), ddp.weighted(3):
            pass
        # The outer block is as it was.
        _step(ddp, rank)
    _assert_grad(ddp.module, 1.75)
    ddp.zero_grad()
    _step(ddp, rank)
    _assert_grad(ddp.module, 1.5)


def test_weighted_blocks_do_not_nest(ranks):
    ranks(_weighted_nested)


def _weighted_thrown_away(rank, world_size, kept_before, set_to_none):
    ddp = DDP(_line())
    if kept_before:
        _step(ddp, rank)
    with ddp.no_sync(), ddp.weighted([1, 3][rank]):
        _step(ddp, rank)
    ddp.zero_grad(set_to_none=set_to_none)
    with ddp.weighted([1, 3][rank]):
        _step(ddp, rank)
    _assert_grad(ddp.module, 1.75)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kept_before", [False, True])
def test_zero_grad_throws_away_the_weights_of_what_it_throws_away(ranks, kept_before, set_to_none):
    ranks(_weighted_thrown_away, kept_before, set_to_none)


def _weighted_after_unweighted(rank, world_size, kept_before):
    ddp = DDP(_line())
    if kept_before:
        _step(ddp, rank)
    try:
        with ddp.no_sync():
            _step(ddp, rank)
        with ddp.weighted([1, 3][rank]):
            _step(ddp, rank)
    except PacelineError as error:
        return type(error).__name__
    return ddp.module.weight.grad[0, 0].item()


@pytest.mark.parametrize("kept_before", [False, True])
def test_weights_after_backwards_without(ranks, kept_before):
    """Refused on every rank; or a backward without a weight counts 1, and what was there before stays."""
    got = ranks(_weighted_after_unweighted, kept_before)
    assert got[0] == got[1]
    if not isinstance(got[0], str):
        assert got[0] == pytest.approx((1 + 1 * 1 + 2 + 3 * 2) / (2 + 4) + 1.5 * kept_before)


def _unweighted_after_weighted(rank, world_size):
    ddp = DDP(_line())
    with ddp.no_sync(), ddp.weighted([1, 3][rank]):
        _step(ddp, rank)
    _step(ddp, rank)
    return ddp.module.weight.grad[0, 0].item()


def test_a_backward_without_a_weight_after_one_with_counts_one(ranks):
    assert ranks(_unweighted_after_weighted) == [pytest.approx((1 + 1 * 1 + 2 + 3 * 2) / (2 + 4))] * 2


def _weighted_in_join(rank, world_size, by_initial):
    ddp = DDP(_line())
    got = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for _ in range(1 + 2 * rank):
            ddp.zero_grad()
            with ddp.weighted([1, 3][rank]):
                _step(ddp, rank)
            got.append(ddp.module.weight.grad[0, 0].item())
    _step(ddp, rank)
    return got


@pytest.mark.parametrize("by_initial", [True, False])
def test_weights_inside_join(ranks, by_initial):
    # A rank without inputs weighs nothing, whatever plain averages would be divided by.
    assert ranks(_weighted_in_join, by_initial) == [[1.75], [1.75, 2.0, 2.0]]


def _some_weigh_in_join(rank, world_size):
    ddp = DDP(_line())
    try:
        with ddp.join():
            if rank:
                with ddp.weighted(2):
                    _step(ddp, rank)
            else:
                _step(ddp, rank)
    except PacelineError as error:
        return type(error).__name__
    return "no error"


def test_weights_on_some_ranks_only_are_refused_inside_join_too(ranks):
    assert ranks(_some_weigh_in_join) == ["DisagreementError"] * 2


# -- joining -------------------------------------------------------------------------------------------------


def _join_accumulates(rank, world_size):
    """Rank 0 has one update, rank 1 has two, each of two micro-batches."""
    ddp = DDP(_line())
    got = []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            ddp.zero_grad()
            with ddp.no_sync():
                _step(ddp, rank)
            _step(ddp, rank)
            got.append(ddp.module.weight.grad[0, 0].item())
    return got


def test_accumulation_inside_join_that_divides_by_who_is_there(ranks):
    assert ranks(_join_accumulates) == [[3.0], [3.0, 4.0]]


# -- freezing ------------------------------------------------------------------------------------------------


def _unfrozen_differently(rank, world_size):
    model = _Sum(frozen="ab")
    ddp = DDP(model)
    _step(ddp, rank)
    ddp.zero_grad()
    mine = model.b if rank else model.a
    mine.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ParameterMismatchError, match=r"[ab]\.weight"):
            _step(ddp, rank)
        ddp.zero_grad()
    model.requires_grad_(True)
    for _ in range(2):
        _step(ddp, rank)
        for part in (model.a, model.b, model.c):
            _assert_grad(part, 1.5)
        ddp.zero_grad()


def test_ranks_that_unfreeze_differently_are_refused_until_they_are_alike(ranks):
    ranks(_unfrozen_differently)


def _used_before_a_change(rank, world_size, change):
    """What no_sync accumulated is reduced by the next synchronised backward, even if that does not use it."""
    model = _Sum(frozen="c" if change == "unfreeze" else "")
    ddp = DDP(model)
    for _ in range(2):
        _step(ddp, rank)
        ddp.zero_grad()
    with ddp.no_sync():
        _step(ddp, rank)
    model.c.requires_grad_(change == "unfreeze")
    _step(ddp, rank, False)
    _assert_grad(model.a, 3.0)
    _assert_grad(model.b, 1.5)
    if change == "unfreeze":
        _assert_grad(model.c, 1.5)


@pytest.mark.parametrize("change", ["unfreeze", "freeze"])
def test_what_was_accumulated_survives_a_change_of_the_parameters(ranks, change):
    ranks(_used_before_a_change, change)


# -- hooks ---------------------------------------------------------------------------------------------------


def _allreduce(state, bucket):
    future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _hook_and_create_graph(rank, world_size, steps_before):
    ddp = DDP(_line())
    ddp.register_comm_hook(None, _allreduce)
    for _ in range(steps_before):
        _step(ddp, rank)
        ddp.zero_grad()
    for _ in range(2):
        with pytest.raises(StateError, match="comm hook"):
            ddp(_x(rank)).sum().backward(create_graph=True)
        ddp.zero_grad()
        _step(ddp, rank)
        _assert_grad(ddp.module, 1.5)
        ddp.zero_grad()
    with ddp.no_sync():
        ddp(_x(rank)).sum().backward(create_graph=True)
    _assert_grad(ddp.module, rank + 1.0)
    ddp.module.weight.grad = None
    ddp.remove_comm_hook()
    ddp(_x(rank)).sum().backward(create_graph=True)
    _assert_grad(ddp.module, 1.5)
    ddp.module.weight.grad = None


CREATE_GRAPH_WARNING = (("Using backward.. with create_graph=True", UserWarning),)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_comm_hook_cannot_be_differentiated(ranks, steps_before):
    ranks(_hook_and_create_graph, steps_before, allow_warnings=CREATE_GRAPH_WARNING)


_futures = []


def _noted_future(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer().clone())
    _futures.append(weakref.ref(future))
    return future


def _hook_results_at_rest(rank, world_size):
    _futures.clear()
    ddp = DDP(_line())
    ddp.register_comm_hook(None, _noted_future)
    for _ in range(3):
        _step(ddp, rank)
        assert _futures
        assert all(future() is None for future in _futures)


def test_no_result_of_a_hook_is_kept_at_rest(ranks):
    ranks(_hook_results_at_rest)


# -- mixed precision -----------------------------------------------------------------------------------------


def _low_precision_tensors():
    """Their shapes. Several looks: the thread of the hang watch may just be looking at a frame that holds one."""
    for _ in range(20):
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        found = [tuple(tensor.shape) for tensor in tensors if tensor.dtype == LOW and tensor.numel()]
        if not found:
            break
        del tensors
        time.sleep(0.05)
    return found


def _nothing_low_at_rest(rank, world_size):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ddp = DDP(model, mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=LOW))
    for _ in range(3):
        ddp(torch.ones(1, 8)).float().sum().backward()
        assert _low_precision_tensors() == []
        with torch.no_grad():
            assert ddp(torch.ones(1, 8)).dtype == LOW
        assert _low_precision_tensors() == []


def test_no_low_precision_copies_are_kept_at_rest(ranks):
    ranks(_nothing_low_at_rest)


def _precision_ends(rank, world_size, again):
    model = _line()
    ddp = DDP(model, mixed_precision=MixedPrecision(param_dtype=LOW))
    assert ddp(_x(rank)).dtype == LOW
    del ddp
    gc.collect()
    module = DDP(model) if again else model
    output = module(_x(rank))
    assert output.dtype == torch.float32
    output.sum().backward()
    _assert_grad(model, 1.5 if again else rank + 1.0)


@pytest.mark.parametrize("again", [False, True], ids=["bare", "wrapped again"])
def test_mixed_precision_ends_with_the_wrapper(ranks, again):
    ranks(_precision_ends, again)


def _precision_copied(rank, world_size):
    ddp = DDP(_line(), mixed_precision=MixedPrecision(param_dtype=LOW))
    twin = copy.deepcopy(ddp)
    del ddp
    gc.collect()
    for _ in range(2):
        output = twin(_x(rank))
        assert output.dtype == LOW
        output.float().sum().backward()
        _assert_grad(twin.module, 1.5)
        twin.zero_grad()
    module = twin.module
    del twin, output
    gc.collect()
    assert module(_x(rank)).dtype == torch.float32


def test_a_copy_has_a_mixed_precision_of_its_own(ranks):
    ranks(_precision_copied)


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 1, bias=False)
        self.reentrant = True

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


def _precision_and_checkpoint(rank, world_size, updated):
    """A forward without gradients, or an update in place, between forward and backward (a teacher of itself)."""
    model = _Checkpointed()
    ddp = DDP(model, mixed_precision=MixedPrecision(param_dtype=LOW))
    grads = []
    for between in (False, True):
        output = ddp(_x(rank).requires_grad_())
        if between:
            model.reentrant = False
            with torch.no_grad():
                ddp(_x(rank))
                if updated:
                    # What the output's graph has not saved: the backward of the first layer needs only its input.
                    model.first.weight.mul_(1.0)
        output.float().sum().backward()
        assert model.first.weight.grad is not None
        assert model.first.weight.grad.abs().sum() > 0
        assert_in_sync(model)
        grads.append(model.first.weight.grad.clone())
        ddp.zero_grad()
    assert torch.equal(*grads)


@pytest.mark.parametrize("updated", [False, True])
def test_a_checkpoint_in_low_precision_with_a_forward_without_gradients_between(ranks, updated):
    ranks(_precision_and_checkpoint, updated)


def _uneven_sync_batchnorm(rank, world_size):
    """Weights cannot follow gradients through SyncBatchNorm; a loss that is multiplied can."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    whole = copy.deepcopy(model)
    rows = [2, 5]
    batches = [batch(r, 0, rows[r], 4) for r in range(world_size)]
    whole(torch.cat(batches)).square().mean().backward()
    ddp = DDP(SyncBatchNorm.convert_sync_batchnorm(model))
    loss = ddp(batches[rank]).square().mean()
    with pytest.raises(StateError, match="Multiply the loss"), ddp.weighted(rows[rank]):
        loss.backward()
    (loss * rows[rank] * world_size / sum(rows)).backward()
    for p, q in zip(ddp.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    ddp.eval()
    with ddp.weighted(rows[rank]):
        ddp(batches[rank]).square().mean().backward()


def test_weights_are_refused_with_sync_batchnorm(ranks):
    ranks(_uneven_sync_batchnorm)
