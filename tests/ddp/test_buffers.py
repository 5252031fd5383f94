"""Buffers: broadcast around forward without touching what autograd saved; hooks; the flags."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_grads, assert_in_sync, batch, mean_over_ranks, ours_only


class _Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            self.calls += 1
        return self.linear(x - self.mean)


def _gathered(tensor):
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return out


@pytest.mark.parametrize("options", [{}, {"forward_sync_buffers": True}], ids=["default", "forward_sync_buffers"])
@on_ranks()
def test_rank_0_buffers_are_broadcast_before_forward(rank, world_size, options):
    """Rank 0's buffers at the start of forward are everybody's."""
    torch.manual_seed(0)
    model = _Counter()
    ddp = DDP(model, **options)
    with torch.no_grad():
        model.mean.fill_(rank + 1.0)
        model.calls.fill_(10 * (rank + 1))
        model.seen.fill_(rank == 0)
        model.hidden.fill_(rank + 5.0)
    x = batch(rank).float()
    ddp(x).sum().backward()
    torch.testing.assert_close(model.mean, torch.full((4,), 0.5) + 0.5 * x.mean(0))
    assert model.calls.item() == 11
    assert model.seen.all()
    assert torch.equal(model.hidden, torch.full((3,), 5.0))


@pytest.mark.parametrize("option", ["forward_sync_buffers", "broadcast_buffers"])
@on_ranks(allow_warnings=(("`?broadcast_buffers", FutureWarning),))
def test_buffers_that_are_not_synchronised(rank, world_size, option):
    model = _Counter()
    model.mean.fill_(rank + 1.0)
    ddp = DDP(model, **{option: False})
    # At the start they are synchronised all the same, except with the deprecated flag.
    assert torch.equal(model.mean, torch.full((4,), rank + 1.0 if option == "broadcast_buffers" else 1.0))
    model.mean.fill_(rank + 1.0)
    ddp(batch(rank).float()).sum().backward()
    torch.testing.assert_close(model.mean, (rank + 1.0) * 0.5 + 0.5 * batch(rank).float().mean(0))


@on_ranks()
def test_ranks_may_run_different_numbers_of_forwards_in_no_sync(rank, world_size):
    """From its second forward on, no_sync broadcasts nothing: ranks may run different numbers of them."""
    torch.manual_seed(0)
    model = _Counter()
    ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    with ddp.no_sync():
        ddp(batch(rank).float()).sum().backward()
        with torch.no_grad():
            model.hidden.fill_(rank)
        for i in range(2 * rank):
            ddp(batch(rank, i).float()).sum().backward()
        assert torch.equal(model.hidden, torch.full((3,), float(rank)))
    ddp(batch(rank).float()).sum().backward()
    assert_in_sync(model)


@on_ranks()
def test_buffers_are_alike_in_evaluation(rank, world_size):
    torch.manual_seed(0)
    model = _Counter()
    ddp = DDP(model)
    with torch.no_grad():
        model.mean.fill_(float(rank))
    ddp.eval()
    with torch.no_grad():
        out = ddp(torch.ones(1, 4))
    first, second = _gathered(out)
    assert torch.equal(first, second)


# -- BatchNorm and what autograd saved -----------------------------------------------------------------------


def _bn():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _buffers(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def _simulated(world_size, forwards):
    """All ranks in one process: before each forward rank 0's buffers are everybody's."""
    torch.manual_seed(0)
    replicas = [_bn() for _ in range(world_size)]
    for replica in replicas[1:]:
        replica.load_state_dict(replicas[0].state_dict())
    losses = [0.0] * world_size
    for k in range(forwards):
        common = _buffers(replicas[0])
        for rank, replica in enumerate(replicas):
            for name, value in common.items():
                module, _, leaf = name.rpartition(".")
                setattr(replica.get_submodule(module), leaf, value.clone())
            losses[rank] = losses[rank] + replica(batch(rank, k)).square().mean()
    for loss in losses:
        loss.backward()
    grads = [
        sum(ps[1:], ps[0]) / world_size
        for ps in zip(*[[p.grad for p in replica.parameters()] for replica in replicas], strict=True)
    ]
    return grads, [_buffers(replica) for replica in replicas]


@pytest.mark.parametrize("forwards", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
@on_ranks()
def test_batchnorm_with_several_forwards_and_one_backward(rank, world_size, forwards, options):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = _bn()
    ddp = DDP(model, **options)
    loss = sum(ddp(batch(rank, k)).square().mean() for k in range(forwards))
    loss.backward()
    grads, buffers = _simulated(world_size, forwards)
    for p, want in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, want)
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, buffers[rank][name])
    assert_in_sync(model)


class _SavesBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        # The product saves `scale` for backward.
        return (x * self.weight) * self.scale


@ours_only
@pytest.mark.parametrize("how", ["reassign", "replace"])
@on_ranks()
def test_what_an_earlier_forward_saved_is_not_overwritten(rank, world_size, how):
    torch.set_default_dtype(torch.float64)
    model = _SavesBuffer()
    ddp = DDP(model)
    first = ddp(batch(rank, 0))
    if rank == 0:
        if how == "reassign":
            model.scale = torch.full((4,), 2.0)
        else:
            # A change in place would be the user's own error on rank 0; a new tensor is none.
            model._buffers["scale"] = model.scale + 1
    second = ddp(batch(rank, 1))
    assert torch.equal(model.scale, torch.full((4,), 2.0))
    (first.sum() + second.sum()).backward()
    expected = sum(batch(r, 0).sum(0) + 2 * batch(r, 1).sum(0) for r in range(world_size)) / world_size
    torch.testing.assert_close(model.weight.grad, expected)


@on_ranks()
def test_a_held_buffer_stays_the_module_s_buffer(rank, world_size):
    """Code that holds the buffer's tensor object keeps seeing the module's buffer after a plain step."""
    torch.manual_seed(0)
    model = _Counter()
    ddp = DDP(model)
    held = model.calls
    for i in range(3):
        ddp(batch(rank, i).float()).sum().backward()
    assert held.item() == 3
    assert model.state_dict()["calls"].item() == 3


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("held", [False, True])
@on_ranks()
def test_evaluation_between_steps(rank, world_size, held, mode):
    """Tensors made in inference mode cannot be written later: none of them may stay behind."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = _bn()
    ddp = DDP(model)
    # With a forward that waits for its backward, buffers are replaced and not overwritten.
    output = ddp(batch(rank)) if held else None
    for i in range(2):
        ddp.eval()
        with mode():
            ddp(batch(rank, 20))
        ddp.train()
        (ddp(batch(rank, i)) if output is None else output).square().mean().backward()
        output = None
    assert not any(buffer.is_inference() for buffer in model.buffers())
    assert_in_sync(model)


# -- buffer comm hooks ---------------------------------------------------------------------------------------


def _sum_hook(state, named_buffers):
    state.append(sorted(named_buffers))
    dist.all_reduce(named_buffers["calls"])


def _async_sum_hook(state, named_buffers):
    state.append(sorted(named_buffers))
    return [dist.all_reduce(named_buffers["calls"], async_op=True).get_future()]


@pytest.mark.parametrize(
    ("hook", "location"),
    [
        (_sum_hook, (Location.PRE_FORWARD,)),
        (_sum_hook, (Location.POST_FORWARD,)),
        # A hook that runs before forward must be done when forward starts; after forward is the default.
        (_async_sum_hook, ()),
    ],
    ids=["before", "after", "asynchronous"],
)
@on_ranks()
def test_buffer_comm_hook(rank, world_size, hook, location):
    model = _Counter()
    ddp = DDP(model)
    seen = []
    ddp._register_buffer_comm_hook(seen, hook, *location)
    model.calls.fill_(rank + 1)
    ddp(batch(rank).float()).sum().backward()
    assert seen == [["calls", "hidden", "mean", "seen"]]
    # Before forward: 1 + 2, and then forward counts one. After forward: (1 + 1) + (2 + 1).
    assert model.calls.item() == (4 if Location.PRE_FORWARD in location else 5)
    # The hook takes the place of the broadcast.
    first, second = _gathered(model.mean)
    assert not torch.equal(first, second)


@on_ranks()
def test_buffers_that_change_between_forwards(rank, world_size):
    """A buffer is added or removed between forwards, or renamed, or gets another shape and dtype in place."""
    model = _Counter()
    ddp = DDP(model)
    model.linear.register_buffer("late", torch.full((2,), float(rank)))
    x = batch(rank).float()
    for turn in range(3):
        if turn == 1:
            del model.seen
            model.register_buffer("told", model._buffers.pop("hidden"))
        if turn == 2:
            model.told.data = torch.zeros(2, 5, dtype=torch.float64)
        buffer = model.hidden if turn == 0 else model.told
        with torch.no_grad():
            buffer.fill_(10 * turn + rank)
        ddp(x).sum().backward()
        assert torch.equal(buffer, torch.full_like(buffer, 10 * turn)), (turn, buffer)
        assert torch.equal(model.linear.late, torch.zeros(2))
    assert (model.told.shape, model.told.dtype) == ((2, 5), torch.float64)


@ours_only
@on_ranks()
def test_a_norm_that_replaced_another_is_synchronised(rank, world_size):
    model = _bn()
    ddp = DDP(model)
    ddp(batch(rank).float()).sum().backward()
    model[1] = nn.BatchNorm1d(4).eval()
    model[1].running_mean.fill_(rank + 5.0)
    ddp(batch(rank).float()).sum().backward()
    ddp(batch(rank).float())
    assert model[1].running_mean.unique().tolist() == [5.0]


class _TwoHolders(nn.Module):
    """One buffer, registered in two modules; forward changes it through one and reads it through the other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.left, self.right = nn.Module(), nn.Module()
        shared = torch.zeros(4)
        self.left.register_buffer("count", shared)
        self.right.register_buffer("count", shared)

    def forward(self, x, by):
        self.left.count += by
        return self.linear(x + self.right.count)


@ours_only
@on_ranks()
def test_a_buffer_in_two_modules_stays_one_buffer(rank, world_size):
    torch.manual_seed(0)
    model = _TwoHolders()
    ddp = DDP(model)
    by = 10.0**rank
    for step in range(3):
        outputs = [ddp(batch(rank).float(), by) for _ in range(2)]
        assert model.left.count is model.right.count
        # It is rank 0's from before each forward, and what the last forward added.
        assert torch.equal(model.left.count, torch.full((4,), 2 * step + 1 + by))
        (outputs[0] + outputs[1]).sum().backward()
        ddp.zero_grad()


@ours_only
@on_ranks()
def test_batchnorm_with_forwards_and_backwards_interleaved(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = _bn()
    ddp = DDP(model)
    torch.manual_seed(0)
    reference = _bn()

    def run(net, r):
        first, second = net(batch(r, 0)), net(batch(r, 1))
        first.square().sum().backward()
        third = net(batch(r, 2))
        second.square().sum().backward()
        fourth = net(batch(r, 3))
        third.square().sum().backward()
        fourth.square().sum().backward()

    # Means of means: each backward synchronises what is there, and the mean of equal things is the thing.
    expected = mean_over_ranks(reference, run, world_size)
    for _ in range(2):
        run(ddp, rank)
        assert_grads(ddp, expected)
        ddp.zero_grad()
