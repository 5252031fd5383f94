"""Mixed precision under the wrapper: what computes in which dtype, and what comes out."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from paceline import MixedPrecision
from paceline.errors import ParameterMismatchError
from tests.ddp.exact import assert_grad, inputs_of, line
from tests.on_ranks import on_ranks
from tests.reference import DDP, assert_in_sync, batch, ours_only

pytestmark = ours_only

LOW = torch.bfloat16


class _Spy(nn.Module):
    """Notes the dtypes that forward computes in."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.first.weight.dtype, self.scale.dtype, self.count.dtype))
        return self.second(self.first(x).tanh()) * self.scale


def _expected_low_precision(model, world_size, step, param_dtype):
    """The same computation by hand: weights and input cast down, gradients averaged, cast up."""
    means = None
    for r in range(world_size):
        low = _Spy().to(param_dtype)
        low.load_state_dict({k: v.to(param_dtype) for k, v in model.state_dict().items()})
        low(batch(r, step).to(param_dtype)).float().square().mean().backward()
        grads = [p.grad.float() / world_size for p in low.parameters()]
        means = grads if means is None else [m + g for m, g in zip(means, grads, strict=True)]
    return means


PRECISIONS = [
    _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16),
    _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
    _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16),
]


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.00005}], ids=["plain", "view", "small"]
)
@pytest.mark.parametrize("precision", PRECISIONS, ids=["bf16", "bf16 summed in f32", "f16 summed in f32"])
@on_ranks()
def test_values_and_dtypes(rank, world_size, precision, options):
    torch.manual_seed(rank)
    model = _Spy()
    ddp = DDP(model, mixed_precision=precision, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    compute = precision.param_dtype or torch.float32
    for i in range(3):
        expected = _expected_low_precision(model, world_size, i, compute)
        optimizer.zero_grad()
        out = ddp(batch(rank, i).float())
        assert out.dtype == compute
        assert model.seen[-1][:2] == (compute, compute)
        assert model.seen[-1][2] == (precision.buffer_dtype or torch.float32)
        assert model.seen[-1][3] == torch.int64
        out.float().square().mean().backward()
        for (name, p), want in zip(model.named_parameters(), expected, strict=True):
            # The optimizer works in full precision on full-precision weights.
            assert p.dtype == torch.float32, name
            assert p.grad.dtype == torch.float32, name
            torch.testing.assert_close(p.grad, want, rtol=2e-2, atol=2e-3)
        assert_in_sync(model)
        optimizer.step()


@on_ranks()
def test_keeps_full_precision_weights(rank, world_size):
    """Updates too small for bfloat16 are not lost: the weights themselves stay float32."""
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ddp = DDP(model, mixed_precision=PRECISIONS[1])
    for _ in range(4):
        ddp(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            model.weight.sub_(model.weight.grad, alpha=1e-4)
        ddp.zero_grad()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), 1 - 4e-4), rtol=0, atol=1e-7)
    assert all(value.dtype == torch.float32 for value in ddp.state_dict().values())


@on_ranks()
def test_with_accumulation(rank, world_size):
    torch.manual_seed(0)
    model = _Spy()
    ddp = DDP(model, mixed_precision=PRECISIONS[1])
    parts = [_expected_low_precision(model, world_size, i, torch.bfloat16) for i in (0, 1)]
    with ddp.no_sync():
        ddp(batch(rank, 0).float()).float().square().mean().backward()
    ddp(batch(rank, 1).float()).float().square().mean().backward()
    for p, first, second in zip(model.parameters(), *parts, strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, first + second, rtol=2e-2, atol=4e-3)
    assert_in_sync(model)


@on_ranks()
def test_with_sparse_gradients(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    ddp = DDP(model, mixed_precision=PRECISIONS[1])
    expected = torch.zeros(8, 4)
    for r in range(world_size):
        twin = copy.deepcopy(model).to(torch.bfloat16)
        twin(torch.tensor([r, 3])).float().square().mean().backward()
        expected += twin[0].weight.grad.to_dense().float() / world_size
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.tensor([rank, 3])).float().square().mean().backward()
        assert model[0].weight.grad.is_sparse
        assert model[0].weight.grad.dtype == torch.float32
        torch.testing.assert_close(model[0].weight.grad.to_dense(), expected, rtol=2e-2, atol=4e-3)
        assert_in_sync(model)


def _low_precision_tensors():
    """Their shapes. Several looks: the thread of the hang watch may just be looking at a frame that holds one."""
    for _ in range(100):
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        found = [tuple(tensor.shape) for tensor in tensors if tensor.dtype == LOW and tensor.numel()]
        if not found:
            break
        del tensors
    return found


@on_ranks()
def test_no_low_precision_copies_are_kept_at_rest(rank, world_size):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ddp = DDP(model, mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=LOW))
    for _ in range(3):
        ddp(torch.ones(1, 8)).float().sum().backward()
        assert _low_precision_tensors() == []
        with torch.no_grad():
            assert ddp(torch.ones(1, 8)).dtype == LOW
        assert _low_precision_tensors() == []


@pytest.mark.parametrize("again", [False, True], ids=["bare", "wrapped again"])
@on_ranks()
def test_ends_with_the_wrapper(rank, world_size, again):
    model = line()
    ddp = DDP(model, mixed_precision=MixedPrecision(param_dtype=LOW))
    assert ddp(inputs_of(rank)).dtype == LOW
    del ddp
    gc.collect()
    module = DDP(model) if again else model
    output = module(inputs_of(rank))
    assert output.dtype == torch.float32
    output.sum().backward()
    assert_grad(model, 1.5 if again else rank + 1.0)


@on_ranks()
def test_a_copy_has_a_mixed_precision_of_its_own(rank, world_size):
    ddp = DDP(line(), mixed_precision=MixedPrecision(param_dtype=LOW))
    twin = copy.deepcopy(ddp)
    del ddp
    gc.collect()
    for _ in range(2):
        output = twin(inputs_of(rank))
        assert output.dtype == LOW
        output.float().sum().backward()
        assert_grad(twin.module, 1.5)
        twin.zero_grad()
    module = twin.module
    del twin, output
    gc.collect()
    assert module(inputs_of(rank)).dtype == torch.float32


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 1, bias=False)
        self.reentrant = True

    def forward(self, x):
        return self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("updated", [False, True])
@on_ranks()
def test_a_checkpoint_in_low_precision_with_a_forward_without_gradients_between(rank, world_size, updated):
    """A forward without gradients, or an update in place, between forward and backward (a teacher of itself)."""
    model = _Checkpointed()
    ddp = DDP(model, mixed_precision=MixedPrecision(param_dtype=LOW))
    grads = []
    for between in (False, True):
        output = ddp(inputs_of(rank).requires_grad_())
        if between:
            model.reentrant = False
            with torch.no_grad():
                ddp(inputs_of(rank))
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


def _other_precision(rank, world_size, precisions):
    model = nn.Linear(4, 2)
    with pytest.raises(ParameterMismatchError, match="option mixed_precision") as caught:
        DDP(model, mixed_precision=precisions[rank])
    # It was refused before anything was done to the module.
    assert model(batch(rank).float()).dtype == torch.float32
    return str(caught.value)


@pytest.mark.parametrize(
    "precisions",
    [
        (MixedPrecision(reduce_dtype=torch.float16), MixedPrecision(reduce_dtype=torch.bfloat16)),
        (MixedPrecision(param_dtype=torch.float16), MixedPrecision(param_dtype=torch.bfloat16)),
        (None, MixedPrecision(reduce_dtype=torch.bfloat16)),
    ],
    ids=["reduce_dtype", "param_dtype", "none"],
)
def test_ranks_with_different_mixed_precision_are_refused(ranks, precisions):
    told = ranks(_other_precision, precisions)
    assert told[0] == told[1]
    assert "bfloat16" in told[0]
