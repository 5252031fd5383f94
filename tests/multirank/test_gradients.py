"""Buckets, gradients in the bucket, and reduction: against a single process, and against torch to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

from ._ddp import DDP, STOCK, assert_grads, assert_in_sync, batch, compare_with_reference, no_sync, ours_only

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


def _square(model, rank, i):
    model(batch(rank, i)).square().mean().backward()


# -- plain training, all flags -------------------------------------------------------------------------------


def _plain(rank, world_size, flags, set_to_none):
    compare_with_reference(rank, world_size, _mlp, _square, steps=4, set_to_none=set_to_none, **flags)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("flags", FLAGS, ids=_flag_id)
def test_equal_to_one_process(ranks, flags, set_to_none):
    allowed = ()
    if "find_unused_parameters" in flags:
        allowed = (("find_unused_parameters=True was specified", UserWarning),)
    ranks(_plain, flags, set_to_none, allow_warnings=allowed)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_equal_to_one_process_at_other_world_sizes(ranks, world_size):
    ranks(_plain, {}, True, world_size=world_size)


def _concatenated(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ddp = DDP(_mlp())
    torch.manual_seed(0)
    reference = _mlp()
    ddp(batch(rank)).square().mean().backward()
    reference(torch.cat([batch(r) for r in range(world_size)])).square().mean().backward()
    assert_grads(ddp, {name: p.grad for name, p in reference.named_parameters()})


def test_equal_to_the_concatenated_batch(ranks):
    ranks(_concatenated)


class _Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, 3),
        )

    def forward(self, x):
        return self.net(x)


def _bit_equal(rank, world_size, flags, momentum):
    torch.manual_seed(0)
    ours, stock = _Convolutions(), _Convolutions()
    stock.load_state_dict(ours.state_dict())
    pairs = []
    for model, wrapper in ((ours, DDP), (stock, StockDDP)):
        ddp = wrapper(model, **flags)
        pairs.append((ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=momentum)))
    for i in range(5):
        x = batch(rank, i, 2, 3, 5, 5).float()
        for ddp, optimizer in pairs:
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
        for (name, p), q in zip(ours.named_parameters(), stock.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), f"step {i}: gradient of {name}"
            assert torch.equal(p, q), f"step {i}: {name}"


@ours_only
@pytest.mark.parametrize(
    "flags",
    [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.001}],
    ids=_flag_id,
)
def test_bit_equal_to_torch(ranks, flags):
    ranks(_bit_equal, flags, 0.9)


# -- gradients live in the bucket ----------------------------------------------------------------------------


def _storages(rank, world_size, flags, set_to_none):
    """Bytes of storage behind the gradients at rest, and whether they were replaced between steps."""
    torch.manual_seed(0)
    model = _mlp()
    ddp = DDP(model, **flags)
    for i in range(3):
        ddp.zero_grad(set_to_none=set_to_none)
        ddp(batch(rank, i).float()).square().mean().backward()
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    return len(storages), sum(storages.values()), needed


@ours_only
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("flags", FLAGS[:2], ids=_flag_id)
def test_gradients_live_in_the_bucket(ranks, flags, set_to_none):
    for count, held, needed in ranks(_storages, flags, set_to_none):
        assert count == 1, "six small gradients belong in one bucket"
        # Some padding for alignment is fair; a second copy is not.
        assert needed <= held < 2 * needed


def _zero_grad_ways(rank, world_size, flags):
    """Gradients are dropped, zeroed, replaced and scaled by users in turn; each step is still right."""

    def step(model, r, i):
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
        _square(model, r, i)

    compare_with_reference(rank, world_size, _mlp, step, steps=6, **flags)


@pytest.mark.parametrize("flags", FLAGS[:3], ids=_flag_id)
def test_gradients_dropped_zeroed_and_replaced(ranks, flags):
    ranks(_zero_grad_ways, flags)


def _kept_gradient(rank, world_size, flags):
    """A gradient that the user keeps from an earlier step is not overwritten by a later one."""
    torch.manual_seed(0)
    model = _mlp()
    ddp = DDP(model, **flags)
    ddp(batch(rank, 0).float()).square().mean().backward()
    kept = [p.grad for p in model.parameters()]
    values = [g.clone() for g in kept]
    ddp.zero_grad(set_to_none=True)
    ddp(batch(rank, 1).float()).square().mean().backward()
    return all(torch.equal(g, v) for g, v in zip(kept, values, strict=True))


def test_a_gradient_kept_by_the_user_is_not_overwritten(ranks):
    # Without views torch keeps it; a drop-in must too, or at least not change it behind the user's back.
    assert ranks(_kept_gradient, {}) == [True, True]


# -- accumulation --------------------------------------------------------------------------------------------


def _accumulate(rank, world_size, flags, set_to_none):
    def step(model, r, i):
        for micro in range(2):
            with no_sync(model):
                model(batch(r, 10 * i + micro)).square().mean().backward()
        model(batch(r, 10 * i + 2)).square().mean().backward()

    compare_with_reference(rank, world_size, _mlp, step, set_to_none=set_to_none, **flags)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("flags", [*FLAGS[:4], FLAGS[6]], ids=_flag_id)
def test_accumulation_in_no_sync(ranks, flags, set_to_none):
    ranks(_accumulate, flags, set_to_none)


def _accumulate_with_sync(rank, world_size, flags):
    def step(model, r, i):
        for micro in range(3):
            model(batch(r, 10 * i + micro)).square().mean().backward()

    compare_with_reference(rank, world_size, _mlp, step, **flags)


@pytest.mark.parametrize("flags", FLAGS[:4], ids=_flag_id)
def test_accumulation_with_every_backward_synchronised(ranks, flags):
    ranks(_accumulate_with_sync, flags)


def _no_sync_is_local(rank, world_size, flags):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ddp, local = DDP(_mlp(), **flags), _mlp()
    local.load_state_dict(ddp.module.state_dict())
    for i in range(2):
        with ddp.no_sync():
            _square(ddp, rank, i)
        _square(local, rank, i)
        assert_grads(ddp, {name: p.grad for name, p in local.named_parameters()})


@pytest.mark.parametrize("flags", FLAGS[:3], ids=_flag_id)
def test_no_sync_leaves_the_local_gradient(ranks, flags):
    ranks(_no_sync_is_local, flags)


def _forward_in_no_sync(rank, world_size):
    def step(model, r, i):
        with no_sync(model):
            out = model(batch(r, i))
        out.square().mean().backward()

    compare_with_reference(rank, world_size, _mlp, step)


@ours_only
def test_no_sync_is_decided_at_backward(ranks):
    ranks(_forward_in_no_sync)


def _no_sync_restores(rank, world_size):
    ddp = DDP(_mlp())
    with contextlib.suppress(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync
    with ddp.no_sync():
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync


def test_no_sync_nests_and_ends_on_an_exception(ranks):
    ranks(_no_sync_restores)


# -- several forwards, several backwards ---------------------------------------------------------------------


def _forwards_then_backward(rank, world_size, flags):
    def step(model, r, i):
        outputs = [model(batch(r, 10 * i + k)) for k in range(3)]
        sum(out.square().mean() for out in outputs).backward()

    compare_with_reference(rank, world_size, _mlp, step, **flags)


@pytest.mark.parametrize("flags", FLAGS[:2], ids=_flag_id)
def test_several_forwards_before_one_backward(ranks, flags):
    ranks(_forwards_then_backward, flags)


def _forwards_then_backwards(rank, world_size, newest_first):
    def step(model, r, i):
        losses = [model(batch(r, 10 * i + k)).square().mean() for k in range(3)]
        for loss in reversed(losses) if newest_first else losses:
            loss.backward()

    compare_with_reference(rank, world_size, _mlp, step)


@ours_only
@pytest.mark.parametrize("newest_first", [False, True])
def test_several_forwards_then_as_many_backwards(ranks, newest_first):
    ranks(_forwards_then_backwards, newest_first)


def _forward_only(rank, world_size):
    def step(model, r, i):
        with torch.no_grad():
            model(batch(r, 90 + i))
        model.eval()
        model(batch(r, 80 + i))
        model.train()
        _square(model, r, i)

    compare_with_reference(rank, world_size, _mlp, step)


def test_forwards_without_backward_in_between(ranks):
    ranks(_forward_only)


class _Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh()) + self.a(x)


def _shared(rank, world_size, flags):
    compare_with_reference(rank, world_size, _Shared, _square, **flags)


@pytest.mark.parametrize("flags", [*FLAGS[:3], FLAGS[4]], ids=_flag_id)
def test_shared_parameters(ranks, flags):
    ranks(_shared, flags)


# -- odd parameters ------------------------------------------------------------------------------------------


class _Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.transposed = nn.Parameter(torch.randn(2, 4).t())
        self.single = nn.Parameter(torch.randn(2, 2, dtype=torch.float32))
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.plain = nn.Linear(4, 4)

    def forward(self, x):
        y = self.plain(x) * self.scalar + self.empty.sum()
        y = (y * self.complex).abs() @ self.transposed
        return y @ self.single.double()


def _odd(rank, world_size, flags):
    ddp = compare_with_reference(rank, world_size, _Odd, _square, **flags)
    _square(ddp, rank, 9)
    for name, p in ddp.module.named_parameters():
        assert p.grad.stride() == p.stride(), name
        assert p.grad.dtype == p.dtype, name
        assert p.grad.shape == p.shape, name


@pytest.mark.parametrize("flags", [*FLAGS[:2], FLAGS[6]], ids=_flag_id)
def test_scalar_empty_transposed_complex_and_mixed_dtype_parameters(ranks, flags):
    ranks(_odd, flags)


def _channels_last(rank, world_size, flags):
    def step(model, r, i):
        x = batch(r, i, 2, 3, 5, 5).to(memory_format=torch.channels_last)
        model(x).square().mean().backward()

    def make():
        return _Convolutions().to(memory_format=torch.channels_last)

    ddp = compare_with_reference(rank, world_size, make, step, **flags)
    for _ in range(2):
        step(ddp, rank, 5)
        for name, p in ddp.module.named_parameters():
            assert p.grad.stride() == p.stride(), name
    assert ddp.module.net[0].weight.grad.is_contiguous(memory_format=torch.channels_last)

    # One that torch calls contiguous all the same, and nothing else that is not.
    pointwise = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)
    ddp = DDP(pointwise.double(), **flags)
    for _ in range(2):
        step(ddp, rank, 5)
        assert pointwise.weight.grad.stride() == pointwise.weight.stride() == (3, 1, 3, 3)


@pytest.mark.parametrize("flags", [*FLAGS[:3], FLAGS[6]], ids=_flag_id)
def test_channels_last_gradients_keep_their_strides(ranks, flags):
    ranks(_channels_last, flags)


class _Words(nn.Module):
    def __init__(self, also_dense=True):
        super().__init__()
        self.embedding = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 2) if also_dense else None

    def forward(self, tokens):
        x = self.embedding(tokens)
        return x if self.head is None else self.head(x)


def _tokens(rank, i):
    # Ranks look up different rows, and different numbers of them.
    return torch.randint(0, 10, (2, 2 + rank), generator=torch.Generator().manual_seed(10 * i + rank))


def _sparse(rank, world_size, also_dense, flags):
    def step(model, r, i):
        model(_tokens(r, i)).square().mean().backward()

    ddp = compare_with_reference(rank, world_size, lambda: _Words(also_dense), step, **flags)
    step(ddp, rank, 7)
    assert ddp.module.embedding.weight.grad.is_sparse


@pytest.mark.parametrize("flags", FLAGS[:2], ids=_flag_id)
@pytest.mark.parametrize("also_dense", [True, False])
def test_sparse_embedding(ranks, also_dense, flags):
    ranks(_sparse, also_dense, flags)


def _sparse_accumulated(rank, world_size):
    def step(model, r, i):
        with no_sync(model):
            model(_tokens(r, i)).square().mean().backward()
        model(_tokens(r, 50 + i)).square().mean().backward()

    compare_with_reference(rank, world_size, _Words, step)


def test_sparse_embedding_accumulated(ranks):
    ranks(_sparse_accumulated)


# -- buckets -------------------------------------------------------------------------------------------------


def _bucket_layout(rank, world_size, options, steps):
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), **options)
    seen = []

    def watch(state, bucket):
        seen.append((bucket.index(), bucket.buffer().numel(), [tuple(g.shape) for g in bucket.gradients()]))
        work = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, watch)
    for i in range(steps):
        seen.clear()
        ddp(batch(rank, i, 2, 64).float()).square().mean().backward()
    return seen


LAYER = 64 * 64 + 64


@pytest.mark.parametrize("steps", [1, 3])
def test_one_bucket_when_all_fits(ranks, steps):
    for seen in ranks(_bucket_layout, {}, steps):
        assert [numel for _, numel, _ in seen] == [6 * LAYER]


@pytest.mark.parametrize("steps", [1, 3])
def test_cap_splits_into_buckets_launched_in_order(ranks, steps):
    # Less than a layer in float32 (16.6 kB): no two layers share a bucket once buckets are rebuilt.
    for seen in ranks(_bucket_layout, {"bucket_cap_mb": 0.01}, steps):
        assert [index for index, _, _ in seen] == list(range(len(seen)))
        # The first iteration may run with a first bucket of torch's default size.
        assert len(seen) >= (6 if steps > 1 else 1)
        assert sum(numel for _, numel, _ in seen) == 6 * LAYER
        # Backward reaches the last layer first.
        assert seen[0][2][0] in [(64,), (64, 64)]


def test_ranks_agree_on_the_layout(ranks):
    first, second = ranks(_bucket_layout, {"bucket_cap_mb": 0.02}, 3)
    assert first == second


def _cap_list(rank, world_size):
    seen = _bucket_layout(rank, world_size, {"bucket_cap_mb_list": [1, 25]}, 3)
    return [numel for _, numel, _ in seen]


def test_bucket_cap_mb_list(ranks):
    for sizes in ranks(_cap_list):
        assert sum(sizes) == 6 * LAYER


class _OutOfOrder(nn.Module):
    """Uses its layers in another order than it registers them; the first backward shows the real one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        for k in (3, 0, 4, 1, 2):
            x = self.layers[k](x).tanh()
        return x


def _out_of_order(rank, world_size, flags):
    compare_with_reference(rank, world_size, _OutOfOrder, _square, steps=4, **flags)


@pytest.mark.parametrize(
    "flags", [{"bucket_cap_mb": 0.00005}, {"bucket_cap_mb": 0.0001, "static_graph": True}], ids=_flag_id
)
def test_layers_used_out_of_registration_order(ranks, flags):
    ranks(_out_of_order, flags)


class _RankOrder(nn.Module):
    """Two towers whose backward order depends on the rank: what is ready first differs between ranks."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x, flip):
        return self.a(self.b(x).tanh()) if flip else self.b(self.a(x).tanh())


def _rank_order(rank, world_size):
    def step(model, r, i):
        model(batch(r, i), (r + i) % 2 == 1).square().mean().backward()

    compare_with_reference(rank, world_size, _RankOrder, step, steps=4, bucket_cap_mb=0.0001)


def test_ranks_that_finish_gradients_in_different_orders(ranks):
    ranks(_rank_order)


# -- autograd.grad, higher order, hooks of users -------------------------------------------------------------


def _autograd_grad(rank, world_size):
    """``autograd.grad`` gives this rank's gradients, leaves ``.grad`` alone, and the next step is right."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ddp, local = DDP(_mlp()), _mlp()
    local.load_state_dict(ddp.module.state_dict())
    got = torch.autograd.grad(ddp(batch(rank)).square().mean(), list(ddp.parameters()))
    want = torch.autograd.grad(local(batch(rank)).square().mean(), list(local.parameters()))
    torch.testing.assert_close(got, want)
    assert all(p.grad is None for p in ddp.parameters())
    compare_with_reference(rank, world_size, _mlp, _square)


def test_autograd_grad_is_local_and_harmless(ranks):
    ranks(_autograd_grad)


def _grad_between(rank, world_size):
    def step(model, r, i):
        loss = model(batch(r, i)).square().mean()
        torch.autograd.grad(loss, list(model.parameters())[:1], retain_graph=True)
        loss.backward()

    compare_with_reference(rank, world_size, _mlp, step)


def test_autograd_grad_before_backward_of_the_same_loss(ranks):
    ranks(_grad_between)


def _input_gradient(rank, world_size):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    ddp, local = DDP(_mlp()), _mlp()
    local.load_state_dict(ddp.module.state_dict())
    x, y = batch(rank).requires_grad_(), batch(rank).requires_grad_()
    ddp(x).square().mean().backward()
    local(y).square().mean().backward()
    # An input belongs to this rank: its gradient is not averaged.
    torch.testing.assert_close(x.grad, y.grad)


def test_gradient_of_the_input_is_not_averaged(ranks):
    ranks(_input_gradient)


def _gradient_penalty_on_input(rank, world_size):
    """WGAN-GP: the penalty needs create_graph on the input only; everything is linear in ranks."""

    def step(model, r, i):
        x = batch(r, i).requires_grad_()
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (g.square().sum() + model(x).square().mean()).backward()

    compare_with_reference(rank, world_size, _mlp, step)


def test_gradient_penalty_on_the_input(ranks):
    ranks(_gradient_penalty_on_input)


def _users_hooks(rank, world_size):
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


def test_hooks_of_users_on_parameters_still_run(ranks):
    ranks(_users_hooks)


def _inplace_on_output(rank, world_size):
    def step(model, r, i):
        out = model(batch(r, i))
        out.mul_(2)
        out.square().mean().backward()

    compare_with_reference(rank, world_size, _mlp, step)


def test_output_changed_in_place(ranks):
    ranks(_inplace_on_output)


def _world_of_steps(rank, world_size):
    def step(model, r, i):
        if i % 3 == 2:
            with no_sync(model):
                _square(model, r, 100 + i)
        _square(model, r, i)

    ddp = compare_with_reference(rank, world_size, _mlp, step, steps=12, lr=0.05)
    assert_in_sync(ddp.module)


def test_many_steps_with_a_mix_of_syncs(ranks):
    ranks(_world_of_steps)


def _stats(rank, world_size):
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


@pytest.mark.skipif(STOCK, reason="torch's class has no stats()")
def test_stats(ranks):
    ranks(_stats)
