"""Unused parameters: right without a flag; flags are contracts, and breaking one is an error."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ContractError, PacelineError

from ._ddp import DDP, assert_in_sync, batch, compare_with_reference, no_sync, ours_only


class _Experts(nn.Module):
    """``which`` says which experts take part; the others get no gradient."""

    def __init__(self, experts=3):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(experts))

    def forward(self, x, which):
        x = self.stem(x).tanh()
        return sum((self.experts[k](x) for k in which), torch.zeros((), dtype=x.dtype))


def _route(table):
    """``table[rank][step]`` are the experts in use."""

    def step(model, r, i):
        rows = table[r]
        model(batch(r, i), rows[i % len(rows)]).square().sum().backward()

    return step


SAME = (((0, 1),), ((0, 1),))
PER_RANK = (((0,),), ((1,),))
CHANGING = (((0,), (1,), (0, 2), (2,)), ((0,), (0, 1), (1,), (0, 1)))


def _routed(rank, world_size, table, options, set_to_none=True):
    ddp = compare_with_reference(rank, world_size, _Experts, _route(table), steps=5, set_to_none=set_to_none, **options)
    assert_in_sync(ddp.module)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("table", [SAME, PER_RANK, CHANGING], ids=["same", "per_rank", "changing"])
def test_with_find_unused_parameters(ranks, table, view, set_to_none):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    ranks(_routed, table, options, set_to_none)


@ours_only
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("table", [SAME, PER_RANK, CHANGING], ids=["same", "per_rank", "changing"])
def test_without_any_flag(ranks, table, view, set_to_none):
    ranks(_routed, table, {"gradient_as_bucket_view": view}, set_to_none)


@ours_only
def test_small_buckets_some_wholly_unused(ranks):
    ranks(_routed, CHANGING, {"bucket_cap_mb": 0.00005})


@ours_only
def test_four_ranks_each_with_its_expert(ranks):
    table = (((0,),), ((1,),), ((0, 1),), ((1,), (0,)))
    ranks(_routed, table, {}, world_size=4)


def _static(rank, world_size):
    ddp = compare_with_reference(rank, world_size, _Experts, _route(SAME), steps=4, static_graph=True)
    assert ddp.module.experts[2].weight.grad is None


def test_static_graph_with_unused_parameters(ranks):
    ranks(_static)


def _skip(rank, world_size):
    compare_with_reference(
        rank,
        world_size,
        _Experts,
        _route(SAME),
        steps=4,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
    )


def test_skip_all_reduce_unused_params(ranks):
    ranks(_skip)


# -- what unused gradients look like -------------------------------------------------------------------------


def _untouched(rank, world_size, options):
    """A globally unused gradient is left alone, whatever it holds: None, or a value of the user's."""
    torch.manual_seed(0)
    model = _Experts()
    ddp = DDP(model, **options)
    mark = torch.full_like(model.experts[2].weight, 3.0 + rank)
    for i in range(3):
        ddp.zero_grad()
        if i == 1:
            model.experts[2].weight.grad = mark.clone()
        ddp(batch(rank, i).float(), (0, 1)).sum().backward()
        if i == 1:
            # Unused on every rank: not even averaged.
            assert torch.equal(model.experts[2].weight.grad, mark)
        else:
            assert model.experts[2].weight.grad is None
        assert model.experts[2].bias.grad is None


@ours_only
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_globally_unused_gradients_are_untouched(ranks, options):
    ranks(_untouched, options)


def _adam_skips_unused(rank, world_size):
    """An optimizer must not see a zero where nothing was computed: Adam with decay would move it."""
    torch.manual_seed(0)
    model = _Experts()
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), weight_decay=0.5)
    before = model.experts[2].weight.detach().clone()
    for i in range(2):
        optimizer.zero_grad()
        ddp(batch(rank, i).float(), (0,)).sum().backward()
        optimizer.step()
    assert torch.equal(model.experts[2].weight, before)


def test_optimizer_leaves_unused_parameters_alone(ranks):
    ranks(_adam_skips_unused)


def _accumulated_unused(rank, world_size):
    """Used in a micro-step under no_sync, unused in the one that synchronises: it still has to travel."""

    def step(model, r, i):
        with no_sync(model):
            model(batch(r, i), (2,)).square().sum().backward()
        model(batch(r, 50 + i), (0,)).square().sum().backward()

    compare_with_reference(rank, world_size, _Experts, step)


@ours_only
def test_used_only_in_a_micro_step_under_no_sync(ranks):
    ranks(_accumulated_unused)


def _accumulated_on_one_rank(rank, world_size):
    def step(model, r, i):
        with no_sync(model):
            model(batch(r, i), (r,)).square().sum().backward()
        model(batch(r, 50 + i), (2,)).square().sum().backward()

    compare_with_reference(rank, world_size, _Experts, step)


@ours_only
def test_used_only_under_no_sync_and_on_one_rank(ranks):
    ranks(_accumulated_on_one_rank)


class _Outside(nn.Module):
    """The head is a parameter of the wrapped module that is used outside of its forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x)


def _outside(rank, world_size):
    def step(model, r, i):
        inner = model.module if isinstance(model, DDP) else model
        inner.head(model(batch(r, i)).tanh()).square().sum().backward()

    compare_with_reference(rank, world_size, _Outside, step)


def test_parameters_used_outside_of_forward(ranks):
    ranks(_outside)


# -- broken contracts ----------------------------------------------------------------------------------------


def _break_static_graph(rank, world_size, table):
    """Returns the step in which this rank got the error, and its text."""
    torch.manual_seed(0)
    ddp = DDP(_Experts(), static_graph=True)
    rows = table[rank]
    for i in range(len(rows)):
        try:
            ddp(batch(rank, i).float(), rows[i]).sum().backward()
        except PacelineError as error:
            return i, type(error).__name__, str(error)
        ddp.zero_grad()
    return None


@ours_only
def test_static_graph_broken_by_a_parameter_that_drops_out(ranks):
    table = [[(0, 1)] * 4, [(0, 1), (0, 1), (0,), (0, 1)]]
    for step, kind, text in ranks(_break_static_graph, table):
        assert step == 2, "in that iteration, not later"
        assert kind == ContractError.__name__
        assert "experts.1.weight" in text
        assert "rank 1" in text.lower()
        assert "static_graph" in text


@ours_only
def test_static_graph_broken_by_a_parameter_that_joins(ranks):
    table = [[(0,), (0,), (0,), (0,)], [(0,), (0,), (0, 2), (0,)]]
    for step, kind, text in ranks(_break_static_graph, table):
        assert (step, kind) == (2, ContractError.__name__)
        assert "experts.2.weight" in text
        assert "rank 1" in text.lower()


def _break_skip(rank, world_size):
    torch.manual_seed(0)
    ddp = DDP(_Experts(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    rows = [(0,), (0,), (0,) if rank == 0 else (0, 1)]
    for i, row in enumerate(rows):
        try:
            ddp(batch(rank, i).float(), row).sum().backward()
        except PacelineError as error:
            return i, type(error).__name__, str(error)
        ddp.zero_grad()
    return None


@ours_only
def test_skip_all_reduce_unused_params_broken_by_one_rank(ranks):
    for step, kind, text in ranks(_break_skip):
        assert (step, kind) == (2, ContractError.__name__)
        assert "experts.1.weight" in text
        assert "rank 1" in text.lower()


def _usable_afterwards(rank, world_size):
    table = [[(0, 1)] * 2, [(0, 1), (0,)]]
    assert _break_static_graph(rank, world_size, table) is not None
    # The group survives a broken promise of one wrapper: every rank raised at the same point.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    compare_with_reference(rank, world_size, _Experts, _route(CHANGING))


@ours_only
def test_group_is_usable_after_a_broken_contract(ranks):
    ranks(_usable_afterwards)


class _Passes(nn.Module):
    """The second output leads to the input but to no parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.layer(x), 2 * x


def _loss_past_the_parameters(rank, world_size, options):
    torch.manual_seed(0)
    model = _Passes()
    ddp = DDP(model, **options)
    for _ in range(3):
        x = torch.full((1, 3), rank + 1.0, requires_grad=True)
        ddp(x)[rank].sum().backward()
        assert model.layer.weight.grad.tolist() == [[0.5] * 3]
        want = model.layer.weight.detach() if rank == 0 else torch.full((1, 3), 2.0)
        assert torch.equal(x.grad, want)
        ddp.zero_grad()


@ours_only
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_a_loss_of_an_output_that_leads_to_no_parameter(ranks, options):
    ranks(_loss_past_the_parameters, options, group_timeout_s=60)


class _AsNamedTuple(NamedTuple):
    hidden: torch.Tensor
    loss: torch.Tensor


@dataclass
class _AsDataclass:
    hidden: torch.Tensor
    loss: torch.Tensor


class _AsModelOutput(OrderedDict):
    """A dictionary whose items are attributes, as of some libraries."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def _as_dict(hidden, loss):
    return {"hidden": hidden, "loss": loss}


def _as_nested(hidden, loss):
    return [hidden, (_AsDataclass(hidden, loss),)]


def _loss_of(output):
    if isinstance(output, list):
        return output[1][0].loss
    return output["loss"] if isinstance(output, dict) else output.loss


class _PackedOutput(nn.Module):
    def __init__(self, pack):
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)
        self.pack = pack

    def forward(self, x, uses):
        hidden = self.layer(x) if uses else x * 1
        return self.pack(hidden=hidden, loss=hidden.sum())


def _packed(rank, world_size, pack):
    torch.manual_seed(0)
    model = _PackedOutput(pack)
    ddp = DDP(model)
    for _ in range(3):
        output = ddp(torch.ones(1, 3), uses=rank == 0)
        assert pack in (_as_dict, _as_nested) or type(output) is pack
        loss = _loss_of(output)
        if pack is _AsModelOutput:
            assert output.loss is loss
        loss.backward()
        assert model.layer.weight.grad.tolist() == [[0.5] * 3]
        ddp.zero_grad()


@ours_only
@pytest.mark.parametrize(
    "pack",
    [_as_dict, _AsModelOutput, _AsDataclass, _AsNamedTuple, _as_nested, SimpleNamespace],
    ids=lambda pack: pack.__name__,
)
def test_a_rank_that_uses_no_parameter_may_pack_its_outputs(ranks, pack):
    ranks(_packed, pack, group_timeout_s=60)
