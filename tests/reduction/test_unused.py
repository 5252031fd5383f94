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
from tests.on_ranks import on_ranks
from tests.reference import DDP, batch, compare_with_reference, no_sync, ours_only


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
STATIC = {"static_graph": True}
SKIP = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}


def _train(rank, world_size, step, options):
    compare_with_reference(rank, world_size, _Experts, step, **options)


def _routed(rank, world_size, table, options):
    _train(rank, world_size, _route(table), {"steps": 5, **options})


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("table", [SAME, PER_RANK, CHANGING], ids=["same", "per_rank", "changing"])
@pytest.mark.parametrize(
    "find", [pytest.param(False, marks=ours_only), True], ids=["no flag", "find_unused_parameters"]
)
def test_unused_parameters(ranks, table, view, set_to_none, find):
    options = {"find_unused_parameters": find, "gradient_as_bucket_view": view, "set_to_none": set_to_none}
    ranks(_routed, table, options)


@pytest.mark.parametrize(
    ("table", "options"),
    [
        pytest.param(CHANGING, {"bucket_cap_mb": 0.00005}, id="small buckets, some wholly unused", marks=ours_only),
        pytest.param((((0,),), ((1,),), ((0, 1),), ((1,), (0,))), {}, id="four ranks", marks=ours_only),
        pytest.param(SAME, STATIC, id="a static graph, as promised"),
        pytest.param(SAME, SKIP, id="some are skipped, as promised"),
    ],
)
def test_unused_parameters_otherwise(ranks, table, options):
    ranks(_routed, table, options, world_size=len(table))


# -- what unused gradients look like -------------------------------------------------------------------------


@ours_only
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
@on_ranks()
def test_globally_unused_gradients_are_untouched(rank, world_size, options):
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
            # It is unused on every rank, so that it is not even averaged.
            assert torch.equal(model.experts[2].weight.grad, mark)
        else:
            assert model.experts[2].weight.grad is None
        assert model.experts[2].bias.grad is None


@on_ranks()
def test_optimizer_leaves_unused_parameters_alone(rank, world_size):
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


def _used_only_under_no_sync(model, r, i):
    with no_sync(model):
        model(batch(r, i), (2,)).square().sum().backward()
    # It is unused in the backward that synchronises, and still has to travel.
    model(batch(r, 50 + i), (0,)).square().sum().backward()


def _used_only_under_no_sync_and_on_one_rank(model, r, i):
    with no_sync(model):
        model(batch(r, i), (r,)).square().sum().backward()
    model(batch(r, 50 + i), (2,)).square().sum().backward()


def _used_outside_of_forward(model, r, i):
    """An expert that is a parameter of the wrapped module and is used outside of its forward."""
    inner = model.module if isinstance(model, DDP) else model
    x = model(batch(r, i), (0, 2)).tanh()
    inner.experts[1](torch.cat([x, x], 1)).square().sum().backward()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(_used_only_under_no_sync, marks=ours_only),
        pytest.param(_used_only_under_no_sync_and_on_one_rank, marks=ours_only),
        _used_outside_of_forward,
    ],
)
def test_parameters_that_are_used_elsewhere(ranks, step):
    ranks(_train, step, {})


# -- broken contracts ----------------------------------------------------------------------------------------


def _break_promise(rank, world_size, table, options):
    """Returns the step in which this rank got the error, and its text."""
    torch.manual_seed(0)
    ddp = DDP(_Experts(), **options)
    for i, row in enumerate(table[rank]):
        try:
            ddp(batch(rank, i).float(), row).sum().backward()
        except PacelineError as error:
            return i, type(error).__name__, str(error)
        ddp.zero_grad()
    return None


@ours_only
@pytest.mark.parametrize(
    ("options", "table", "name"),
    [
        (STATIC, [[(0, 1)] * 4, [(0, 1), (0, 1), (0,), (0, 1)]], "experts.1.weight"),
        (STATIC, [[(0,)] * 4, [(0,), (0,), (0, 2), (0,)]], "experts.2.weight"),
        (SKIP, [[(0,)] * 3, [(0,), (0,), (0, 1)]], "experts.1.weight"),
    ],
    ids=["a parameter drops out of a static graph", "one joins a static graph", "one that was skipped joins"],
)
def test_a_promise_that_is_broken_by_one_rank(ranks, options, table, name):
    for step, kind, text in ranks(_break_promise, table, options):
        assert (step, kind) == (2, ContractError.__name__), "in that iteration, not later"
        assert name in text
        assert "rank 1" in text.lower()
        assert next(reversed(options)) in text


@ours_only
@on_ranks()
def test_group_is_usable_after_a_broken_contract(rank, world_size):
    table = [[(0, 1)] * 2, [(0, 1), (0,)]]
    assert _break_promise(rank, world_size, table, STATIC) is not None
    # The group survives a broken promise of one wrapper: every rank raised at the same point.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    compare_with_reference(rank, world_size, _Experts, _route(CHANGING))


class _Passes(nn.Linear):
    """The second output leads to the input but to no parameter."""

    def forward(self, x):
        return super().forward(x), 2 * x


@ours_only
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
@on_ranks(group_timeout_s=60)
def test_a_loss_of_an_output_that_leads_to_no_parameter(rank, world_size, options):
    torch.manual_seed(0)
    model = _Passes(3, 1, bias=False)
    ddp = DDP(model, **options)
    for _ in range(3):
        x = torch.full((1, 3), rank + 1.0, requires_grad=True)
        ddp(x)[rank].sum().backward()
        assert model.weight.grad.tolist() == [[0.5] * 3]
        want = model.weight.detach() if rank == 0 else torch.full((1, 3), 2.0)
        assert torch.equal(x.grad, want)
        ddp.zero_grad()


class _AsNamedTuple(NamedTuple):
    hidden: torch.Tensor
    loss: torch.Tensor


@dataclass
class _AsDataclass:
    hidden: torch.Tensor
    loss: torch.Tensor


class _AsModelOutput(OrderedDict):
    """A dictionary whose items are attributes, as of some libraries."""

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


class _PackedOutput(nn.Linear):
    def forward(self, x, uses, pack):
        hidden = super().forward(x) if uses else x * 1
        return pack(hidden=hidden, loss=hidden.sum())


@ours_only
@pytest.mark.parametrize(
    "pack",
    [_as_dict, _AsModelOutput, _AsDataclass, _AsNamedTuple, _as_nested, SimpleNamespace],
    ids=lambda pack: pack.__name__,
)
@on_ranks(group_timeout_s=60)
def test_a_rank_that_uses_no_parameter_may_pack_its_outputs(rank, world_size, pack):
    torch.manual_seed(0)
    model = _PackedOutput(3, 1, bias=False)
    ddp = DDP(model)
    for _ in range(3):
        output = ddp(torch.ones(1, 3), rank == 0, pack)
        assert pack in (_as_dict, _as_nested) or type(output) is pack
        loss = _loss_of(output)
        if pack is _AsModelOutput:
            assert output.loss is loss
        loss.backward()
        assert model.weight.grad.tolist() == [[0.5] * 3]
        ddp.zero_grad()


class _Doubles(nn.Linear):
    """A layer, or twice the input, which depends on no parameter."""

    def forward(self, x, uses):
        return super().forward(x) if uses else x * 2


@ours_only
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
@on_ranks()
def test_no_parameter_used_at_all_on_one_rank(rank, world_size, options):
    def step(model, r, i):
        model(batch(r, i).requires_grad_(r == 1), r == 0).square().sum().backward()

    compare_with_reference(rank, world_size, lambda: _Doubles(4, 2), step, **options)
