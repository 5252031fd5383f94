"""Collectives inside compiled code: handles, order, effects, whole steps."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from paceline.tracing.operator_namespace import operators
from paceline.tracing.ops import STARTERS
from tests.on_ranks import on_ranks
from tests.tracing.launches import launches
from tests.tracing.row import difference, join_fake_group
from tests.tracing.runner import ALLOWED_WARNINGS, LITE, PATIENCE_S, compiled

BACKENDS = ("eager", "aot_eager", "inductor")
# Where Inductor's kernels make no difference.
QUICK = ("eager", "aot_eager", LITE)


def _compiled(function, backend):
    torch._dynamo.reset()
    return compiled(function, backend)


def _x(rank, length=4):
    return torch.arange(float(length)) + 1 + 10 * rank


# --- handles that leave the graph -------------------------------------------------------------------------


def _launch(x):
    work = dist.all_reduce(x, async_op=True)
    return work, x


def _launch_two(x):
    y = x * 2
    return [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True)], y


@pytest.mark.parametrize("backend", QUICK)
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_a_handle_returned_from_the_graph(rank, size, backend):
    x = _x(rank)
    work, y = _compiled(_launch, backend)(x)
    assert work.wait() in (True, None)
    assert work.is_completed() is True
    want = sum(_x(r) for r in range(size))
    assert torch.equal(y, want)
    assert torch.equal(x, want)
    # Waiting twice does no harm, as in eager.
    work.wait()
    assert torch.equal(x, want)

    x = _x(rank)
    works, y = _compiled(_launch_two, backend)(x)
    for work in works:
        work.wait()
    assert torch.equal(x, want)
    assert torch.equal(y, want * 2)


class Launcher(nn.Module):
    """Starts its collective in one graph and waits for it in the next, as prefetching code does."""

    def __init__(self):
        super().__init__()
        self.pending = []

    def forward(self, x):
        self.pending.append(dist.all_reduce(x, async_op=True))
        return x.shape[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_a_handle_kept_by_a_module(rank, size, backend):
    module, x = Launcher(), _x(rank)
    assert _compiled(module, backend)(x) == 4
    (work,) = module.pending
    work.wait()
    assert torch.equal(x, sum(_x(r) for r in range(size)))


# --- order and effects ------------------------------------------------------------------------------------


def _sequence(x):
    """Nothing here depends on what came before it, but for the order that ranks must share."""
    a, b, c, d, e = (x * n for n in range(1, 6))
    first = dist.all_reduce(a, async_op=True)
    dist.broadcast(b, 0)
    gathered = [torch.empty_like(c) for _ in range(dist.get_world_size())]
    second = dist.all_gather(gathered, c, async_op=True)
    dist.barrier()
    scattered = d.new_empty(d.shape[0] // dist.get_world_size())
    dist.reduce_scatter_single(scattered, d)
    out = torch.empty_like(e)
    dist.all_to_all_single(out, e)
    second.wait()
    first.wait()
    dist.all_reduce(e, op=dist.ReduceOp.MAX)
    return a, b, gathered, scattered, out, e


SEQUENCE = ["allreduce", "broadcast", "allgather", "barrier", "reduce_scatter", "alltoall", "allreduce"]


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_collectives_are_launched_in_the_order_they_were_written(rank, size, backend):
    compiled = _compiled(_sequence, backend)
    assert difference(compiled(_x(rank)), _sequence(_x(rank))) is None
    assert launches(lambda: _sequence(_x(rank))) == SEQUENCE
    assert launches(lambda: compiled(_x(rank))) == SEQUENCE


def _lopsided(x, w):
    """One rank has much to compute before its first collective; a compiler might be tempted to reorder."""
    y = x.clone()
    if dist.get_rank() == 0:
        for _ in range(3):
            w = torch.tanh(w @ w)
        x = x + w.sum()
    first = dist.all_reduce(x, async_op=True)
    dist.broadcast(y, 1)
    first.wait()
    return x, y, w


@pytest.mark.parametrize("backend", [LITE, "inductor"])
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_ranks_with_other_graphs_keep_one_order(rank, size, backend):
    arguments = [_x(rank), torch.eye(4) / 2]
    want = _lopsided(*(a.clone() for a in arguments))
    got = _compiled(_lopsided, backend)(*(a.clone() for a in arguments))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def _unused(x):
    """Everything here is done for its effect: no result is used."""
    dist.barrier()
    y = x * 2
    dist.all_reduce(y)
    dist.all_reduce(x * 3, async_op=True)
    if dist.get_rank() == 0:
        dist.send(x, 1)
        dist.send(x, 1)
    else:
        dist.recv(torch.empty_like(x), 0)
        dist.recv(torch.empty_like(x))
    dist.barrier()
    return x + 1


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_what_is_done_for_its_effect_is_not_dead_code(rank, size, backend):
    compiled = _compiled(_unused, backend)
    if backend == "inductor":
        from torch._inductor import lowering

        # What has no lowering is no part of the chain, whatever order it happens to run in.
        assert [name for name in STARTERS if getattr(operators, name).default not in lowering.lowerings] == []
    assert torch.equal(compiled(_x(rank)), _x(rank) + 1)
    want = ["barrier", "allreduce", "allreduce", *(["recv", "recv"] if rank else ["send", "send"]), "barrier"]
    assert launches(lambda: _unused(_x(rank))) == want
    assert launches(lambda: compiled(_x(rank))) == want


def _send_only(x):
    dist.send(x, 1)


@pytest.mark.parametrize("backend", QUICK)
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_a_graph_that_only_sends(rank, size, backend):
    if rank == 0:
        _compiled(_send_only, backend)(_x(0))
        return
    out = torch.empty(4)
    dist.recv(out, 0)
    assert torch.equal(out, _x(0))


def _asks_before_it_sends(x, peer):
    """Both ranks do: one that waited when it is asked would wait for what the other one never comes to send."""
    received = torch.empty_like(x)
    work = dist.irecv(received, peer)
    is_there = work.is_completed()
    dist.send(x, peer)
    if not is_there:
        work.wait()
    return received


@pytest.mark.parametrize("backend", ["aot_eager", LITE])
@on_ranks(group_timeout_s=PATIENCE_S, allow_warnings=ALLOWED_WARNINGS)
def test_asking_does_not_wait(rank, size, backend):
    assert torch.equal(_compiled(_asks_before_it_sends, backend)(_x(rank), 1 - rank), _x(1 - rank))


def _ring(x, size):
    """Every rank's tensor goes around, as in ring attention."""
    total, block, peer = x.clone(), x, dist.get_rank()
    for _ in range(size - 1):
        received = torch.empty_like(block)
        ops = [
            dist.P2POp(dist.isend, block, (peer + 1) % size),
            dist.P2POp(dist.irecv, received, (peer - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        block = received
        total = total + block
    return total


def _rings(rank, size, backend):
    compiled = _compiled(_ring, backend)
    for _ in range(2):
        assert torch.equal(compiled(_x(rank), size), sum(_x(r) for r in range(size)))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", ["aot_eager", LITE])
def test_a_ring_of_batches(ranks, backend, world_size):
    ranks(_rings, backend, world_size=world_size, allow_warnings=ALLOWED_WARNINGS)


# --- tensors of all kinds ---------------------------------------------------------------------------------


def _async_sum(x):
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x + x


@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_tensors_of_all_kinds(rank, size):
    compiled = _compiled(_async_sum, "aot_eager")
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        x = torch.arange(6).to(dtype) + rank
        want = _async_sum(x.clone())
        assert torch.equal(compiled(x), want)
        assert x.dtype == dtype
    # So many kinds are more than one function may be compiled for.
    compiled = _compiled(_async_sum, "aot_eager")
    # A scalar, an empty tensor, a part of another one, one that is used again afterwards.
    for make in (
        lambda: torch.tensor(2.0 + rank),
        lambda: torch.zeros(0),
        lambda: (torch.arange(12.0) + rank).view(3, 4)[1],
        lambda: (torch.arange(12.0) + rank)[4:8].view(2, 2),
    ):
        one, two = make(), make()
        assert torch.equal(compiled(one), _async_sum(two))
        assert torch.equal(one, two)


def _aliased(x):
    """Views of one tensor before, between and after."""
    head, tail = x[:2], x[2:]
    before = head + tail
    work = dist.all_reduce(head, async_op=True)
    work.wait()
    dist.broadcast(tail, 0)
    return before, head + tail, x * 1


@pytest.mark.parametrize("backend", QUICK)
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_views_see_what_arrived(rank, size, backend):
    one, two = _x(rank), _x(rank)
    assert difference(_compiled(_aliased, backend)(one), _aliased(two)) is None
    assert torch.equal(one, two)


def _gathered(x):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    work = dist.all_gather(out, x, async_op=True)
    work.wait()
    y = x.clone()
    dist.broadcast(y, 1)
    return torch.cat(out), y


@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_dynamic_shapes(rank, size):
    compiled = torch.compile(_gathered, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (3, 5, 8):
        assert difference(compiled(_x(rank, length)), _gathered(_x(rank, length))) is None


# --- gradients and whole steps ----------------------------------------------------------------------------


class Sharded(nn.Module):
    """A tensor-parallel pair of layers: its group is an attribute, its collective is in the middle."""

    def __init__(self, rank, size, group):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.group = group
        self.up = nn.Parameter(torch.randn(4, 8 // size, generator=generator))
        self.down = nn.Parameter(torch.randn(8 // size, 4, generator=generator))

    def forward(self, x):
        return funcol.all_reduce(torch.tanh(x @ self.up) @ self.down, "sum", self.group)


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(allow_warnings=ALLOWED_WARNINGS)
def test_gradients_through_a_functional_collective(rank, size, backend):
    ours, theirs = (Sharded(rank, size, dist.group.WORLD) for _ in range(2))
    compiled = _compiled(ours, backend)
    for step in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(one).square().sum().backward()
        theirs(two).square().sum().backward()
        torch.testing.assert_close(one.grad, two.grad)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def _step(weights, x, target):
    """A data-parallel step by hand, communication included, in one graph."""

    def loss(weights):
        hidden = torch.tanh(x @ weights[0])
        return (hidden @ weights[1] - target).square().mean()

    grads, value = torch.func.grad_and_value(loss)(weights)
    works = [dist.all_reduce(grad, async_op=True) for grad in grads]
    dist.all_reduce(value)
    updated = []
    for weight, grad, work in zip(weights, grads, works, strict=True):
        work.wait()
        updated.append(weight - 0.1 * grad / dist.get_world_size())
    return updated, value / dist.get_world_size()


def _steps(rank, size, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(_step, fullgraph=True, backend=counter)
    generator = torch.Generator().manual_seed(0)
    ours = theirs = [torch.randn(4, 8, generator=generator), torch.randn(8, 2, generator=generator)]
    data = torch.Generator().manual_seed(rank + 1)
    for _ in range(3):
        x, target = torch.randn(5, 4, generator=data), torch.randn(5, 2, generator=data)
        ours, value = compiled(ours, x, target)
        theirs, expected = _step(theirs, x, target)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(ours, theirs)
    assert counter.frame_count == 1
    return [weight.tolist() for weight in ours]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_training_step_with_its_communication_is_one_graph(ranks, backend):
    one, two = ranks(_steps, backend, allow_warnings=ALLOWED_WARNINGS)
    assert one == two


# --- what stays in backward -------------------------------------------------------------------------------


class Broadcasting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.broadcast(grad, 0)
        return grad


def _multiplied_by_zero(x, w):
    """People touch parameters this way; the compiler sees that the gradient of ``y`` is a constant."""
    y = dist.nn.functional.all_reduce(x * w)
    return (w * x).sum() + 0 * y.sum() + 0 * Broadcasting.apply(w).sum()


@on_ranks(world_size=1, backend=None, allow_warnings=ALLOWED_WARNINGS)
def test_what_is_done_in_backward_is_done_there_and_once(rank, size):
    join_fake_group(0, 2)
    for backend in (None, "aot_eager", LITE):
        function = _compiled(_multiplied_by_zero, backend) if backend else _multiplied_by_zero
        x, w = torch.ones(4), torch.ones(4, requires_grad=True)
        function(x, w).backward()
        results = []
        assert launches(lambda: results.append(function(x, w))) == ["allreduce"]  # noqa: B023 (called at once)
        assert sorted(launches(lambda: results[0].backward())) == ["allreduce", "broadcast"]  # noqa: B023
