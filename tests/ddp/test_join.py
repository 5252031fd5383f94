"""Uneven inputs: ``join()``, ``Join`` with several joinables, division, early termination, the final model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.reference import DDP, Branches, assert_in_sync, batch, no_sync, ours_only

from torch.distributed.algorithms.join import Join, Joinable, JoinHook  # isort: skip
from torch.distributed.optim import ZeroRedundancyOptimizer  # isort: skip
from tests.ddp.exact import line, step
from tests.on_ranks import on_ranks

# Batches of rank 0, 1, ...
COUNTS = [3, 5]


def _mlp():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _start(options=None):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = _mlp()
    ddp = DDP(model, **(options or {}))
    torch.manual_seed(0)
    return model, ddp, _mlp()


def _simulate(reference, counts, world_size, *, divide_by_initial, lr=0.1):
    """One process plays all ranks: a rank that has run out adds nothing."""
    for i in range(max(counts)):
        active = [r for r in range(world_size) if i < counts[r]]
        totals = None
        for r in active:
            reference.zero_grad()
            reference(batch(r, i)).square().mean().backward()
            grads = [p.grad.clone() for p in reference.parameters()]
            totals = grads if totals is None else [t + g for t, g in zip(totals, grads, strict=True)]
        by = world_size if divide_by_initial else len(active)
        with torch.no_grad():
            for p, total in zip(reference.parameters(), totals, strict=True):
                p.sub_(total / by, alpha=lr)


def _uneven(rank, world_size, counts, divide_by_initial, options):
    model, ddp, reference = _start(options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    steps = 0
    with ddp.join(divide_by_initial_world_size=divide_by_initial):
        for i in range(counts[rank]):
            optimizer.zero_grad()
            ddp(batch(rank, i)).square().mean().backward()
            optimizer.step()
            steps += 1
    assert steps == counts[rank]
    _simulate(reference, counts, world_size, divide_by_initial=divide_by_initial)
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q[1].detach(), msg=lambda text, name=name: f"{name}: {text}")
    assert_in_sync(model, grads=False)


@pytest.mark.parametrize("divide_by_initial", [True, False])
@pytest.mark.parametrize("counts", [[3, 5], [5, 3], [4, 4], [0, 2], [1, 6]], ids=str)
def test_uneven_inputs(ranks, counts, divide_by_initial):
    ranks(_uneven, counts, divide_by_initial, {})


@pytest.mark.parametrize(
    "options", [{"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}, {"static_graph": True}], ids=str
)
def test_uneven_inputs_with_options(ranks, options):
    ranks(_uneven, COUNTS, True, options)


def test_three_ranks_leave_one_after_the_other(ranks):
    ranks(_uneven, [2, 4, 3], False, {}, world_size=3)


@on_ranks()
def test_training_goes_on_after_join(rank, world_size):
    """After the context, training goes on with all ranks."""
    model, ddp, _ = _start()
    with ddp.join():
        for i in range(COUNTS[rank]):
            ddp(batch(rank, i)).sum().backward()
    for i in range(2):
        ddp.zero_grad()
        ddp(batch(rank, i)).square().mean().backward()
        assert_in_sync(model)
    # A second join works as the first one did.
    with ddp.join():
        for i in range(COUNTS[1 - rank]):
            ddp(batch(rank, i)).sum().backward()
    assert_in_sync(model, grads=False)


@on_ranks()
def test_throw_on_early_termination(rank, world_size):
    """Every rank raises; nobody gets past the point where the first ran out."""
    _, ddp, _ = _start()
    done = []

    def train():
        with ddp.join(throw_on_early_termination=True):
            for i in range(COUNTS[rank]):
                ddp(batch(rank, i)).sum().backward()
                done.append(i)

    with pytest.raises(RuntimeError, match=r"(?i)exhausted|ran out"):
        train()
    assert len(done) == min(COUNTS)


@on_ranks()
def test_join_can_be_disabled(rank, world_size):
    model, ddp, _ = _start()
    with ddp.join(enable=False):
        for i in range(3):
            ddp(batch(rank, i)).sum().backward()
    assert_in_sync(model)


def _forward_in_no_sync(ddp, x):
    with no_sync(ddp):
        output = ddp(x)
    output.square().mean().backward()


def _accumulation(ddp, x):
    with no_sync(ddp):
        ddp(2 * x).square().mean().backward()
    ddp(x).square().mean().backward()


def _two_forwards(ddp, x):
    (ddp(x).square().mean() + ddp(2 * x).square().mean()).backward()


def _two_backwards(ddp, x):
    output = ddp(x)
    output.square().mean().backward(retain_graph=True)
    output.pow(4).mean().backward()


def _bare_module(ddp, x):
    getattr(ddp, "module", ddp)(x).square().mean().backward()


def _forward_for_nothing(ddp, x):
    ddp(3 * x)
    ddp(x).square().mean().backward()
    ddp(2 * x)


IN_ANY_ORDER = [_forward_in_no_sync, _two_forwards, _bare_module, _forward_for_nothing, _two_backwards]


@pytest.mark.parametrize("step", [_accumulation, *(pytest.param(step, marks=ours_only) for step in IN_ANY_ORDER)])
@on_ranks()
def test_forwards_and_backwards_inside_join_in_any_order(rank, world_size, step):
    """What a backward needs is said when it begins: forwards and backwards need not alternate."""
    model, ddp, reference = _start()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for i in range(COUNTS[rank]):
            optimizer.zero_grad()
            step(ddp, batch(rank, i))
            optimizer.step()
    for i in range(max(COUNTS)):
        reference.zero_grad()
        for r in range(world_size):
            if i < COUNTS[r]:
                step(reference, batch(r, i))
        with torch.no_grad():
            for p in reference.parameters():
                p.sub_(p.grad / world_size, alpha=0.1)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@ours_only
@on_ranks()
def test_only_local_backwards_inside_join(rank, world_size):
    """Forwards that expect a synchronised backward, and none of them has one."""
    model, ddp, _ = _start()
    with ddp.join():
        for i in range(COUNTS[rank]):
            loss = ddp(batch(rank, i)).square().mean()
            with no_sync(ddp):
                loss.backward()
    assert (model[0].weight.grad is not None) == (COUNTS[rank] > 0)


@on_ranks()
def test_unused_parameters_inside_join(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Branches()
    ddp = DDP(model, find_unused_parameters=True)
    with ddp.join():
        for i in range(COUNTS[rank]):
            ddp.zero_grad()
            ddp(batch(rank, i), i % 2).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.1)
    assert_in_sync(model, grads=False)


@on_ranks()
def test_buffers_come_from_a_rank_that_still_has_inputs(rank, world_size):
    """Buffers come from a rank that still has inputs, not from rank 0, which has run out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DDP(model)
    with ddp.join():
        for i in range(COUNTS[rank]):
            ddp(batch(rank, i).float()).sum().backward()
    gathered = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(gathered, model[1].running_mean.clone())
    assert torch.equal(*gathered)
    # The count says whose buffers they are: those of the rank with most batches.
    assert model[1].num_batches_tracked.item() == max(COUNTS)


# -- Join with several joinables -----------------------------------------------------------------------------


@on_ranks()
def test_join_of_two_models(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    first, second = _mlp(), nn.Linear(2, 2)
    a, b = DDP(first), DDP(second)
    with Join([a, b]):
        for i in range(COUNTS[rank]):
            a.zero_grad()
            b.zero_grad()
            # Join asks for each model's collectives in one piece, and in the order of the list.
            a(batch(rank, i)).square().mean().backward()
            b(batch(rank, i)[:, :2]).square().mean().backward()
            with torch.no_grad():
                for p in (*first.parameters(), *second.parameters()):
                    p.sub_(p.grad, alpha=0.1)
    assert_in_sync(first, grads=False)
    assert_in_sync(second, grads=False)


@ours_only
@on_ranks()
def test_join_with_a_zero_optimizer(rank, world_size):
    torch.set_default_dtype(torch.float64)
    # A rank that has run out needs the views to see the gradients for its share of the optimizer.
    model, ddp, reference = _start({"gradient_as_bucket_view": True})
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([ddp, zero]):
        for i in range(COUNTS[rank]):
            zero.zero_grad()
            ddp(batch(rank, i)).square().mean().backward()
            zero.step()
    _simulate(reference, COUNTS, world_size, divide_by_initial=True)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class _CounterHook(JoinHook):
    def __init__(self, counter):
        self.counter = counter

    def main_hook(self):
        dist.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner):
        self.counter.was_last = is_last_joiner


class _Counter(Joinable):
    """Counts the steps of all ranks."""

    def __init__(self):
        super().__init__()
        self.total = 0
        self.was_last = None

    def step(self):
        Join.notify_join_context(self)
        count = torch.ones(1)
        dist.all_reduce(count)
        self.total += int(count.item())

    def join_hook(self, **kwargs):
        return _CounterHook(self)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


@on_ranks()
def test_join_with_a_user_s_joinable(rank, world_size):
    model, ddp, _ = _start()
    counter = _Counter()
    with Join([counter, ddp]):
        for i in range(COUNTS[rank]):
            counter.step()
            ddp(batch(rank, i)).sum().backward()
    assert counter.total == [6, 8][rank]
    assert counter.was_last == (rank == 1)
    assert_in_sync(model, grads=False)


@on_ranks(world_size=1)
def test_the_wrapper_is_a_joinable(rank, world_size):
    ddp = DDP(nn.Linear(2, 2))
    assert isinstance(ddp, Joinable)
    assert ddp.join_device == torch.device("cpu")
    assert ddp.join_process_group is ddp.process_group
    hook = ddp.join_hook(divide_by_initial_world_size=True)
    assert isinstance(hook, JoinHook)


@ours_only
@on_ranks()
def test_accumulation_inside_join_that_divides_by_who_is_there(rank, world_size):
    """Rank 0 has one update, rank 1 has two, each of two micro-batches."""
    ddp = DDP(line())
    got = []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            ddp.zero_grad()
            with ddp.no_sync():
                step(ddp, rank)
            step(ddp, rank)
            got.append(ddp.module.weight.grad[0, 0].item())
    assert got == [[3.0], [3.0, 4.0]][rank]
