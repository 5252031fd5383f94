"""Parameters of other kinds than most: without dimensions, empty, transposed, complex, cast, or in channels_last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from tests.on_ranks import on_ranks
from tests.reduction.test_gradients import FLAGS, _convolutions, _flag_id
from tests.reference import DDP, batch, compare_with_reference, square


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


@pytest.mark.parametrize("flags", [*FLAGS[:2], FLAGS[6]], ids=_flag_id)
@on_ranks()
def test_scalar_empty_transposed_complex_and_mixed_dtype_parameters(rank, world_size, flags):
    ddp = compare_with_reference(rank, world_size, _Odd, square, **flags)
    square(ddp, rank, 9)
    for name, p in ddp.module.named_parameters():
        assert p.grad.stride() == p.stride(), name
        assert p.grad.dtype == p.dtype, name
        assert p.grad.shape == p.shape, name


@pytest.mark.parametrize("flags", [*FLAGS[:3], FLAGS[6]], ids=_flag_id)
@on_ranks()
def test_channels_last_gradients_keep_their_strides(rank, world_size, flags):
    def step(model, r, i):
        x = batch(r, i, 2, 3, 5, 5).to(memory_format=torch.channels_last)
        model(x).square().mean().backward()

    def make():
        return _convolutions().to(memory_format=torch.channels_last)

    ddp = compare_with_reference(rank, world_size, make, step, **flags)
    for _ in range(2):
        step(ddp, rank, 5)
        for name, p in ddp.module.named_parameters():
            assert p.grad.stride() == p.stride(), name
    assert ddp.module[0].weight.grad.is_contiguous(memory_format=torch.channels_last)

    # One that torch calls contiguous all the same, and nothing else that is not.
    pointwise = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)
    ddp = DDP(pointwise.double(), **flags)
    for _ in range(2):
        step(ddp, rank, 5)
        assert pointwise.weight.grad.stride() == pointwise.weight.stride() == (3, 1, 3, 3)


@pytest.mark.parametrize("part", [0, 1])
@on_ranks()
def test_buckets_follow_a_cast_of_a_part_of_the_module(rank: int, size: int, part: int) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = paceline.DistributedDataParallel(module)
    module[0].register_forward_hook(lambda layer, args, output: output.to(module[1].weight.dtype))
    for step in range(3):
        if step == 1:
            ddp.zero_grad()
            module[part].double()
        ddp(torch.ones(1, 2, dtype=module[0].weight.dtype)).sum().backward()
    for number, layer in enumerate(module):
        wanted = torch.float64 if number == part else torch.float32
        assert [(param.dtype, param.grad.dtype) for param in layer.parameters()] == [(wanted, wanted)] * 2
