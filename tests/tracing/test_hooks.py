"""Backward hooks in compiled code, without compiled autograd: the gradients and the records are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.tracing.runner import ALLOWED_WARNINGS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def _compiled(module, backend):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


def _train(module, call):
    """A few steps of SGD; returns what the weights and the gradient of the input became."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    grads = []
    for _ in range(3):
        x = torch.randn(3, 4, generator=generator).requires_grad_()
        optimizer.zero_grad()
        call(x).square().sum().backward()
        optimizer.step()
        grads.append(x.grad)
    return [*grads, *(param.detach() for param in module.parameters())]


def _hooks_of_every_kind(module, log):
    """Each kind by itself is a row of the list of expressions."""
    module.middle.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0].clamp(-1, 1) * 3,))
    module.middle.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 0.5 + 0.1,))
    module.middle.weight.register_hook(lambda grad: grad * 3)
    removed = module.last.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 9,))
    removed.remove()

    def on_output(module, args, output):
        output.register_hook(lambda grad: grad * 2)

    def halve(param):
        param.grad.mul_(0.5)

    module.first.register_forward_hook(on_output)
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(halve)
    module.middle.weight.register_post_accumulate_grad_hook(lambda param: log.append(param.grad.clone()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@on_ranks(world_size=1, backend=None, allow_warnings=ALLOWED_WARNINGS)
def test_training_with_hooks_of_every_kind(rank, size, backend):
    """Two copies of a net are trained, each with hooks of its own: one compiled, one not."""
    assert not torch._dynamo.config.compiled_autograd
    ours = Net()
    theirs = copy.deepcopy(ours)
    seen: list[list] = [[], []]
    for module, log in zip((ours, theirs), seen, strict=True):
        _hooks_of_every_kind(module, log)
    torch.testing.assert_close(_train(ours, _compiled(ours, backend)), _train(theirs, theirs))
    # Once in each of three steps.
    assert len(seen[0]) == 3
    torch.testing.assert_close(*seen)


# The last is torch's own remark on modules whose inputs need no gradient.
@on_ranks(world_size=1, backend=None, allow_warnings=(*ALLOWED_WARNINGS, ("Full backward hook is firing", UserWarning)))
def test_what_a_hook_is_given(rank, size):
    """What a hook is given: its module, and None for what needs no gradient."""
    module, seen = Net(), []
    module.first.register_full_backward_hook(lambda *args: seen.append(args))
    compiled = _compiled(module, "aot_eager")
    compiled(torch.ones(3, 4)).sum().backward()
    ((hooked, grad_input, grad_output),) = seen
    assert hooked is module.first
    assert grad_input == (None,)
    assert isinstance(grad_output, tuple)
    assert grad_output[0].shape == (3, 4)

    # Nothing happens without a backward, or without gradients.
    with torch.no_grad():
        compiled(torch.ones(3, 4))
    compiled(torch.ones(3, 4))
    assert len(seen) == 1

    # Once each backward, in whatever order they come.
    first, second = compiled(torch.ones(3, 4)).sum(), compiled(torch.ones(3, 4)).sum()
    second.backward()
    first.backward()
    assert len(seen) == 3


def _fails(module, grad_input, grad_output):
    raise RuntimeError("a hook of the user's failed")


def _too_many(module, grad_input, grad_output):
    return (grad_input[0], grad_input[0])


@pytest.mark.parametrize("hook", [_fails, _too_many])
@on_ranks(world_size=1, backend=None, allow_warnings=ALLOWED_WARNINGS)
def test_a_hook_that_is_wrong_says_so_as_in_eager(rank, size, hook):
    messages = []
    for compile_it in (False, True):
        module = Net()
        module.middle.register_full_backward_hook(hook)
        call = _compiled(module, "aot_eager") if compile_it else module
        with pytest.raises(RuntimeError) as caught:
            call(torch.ones(3, 4, requires_grad=True)).sum().backward()
        messages.append(str(caught.value).splitlines()[0])
    eager, compiled = messages
    assert eager in compiled
