"""Buckets, gradients in the bucket, and reduction: against a single process, and against torch to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from tests.on_ranks import on_ranks
from tests.reference import DDP, STOCK, assert_grads, batch, compare_with_reference, no_sync, ours_only, square

FLAGS = [
    {},
    {"gradient_as_bucket_view": True},
    {"batched_grad_copy": True},
    {"gradient_as_bucket_view": True, "batched_grad_copy": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 0.0001},
    {"bucket_cap_mb": 1},
]


def _flag_id(flags):
    return "+".join(flags) or "default"


def _mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def _pair(**flags):
    """A wrapper, and a bare module with the same weights."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ddp, local = DDP(_mlp(), **flags), _mlp()
    local.load_state_dict(ddp.module.state_dict())
    return ddp, local


# -- training against a single process -----------------------------------------------------------------------


def _shared():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, first)


class _OutOfOrder(nn.Module):
    """Uses its layers in another order than it registers them; the first backward shows the real one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        for k in (3, 0, 4, 1, 2):
            x = self.layers[k](x).tanh()
        return x


class _RankOrder(nn.Module):
    """Two towers whose backward order depends on the rank: what is ready first differs between ranks."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x, flip):
        return self.a(self.b(x).tanh()) if flip else self.b(self.a(x).tanh())


def _words():
    return nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.Linear(4, 2))


def _words_alone():
    return _words()[:1]


def _tokens(rank, i):
    # Ranks look up different rows, and different numbers of them.
    return torch.randint(0, 10, (2, 2 + rank), generator=torch.Generator().manual_seed(10 * i + rank))


def _gradients_dropped_zeroed_and_replaced(model, r, i):
    inner = model.module if isinstance(model, DDP) else model
    if isinstance(model, DDP):
        if i == 1:
            model.zero_grad(set_to_none=False)
        elif i == 2:
            for p in inner.parameters():
                p.grad = torch.zeros_like(p)
        elif i == 3:
            inner[0].weight.grad = None
        elif i == 4:
            # A clipped gradient that then is dropped must not come back.
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.5)
            model.zero_grad()
    square(model, r, i)


def _accumulation_in_no_sync(model, r, i):
    for micro in range(2):
        with no_sync(model):
            square(model, r, 10 * i + micro)
    square(model, r, 10 * i + 2)


def _accumulation_with_every_backward_synchronised(model, r, i):
    for micro in range(3):
        square(model, r, 10 * i + micro)


def _no_sync_around_forward_only(model, r, i):
    # It is decided at backward.
    with no_sync(model):
        out = model(batch(r, i))
    out.square().mean().backward()


def _no_sync_around_one_backward(model, r, i):
    out = model(batch(r, i))
    with no_sync(model):
        out.square().sum().backward()
    square(model, r, 50 + i)


def _no_sync_now_and_then(model, r, i):
    if i % 3 == 2:
        with no_sync(model):
            square(model, r, 100 + i)
    square(model, r, i)


def _several_forwards_before_one_backward(model, r, i):
    outputs = [model(batch(r, 10 * i + k)) for k in range(3)]
    sum(out.square().mean() for out in outputs).backward()


def _two_backwards_of_one_forward(model, r, i):
    out = model(batch(r, i))
    out[:, 0].square().sum().backward(retain_graph=True)
    out[:, 1].square().sum().backward()


def _several_forwards_then_as_many_backwards(model, r, i):
    losses = [model(batch(r, 10 * i + k)).square().mean() for k in range(3)]
    # The newest first, every other time.
    for loss in reversed(losses) if i % 2 else losses:
        loss.backward()


def _forwards_without_backward_in_between(model, r, i):
    with torch.no_grad():
        model(batch(r, 90 + i))
    model.eval()
    model(batch(r, 80 + i))
    model.train()
    square(model, r, i)


def _sparse_embedding(model, r, i):
    model(_tokens(r, i)).square().mean().backward()
    inner = model.module if isinstance(model, DDP) else model
    assert inner[0].weight.grad.is_sparse


def _sparse_embedding_accumulated(model, r, i):
    with no_sync(model):
        _sparse_embedding(model, r, i)
    _sparse_embedding(model, r, 50 + i)


def _gradients_ready_in_another_order_on_each_rank(model, r, i):
    model(batch(r, i), (r + i) % 2 == 1).square().mean().backward()


def _autograd_grad_before_backward_of_the_same_loss(model, r, i):
    loss = model(batch(r, i)).square().mean()
    torch.autograd.grad(loss, list(model.parameters())[:1], retain_graph=True)
    loss.backward()


def _gradient_penalty_on_the_input(model, r, i):
    # WGAN-GP: the penalty needs create_graph on the input only; everything is linear in ranks.
    x = batch(r, i).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (g.square().sum() + model(x).square().mean()).backward()


def _output_changed_in_place(model, r, i):
    out = model(batch(r, i))
    out.mul_(2)
    out.square().mean().backward()


def _train(rank, world_size, make, step, options):
    compare_with_reference(rank, world_size, make, step, **options)


def _cases(step, make=_mlp, *, flags=({},), ours=False, **options):
    """The same training with each of ``flags``."""
    name = step.__name__ if make is _mlp else f"{make.__name__}{step.__name__}"
    return [
        pytest.param(make, step, {**options, **each}, id=f"{name}-{_flag_id(each)}", marks=[ours_only] * ours)
        for each in flags
    ]


TRAININGS = [
    *_cases(square, flags=[{**each, "set_to_none": none} for each in FLAGS for none in (True, False)], steps=4),
    *_cases(_gradients_dropped_zeroed_and_replaced, flags=FLAGS[:3], steps=6),
    *_cases(_accumulation_in_no_sync, flags=[*FLAGS[:4], FLAGS[6]]),
    *_cases(_accumulation_in_no_sync, flags=[{**each, "set_to_none": False} for each in [*FLAGS[:4], FLAGS[6]]]),
    *_cases(_accumulation_with_every_backward_synchronised, flags=FLAGS[:4]),
    *_cases(_accumulation_in_no_sync, flags=[{"static_graph": True}], ours=True),
    *_cases(_no_sync_around_forward_only, ours=True),
    *_cases(_no_sync_around_one_backward, ours=True),
    *_cases(_two_backwards_of_one_forward, ours=True),
    *_cases(_no_sync_now_and_then, steps=12, lr=0.05),
    *_cases(_several_forwards_before_one_backward, flags=FLAGS[:2]),
    *_cases(_several_forwards_then_as_many_backwards, ours=True, steps=4),
    *_cases(_forwards_without_backward_in_between),
    *_cases(square, _shared, flags=[*FLAGS[:3], FLAGS[4]]),
    *_cases(_sparse_embedding, _words, flags=FLAGS[:2]),
    *_cases(_sparse_embedding, _words_alone, flags=FLAGS[:2]),
    *_cases(_sparse_embedding_accumulated, _words),
    *_cases(square, _OutOfOrder, flags=[{"bucket_cap_mb": 0.00005}, {"bucket_cap_mb": 0.0001, "static_graph": True}]),
    *_cases(_gradients_ready_in_another_order_on_each_rank, _RankOrder, steps=4, bucket_cap_mb=0.0001),
    *_cases(_autograd_grad_before_backward_of_the_same_loss),
    *_cases(_gradient_penalty_on_the_input),
    *_cases(_output_changed_in_place),
]


@pytest.mark.parametrize(("make", "step", "options"), TRAININGS)
def test_training_is_that_of_one_process(ranks, make, step, options):
    ranks(_train, make, step, options, allow_warnings=(("find_unused_parameters=True was specified", UserWarning),))


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_other_world_sizes(ranks, world_size):
    ranks(_train, _mlp, square, {"steps": 4}, world_size=world_size)


def _convolutions():
    first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


@ours_only
@pytest.mark.parametrize(
    "flags",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.001}],
    ids=_flag_id,
)
@on_ranks()
def test_bit_equal_to_torch(rank, world_size, flags):
    torch.manual_seed(0)
    ours, stock = _convolutions(), _convolutions()
    stock.load_state_dict(ours.state_dict())
    pairs = []
    for model, wrapper in ((ours, DDP), (stock, StockDDP)):
        ddp = wrapper(model, **flags)
        pairs.append((ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)))
    for i in range(5):
        x = batch(rank, i, 2, 3, 5, 5).float()
        for ddp, optimizer in pairs:
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        for (name, p), q in zip(ours.named_parameters(), stock.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), f"step {i}: gradient of {name}"
            assert torch.equal(p, q), f"step {i}: {name}"


# -- gradients live in the bucket ----------------------------------------------------------------------------


@ours_only
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("flags", FLAGS[:2], ids=_flag_id)
@on_ranks()
def test_gradients_live_in_the_bucket(rank, world_size, flags, set_to_none):
    torch.manual_seed(0)
    model = _mlp()
    ddp = DDP(model, **flags)
    for i in range(3):
        ddp.zero_grad(set_to_none=set_to_none)
        ddp(batch(rank, i).float()).square().mean().backward()
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    assert len(storages) == 1, "six small gradients belong in one bucket"
    # Some padding for alignment is fair; a second copy is not.
    assert needed <= sum(storages.values()) < 2 * needed


# -- no_sync -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", FLAGS[:3], ids=_flag_id)
@on_ranks()
def test_no_sync_leaves_the_local_gradient(rank, world_size, flags):
    ddp, local = _pair(**flags)
    for i in range(2):
        with ddp.no_sync():
            square(ddp, rank, i)
        square(local, rank, i)
        assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


@on_ranks()
def test_no_sync_nests_and_ends_on_an_exception(rank, world_size):
    ddp = DDP(_mlp())
    with contextlib.suppress(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync
    with ddp.no_sync():
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync


# -- buckets -------------------------------------------------------------------------------------------------


def _bucket_layout(rank, world_size, options, steps):
    torch.manual_seed(0)
    # Each layer has shapes of its own, so that a shape says which layer it is.
    ddp = DDP(nn.Sequential(*[nn.Linear(60 + i, 61 + i) for i in range(6)]), **options)
    seen = []

    def watch(state, bucket):
        seen.append((bucket.index(), bucket.buffer().numel(), [tuple(g.shape) for g in bucket.gradients()]))
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, watch)
    for i in range(steps):
        seen.clear()
        ddp(batch(rank, i, 2, 60).float()).square().mean().backward()
    return seen


TOTAL = sum((60 + i) * (61 + i) + 61 + i for i in range(6))


# The first iteration may run with a first bucket of torch's default size. 0.01 MB is less than a layer (14.9 kB).
@pytest.mark.parametrize(
    ("options", "steps", "least"),
    [
        ({}, 1, 1),
        ({}, 3, 1),
        ({"bucket_cap_mb": 0.01}, 1, 1),
        ({"bucket_cap_mb": 0.01}, 3, 6),
        ({"bucket_cap_mb": 0.02}, 3, 2),
        ({"bucket_cap_mb_list": [1, 25]}, 3, 1),
    ],
)
def test_buckets_are_launched_in_order_and_ranks_agree_on_them(ranks, options, steps, least):
    seen, others = ranks(_bucket_layout, options, steps)
    assert seen == others
    assert [index for index, _, _ in seen] == list(range(len(seen)))
    assert len(seen) >= least
    assert options or len(seen) == 1, "all fits into one"
    assert sum(numel for _, numel, _ in seen) == TOTAL
    # Backward reaches the last layer first. Torch's class knows that of the buckets, but learns it of what is in them.
    if steps > 1 or not STOCK:
        assert seen[0][2][0] in [(66,), (66, 65)]


# -- autograd.grad, hooks of users, stats --------------------------------------------------------------------


@on_ranks()
def test_autograd_grad_is_local_and_harmless(rank, world_size):
    """``autograd.grad`` gives this rank's gradients, leaves ``.grad`` alone, and the next step is right."""
    ddp, local = _pair()
    got = torch.autograd.grad(ddp(batch(rank)).square().mean(), list(ddp.parameters()))
    want = torch.autograd.grad(local(batch(rank)).square().mean(), list(local.parameters()))
    torch.testing.assert_close(got, want)
    assert all(p.grad is None for p in ddp.parameters())
    compare_with_reference(rank, world_size, _mlp, square)


@on_ranks()
def test_gradient_of_the_input_is_not_averaged(rank, world_size):
    ddp, local = _pair()
    x, y = batch(rank).requires_grad_(), batch(rank).requires_grad_()
    ddp(x).square().mean().backward()
    local(y).square().mean().backward()
    # An input belongs to this rank: its gradient is not averaged.
    torch.testing.assert_close(x.grad, y.grad)


@on_ranks()
def test_hooks_of_users_on_parameters_still_run(rank, world_size):
    torch.manual_seed(0)
    model = _mlp()
    calls = []
    model[0].weight.register_hook(lambda grad: calls.append("tensor") or grad * 2)
    ddp = DDP(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    local = _mlp()
    local.load_state_dict(model.state_dict())
    local[0].weight.register_hook(lambda grad: grad * 2)
    ddp(batch(rank).float()).square().mean().backward()
    local(batch(rank).float()).square().mean().backward()
    mine = local[0].weight.grad
    dist.all_reduce(mine)
    torch.testing.assert_close(model[0].weight.grad, mine / world_size)
    assert calls == ["tensor", "accumulated"]


@ours_only
@on_ranks()
def test_stats(rank, world_size):
    torch.manual_seed(0)
    ddp = DDP(_mlp())
    for i in range(3):
        with ddp.no_sync():
            ddp(batch(rank, i).float()).sum().backward()
        ddp(batch(rank, i).float()).sum().backward()
    stats = ddp.stats()
    needed = sum(p.numel() * p.element_size() for p in ddp.parameters())
    assert stats["steps"] == 3
    assert stats["buckets"] == 1
    assert needed <= stats["bytes_per_step"] < 2 * needed
    assert 0 <= stats["exposed_s"] <= stats["exposed_total_s"]
    assert stats["plan"] is not None


@ours_only
@on_ranks()
def test_no_sync_around_backward_only_leaves_the_local_gradient(rank, world_size):
    ddp, local = _pair()
    out = ddp(batch(rank))
    with ddp.no_sync():
        out.square().sum().backward()
    local(batch(rank)).square().sum().backward()
    assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()}, "inside no_sync")
