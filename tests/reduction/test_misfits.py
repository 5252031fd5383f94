"""Parameters that are no longer like their places in the buckets, though nobody was told."""

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import MisuseError
from tests.on_ranks import on_ranks
from tests.reference import ours_only

pytestmark = ours_only


@pytest.mark.parametrize(
    "rows", [5, 3000, 200_000], ids=["copied in a batch", "copied by itself", "scaled as it comes"]
)
@pytest.mark.parametrize("more", [2, -2])
@on_ranks()
def test_a_new_shape_through_data_is_refused_by_name(rank, world_size, rows, more):
    module = nn.Sequential(nn.Embedding(rows, 3), nn.Linear(3, 2))
    ddp = DistributedDataParallel(module)
    index = torch.tensor([rank, 2])
    ddp(index).sum().backward()
    module.zero_grad()
    table = module[0].weight
    table.data = torch.ones(rows + more, 3)
    with pytest.raises(MisuseError, match=rf"'0\.weight' has shape \({rows + more}, 3\).*\({rows}, 3\)"):
        ddp(index).sum().backward()


class _TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.a + x * self.b


@on_ranks()
def test_one_parameter_that_is_cast_through_data_is_refused_by_name(rank, world_size):
    module = _TwoDtypes()
    ddp = DistributedDataParallel(module)
    ddp(torch.ones(2)).sum().backward()
    module.zero_grad()
    module.b.data = module.b.data.double()
    with pytest.raises(MisuseError, match=r"'b' has shape \(2,\) and dtype torch.float64"):
        ddp(torch.ones(2)).sum().backward()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@on_ranks()
def test_gradients_of_another_dtype_are_refused_by_name(rank, world_size):
    module = nn.Linear(2, 2, bias=False).bfloat16()
    module.weight.grad_dtype = torch.float32
    ddp = DistributedDataParallel(module)
    with pytest.raises(MisuseError, match=r"'weight' is torch\.bfloat16 and has torch\.float32 as its grad_dtype"):
        ddp(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
