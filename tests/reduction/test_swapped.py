"""Parameters that torch swaps with another tensor, or replaces behind everybody's back, are reduced all the same."""

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel
from paceline.errors import ReplicaMismatchError
from tests.on_ranks import on_ranks
from tests.reference import ours_only
from tests.transport.requirements import needs_shm

pytestmark = ours_only


def _train(rank, call, module, dtype=torch.float32):
    module.zero_grad()
    call(torch.full((1, 2), rank + 1.0, dtype=dtype)).sum().backward()
    for layer in module:
        torch.testing.assert_close(layer.bias.grad, torch.ones(2, dtype=dtype))
        torch.testing.assert_close(layer.weight.grad, torch.full((2, 2), 1.5, dtype=dtype))


class _Sum(nn.Sequential):
    """The weight's gradient is the input, the bias' is one."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, x):
        return self[0](x) + self[1](x)


def _after_a_swap(rank, world_size, through):
    module = _Sum()
    ddp = DistributedDataParallel(module)
    call = ddp if through == "wrapper" else module
    _train(rank, call, module)
    swapped, id_before = nn.Parameter(torch.ones(2, 2)), id(module[0].weight)
    module.zero_grad()
    torch.utils.swap_tensors(module[0].weight, swapped)
    assert id(module[0].weight) == id_before
    for _ in range(2):
        _train(rank, call, module)
    # What was in the parameter belongs to nobody now.
    (swapped.sum() * (rank + 1)).backward()
    assert torch.equal(swapped.grad, torch.full((2, 2), rank + 1.0))


@pytest.mark.parametrize("backend", ["gloo", "cpu:shm"])
@pytest.mark.parametrize("through", ["wrapper", "module"])
def test_gradients_are_averaged_after_a_swap(ranks, backend, through):
    if backend == "cpu:shm":
        needs_shm()
    ranks(_after_a_swap, through, backend=backend)


@pytest.mark.parametrize("through", ["wrapper", "module"])
@pytest.mark.parametrize("frozen", [False, True])
@on_ranks()
def test_gradients_are_averaged_after_a_cast_that_swaps(rank, world_size, through, frozen):
    module = _Sum()
    module[1].requires_grad_(not frozen)
    ddp = DistributedDataParallel(module)
    module.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
        module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    module.requires_grad_(True)
    for _ in range(2):
        _train(rank, ddp if through == "wrapper" else module, module, torch.float64)


@pytest.mark.parametrize("cast", ["wrapper", "module"])
@on_ranks()
def test_gradients_are_averaged_after_a_cast_that_replaces(rank, world_size, cast):
    module = _Sum()
    ddp = DistributedDataParallel(module)
    before = set(map(id, module.parameters()))
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        (ddp if cast == "wrapper" else module).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert before.isdisjoint(map(id, module.parameters()))
    for _ in range(2):
        _train(rank, module, module, torch.float64)


@on_ranks()
def test_swapped_values_that_differ_are_refused(rank, world_size):
    module = _Sum()
    ddp = DistributedDataParallel(module)
    torch.utils.swap_tensors(module[0].weight, nn.Parameter(torch.full((2, 2), rank + 1.0)))
    with pytest.raises(ReplicaMismatchError, match=r"0\.weight"):
        ddp(torch.ones(1, 2)).sum().backward()


@on_ranks()
def test_a_hook_of_the_user_stays_with_its_parameter(rank, world_size):
    module = _Sum()
    seen = []
    module[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    ddp = DistributedDataParallel(module)
    torch.utils.swap_tensors(module[0].weight, nn.Parameter(torch.ones(2, 2)))
    ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
    (grad,) = seen
    assert torch.equal(grad, torch.full((2, 2), 1.5))
