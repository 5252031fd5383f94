"""Backward hooks, without compiled autograd.

Each builds its module (or function) anew, so that a hook's records belong to one run.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.tracing.row import Rows

row = Rows(5, grad=True, builds=True)


class Doubled(nn.Module):
    """A module without parameters, to hang hooks on."""

    def forward(self, x):
        return x * 2


class Chain(nn.Module):
    """Two linear layers; hooks go on the first, in the middle of the graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def _totals(grads):
    return [None if grad is None else float(grad.sum()) for grad in grads]


@row("module.register_full_backward_hook, observing")
def full_backward_hook(width):
    module, seen = Chain(width), []

    def observe(module, grad_input, grad_output):
        seen.append(
            (type(module).__name__, [tuple(g.shape) for g in grad_input], [tuple(g.shape) for g in grad_output])
        )

    module.first.register_full_backward_hook(observe)
    return module, lambda: seen


@row("module.register_full_backward_hook, values")
def full_backward_hook_values():
    module, seen = nn.Sequential(Doubled(), Doubled()), []

    def observe(module, grad_input, grad_output):
        seen.append((grad_input[0].clone(), grad_output[0].clone()))

    module[0].register_full_backward_hook(observe)
    return module, lambda: seen


@row("module.register_full_backward_hook, changing gradients", inductor=True)
def full_backward_hook_changing(width):
    module = Chain(width)
    module.first.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 10,))
    return module, None


@row("module.register_full_backward_pre_hook, observing")
def full_backward_pre_hook():
    module, seen = nn.Sequential(Doubled(), Doubled()), []

    def observe(module, grad_output):
        seen.append(grad_output[0].clone())

    module[1].register_full_backward_pre_hook(observe)
    return module, lambda: seen


@row("module.register_full_backward_pre_hook, changing gradients", inductor=True)
def full_backward_pre_hook_changing(width):
    module = Chain(width)
    module.first.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 10,))
    return module, None


@row("both module hooks, several of each")
def both_hooks(width):
    module = Chain(width)
    module.first.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] + 1,))
    module.first.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 3,))
    module.first.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] - 2,), prepend=True)
    module.first.register_full_backward_hook(
        lambda module, grad_input, grad_output: (grad_input[0] + grad_output[0].sum(),)
    )
    module.first.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    module.second.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 2,))
    return module, None


@row("hooks on the module that is compiled")
def hooks_on_the_root(width):
    module, seen = Chain(width), []
    module.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 2,))

    def observe(module, grad_input, grad_output):
        seen.append(_totals(grad_output))

    module.register_full_backward_hook(observe)
    return module, lambda: seen


@row("a module hook that all-reduces the gradient", inductor=True)
def hook_with_collective():
    module = nn.Sequential(Doubled(), Doubled())

    def average(module, grad_input, grad_output):
        grad = grad_input[0].clone()
        dist.all_reduce(grad)
        return (grad / dist.get_world_size(),)

    module[1].register_full_backward_hook(average)
    return module, None


@row("module hook of a module with two inputs and outputs")
def several_inputs():
    class Pair(nn.Module):
        def forward(self, a, b):
            return a * 2, a * b

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            one, two = self.pair(x, x * 3)
            return one + two

    module = Outer()
    module.pair.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 5, grad_input[1]))
    return module, None


@row("nn.modules.module.register_module_full_backward_hook")
def global_hook():
    module, seen = nn.Sequential(Doubled()), []

    def function(x):
        return module(x)

    def observe(module, grad_input, grad_output):
        seen.append(type(module).__name__)

    handle = nn.modules.module.register_module_full_backward_hook(observe)

    def look():
        handle.remove()
        return seen

    return function, look


@row("tensor.register_hook in the function, changing", inductor=True)
def tensor_hook():
    def function(x):
        y = x * 2
        y.register_hook(lambda grad: grad * 10)
        return y * 3

    return function, None


@row("tensor.register_hook in the function, observing")
def tensor_hook_observing():
    seen = []

    def observe(grad):
        seen.append(grad.clone())

    def function(x):
        y = x * 2
        y.register_hook(observe)
        return y * 3

    return function, lambda: seen


@row("x.register_hook on an input, in the function")
def input_hook():
    def function(x):
        x.register_hook(lambda grad: grad + 1)
        return x * 3

    return function, None


@row("parameter.register_hook before compiling")
def parameter_hook(width):
    module = Chain(width)
    module.first.weight.register_hook(lambda grad: grad * 10)
    return module, None


@row("handle.remove() in the function")
def removed_hook():
    def function(x):
        y = x * 2
        handle = y.register_hook(lambda grad: grad * 10)
        handle.remove()
        return y * 3

    return function, None


@row("parameter.register_post_accumulate_grad_hook before compiling", inductor=True)
def post_accumulate_hook(width):
    module, seen = Chain(width), []
    for name, param in module.named_parameters():

        def halve(param, name=name):
            seen.append(name)
            param.grad.div_(2)

        param.register_post_accumulate_grad_hook(halve)
    return module, lambda: sorted(seen)


@row("parameter.register_post_accumulate_grad_hook in the function")
def post_accumulate_hook_inside():
    weight, seen = nn.Parameter(torch.ones(1)), []

    def observe(param):
        seen.append(param.grad.clone())

    def function(x):
        weight.register_post_accumulate_grad_hook(observe)
        return x * weight

    return function, lambda: seen


@row("a post-accumulate hook that all-reduces", inductor=True)
def post_accumulate_hook_with_collective(width):
    module = Chain(width)
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(lambda param: dist.all_reduce(param.grad))
    return module, None


@row("forward hooks and forward pre-hooks")
def forward_hooks(width):
    module, seen = Chain(width), []
    module.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    module.first.register_forward_hook(lambda module, args, output: output * 2)
    return module, lambda: seen
