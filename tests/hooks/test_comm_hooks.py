"""Comm hooks of the user under the wrapper: any callable, replaceable, with state."""

from __future__ import annotations

import copy
import functools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError, StateError
from tests.ddp.exact import assert_grad, inputs_of, line, step
from tests.hooks.hooked import hooked, mlp, square
from tests.on_ranks import on_ranks
from tests.reference import DDP, Branches, batch, compare_with_reference, no_sync, ours_only

# This comes after `tests.reference`, which imports what it imports without the warnings that would be errors.
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # isort: skip


def _mean(bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


# -- any callable --------------------------------------------------------------------------------------------


def plain(state, bucket):
    return _mean(bucket)


def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _mean(bucket)


def other_names(s, b):
    return _mean(b)


def extra_default(state, bucket, scale=1.0):
    return _mean(bucket)


def starred(*args):
    return _mean(args[1])


class Callable_:
    def __call__(self, state, bucket):
        return _mean(bucket)

    def method(self, state, bucket):
        return _mean(bucket)


def _with_first(first, state, bucket):
    assert first == "first"
    return _mean(bucket)


def ready_future(state, bucket):
    """Communicates before it returns, and returns a new tensor rather than the bucket's."""
    total = bucket.buffer().clone()
    dist.all_reduce(total)
    future = torch.futures.Future()
    future.set_result(total / dist.get_world_size())
    return future


def sets_buffer(state, bucket):
    bucket.set_buffer(bucket.buffer().clone())
    return _mean(bucket)


HOOKS = {
    "plain": plain,
    "annotated": annotated,
    "other_names": other_names,
    "extra_default": extra_default,
    "starred": starred,
    "callable": Callable_(),
    "method": Callable_().method,
    "partial": functools.partial(_with_first, "first"),
    "partial_keyword": functools.partial(extra_default, scale=2.0),
    "ready_future": ready_future,
    "sets_buffer": sets_buffer,
}
# What torch's class accepts; it refuses annotations that are strings.
STOCK_ACCEPTS = {"plain", "extra_default", "ready_future", "sets_buffer"}


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0003}],
    ids=["plain", "view", "small"],
)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in STOCK_ACCEPTS else ours_only) for k in HOOKS])
@on_ranks()
def test_any_callable(rank, world_size, kind, options):
    compare_with_reference(rank, world_size, mlp, square, wrap=hooked(HOOKS[kind], **options))


# -- what a hook sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0002}], ids=["plain", "small"])
@on_ranks()
def test_what_a_hook_sees(rank, world_size, options):
    model, record = mlp(), []

    def hook(state, bucket):
        assert state == {"mine": 1}
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1
        assert len(gradients) == len(parameters)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            assert gradient.shape == parameter.shape
            assert any(parameter is p for p in model.parameters())
            # It is a view: what is written to it is what travels.
            assert gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert sum(g.numel() for g in gradients) == buffer.numel()
        record.append((bucket.index(), bucket.is_last(), [id(p) for p in parameters]))
        return _mean(bucket)

    ddp = hooked(hook, {"mine": 1}, **options)(model)
    for i in range(3):
        record.clear()
        ddp(batch(rank, i).float()).square().mean().backward()
        assert [index for index, _, _ in record] == list(range(len(record)))
        assert [last for _, last, _ in record] == [False] * (len(record) - 1) + [True]
        seen = [p for _, _, parameters in record for p in parameters]
        assert sorted(seen) == sorted(id(p) for p in model.parameters())
    assert (len(record) > 1) == bool(options)


@on_ranks()
def test_a_hook_gets_local_gradients_and_its_result_is_the_gradient(rank, world_size):
    """A hook sees this rank's gradients, not yet divided; what it returns becomes the gradient."""
    torch.set_default_dtype(torch.float64)
    model, seen = mlp(), {}
    local = copy.deepcopy(model)

    def hook(state, bucket):
        for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):
            seen[id(p)] = g.clone()
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 42.0))
        return future

    square(hooked(hook)(model), rank, 0)
    square(local, rank, 0)
    for p, q in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(seen[id(p)], q.grad)
        assert torch.equal(p.grad, torch.full_like(p, 42.0))


def _boom(future):
    raise ValueError("boom in then")


@on_ranks()
def test_an_exception_in_a_then_surfaces(rank, world_size):
    """Wrappers of hooks call ``then`` on the result of ``then``, and an exception in one of them surfaces."""
    ddp = hooked(lambda state, bucket: _mean(bucket).then(lambda f: f.value() * 2).then(_boom))(mlp())
    with pytest.raises(Exception, match="boom in then"):
        ddp(batch(rank).float()).sum().backward()


@on_ranks()
def test_hook_with_unused_parameters(rank, world_size):
    def step(model, r, i):
        model(batch(r, i), (r + i) % 2).square().mean().backward()

    compare_with_reference(rank, world_size, Branches, step, wrap=hooked(plain, find_unused_parameters=True))


@on_ranks()
def test_hook_is_not_called_in_no_sync(rank, world_size):
    calls = []

    def step(model, r, i):
        with no_sync(model):
            square(model, r, 10 + i)
        square(model, r, i)

    wrap = hooked(lambda state, bucket: calls.append(1) or plain(state, bucket))
    compare_with_reference(rank, world_size, mlp, step, wrap=wrap, steps=3)
    assert len(calls) == 3


class _AddedEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(8, 4, sparse=True)
        self.place = nn.Embedding(8, 4, sparse=True)

    def forward(self, tokens, with_places):
        added = self.token(tokens)
        return added + self.place(tokens) if with_places else added


@ours_only
@on_ranks()
def test_hook_with_sparse_gradients(rank, world_size):
    """Both embeddings get the gradient of their sum: two sparse tensors on the same values."""

    def step(model, r, i):
        model(torch.tensor([r, i, 5]), r == 0 or i != 1).square().mean().backward()

    compare_with_reference(rank, world_size, _AddedEmbeddings, step, wrap=hooked(default_hooks.allreduce_hook))


# -- registering ---------------------------------------------------------------------------------------------


@ours_only
@on_ranks()
def test_hooks_can_be_replaced(rank, world_size):
    torch.set_default_dtype(torch.float64)
    ddp, calls = DDP(mlp()), []
    for name in ("first", "second", "third"):
        ddp.register_comm_hook(name, lambda state, bucket: calls.append(state) or plain(state, bucket))
        square(ddp, rank, 0)
        ddp.zero_grad()
    assert calls == ["first", "second", "third"]


def returns_none(state, bucket):
    return None


def wrong_length(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[:-1].clone())
    return future


@ours_only
@pytest.mark.parametrize("hook", [returns_none, wrong_length], ids=lambda hook: hook.__name__)
@on_ranks()
def test_a_hook_with_a_wrong_result_is_a_clear_error(rank, world_size, hook):
    ddp = hooked(hook)(mlp())
    with pytest.raises(PacelineError, match="hook"):
        ddp(batch(rank).float()).sum().backward()


CREATE_GRAPH_WARNING = (("Using backward.. with create_graph=True", UserWarning),)


@ours_only
@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks(allow_warnings=CREATE_GRAPH_WARNING)
def test_a_comm_hook_cannot_be_differentiated(rank, world_size, steps_before):
    ddp = hooked(plain)(line())
    for _ in range(steps_before):
        step(ddp, rank)
        ddp.zero_grad()
    for _ in range(2):
        with pytest.raises(StateError, match="comm hook"):
            ddp(inputs_of(rank)).sum().backward(create_graph=True)
        ddp.zero_grad()
        step(ddp, rank)
        assert_grad(ddp.module, 1.5)
        ddp.zero_grad()
    with ddp.no_sync():
        ddp(inputs_of(rank)).sum().backward(create_graph=True)
    assert_grad(ddp.module, rank + 1.0)
    ddp.module.weight.grad = None
    ddp.remove_comm_hook()
    ddp(inputs_of(rank)).sum().backward(create_graph=True)
    assert_grad(ddp.module, 1.5)
    ddp.module.weight.grad = None


@ours_only
@on_ranks()
def test_no_result_of_a_hook_is_kept_at_rest(rank, world_size):
    futures = []

    def noting(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer().clone())
        futures.append(weakref.ref(future))
        return future

    ddp = hooked(noting)(line())
    for _ in range(3):
        step(ddp, rank)
        assert futures
        assert all(future() is None for future in futures)
