"""Modules that are made after something was wrapped."""

import torch
from torch import nn

from paceline import DistributedDataParallel
from tests.on_ranks import on_ranks
from tests.reference import ours_only


class _Sliced(nn.Module):
    """Its forward makes a module: a slice of a ``ModuleList`` is a new one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return x


@ours_only
@on_ranks()
def test_compiled_code_may_make_modules_while_there_are_wrappers(rank, world_size):
    wrapper = DistributedDataParallel(_Sliced())
    x = torch.ones(1, 2) * (rank + 1)
    bare = _Sliced()
    assert torch.equal(torch.compile(bare, fullgraph=True, backend="eager")(x), bare(x))
    torch.compile(wrapper, backend="aot_eager")(x).sum().backward()
    with torch.no_grad():
        first, second, _ = wrapper.module.layers
        mean = torch.full((1, 2), 1.5)
        torch.testing.assert_close(second.weight.grad, (mean @ first.weight.T).expand(2, 2))
    assert wrapper.module.layers[2].weight.grad is None
