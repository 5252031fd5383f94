"""The models of the programs, and the numbers that go into them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_checkpointed

from .program import Fault

LR = 0.1


class UserFaultError(RuntimeError):
    """The exception that a program raises on purpose."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise UserFaultError("raised in backward, on purpose")


class LinearNet(nn.Module):
    """Linear layers, of which a call uses some."""

    def __init__(self, layers: int, width: int, *, first: nn.Module | None = None) -> None:
        super().__init__()
        self.width = width
        made = [nn.Linear(width, width, dtype=torch.float64) for _ in range(layers)]
        self.layers = nn.ModuleList([first, *made[1:]] if first is not None else made)

    def forward(self, x: Tensor, use: Sequence[int] | None, checkpoint: str, fault: Fault | None) -> Tensor:
        used = range(len(self.layers)) if use is None else [each for each in use if each < len(self.layers)]
        for place, layer in enumerate(used):
            if fault is not None and fault.place % len(used) == place:
                if fault.phase == "forward":
                    raise UserFaultError("raised in forward, on purpose")
                x = raising(x)
            x = self._call(self.layers[layer], x, checkpoint)
        return x

    def _call(self, layer: nn.Module, x: Tensor, checkpoint: str) -> Tensor:
        def activated(value: Tensor) -> Tensor:
            return torch.tanh(layer(value))

        if not checkpoint:
            return activated(x)
        return run_checkpointed(activated, x, use_reentrant=checkpoint == "reentrant")


def raising(x: Tensor) -> Tensor:
    """The same numbers; their backward raises."""
    # A node that needs no gradient would not run.
    return _Raises.apply(x if x.requires_grad else x.detach().requires_grad_())


def numbers(*key: object, shape: tuple[int, ...]) -> Tensor:
    """Random numbers that the key decides, in every process alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def fill(module: nn.Module, *key: object) -> None:
    """Give all parameters values that the key decides."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(numbers(*key, name, shape=tuple(param.shape)) * 0.7)


def scale(grad: Tensor) -> Tensor:
    """A tensor hook."""
    return grad * 1.5


def scale_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook."""
    return output * 0.9


def scale_grad_input(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    """A full backward hook."""
    return tuple(None if grad is None else grad * 1.25 for grad in grad_input)


def look(param: Tensor) -> None:
    """A post-accumulate-grad hook that changes nothing."""


def halve(param: Tensor) -> None:
    """A post-accumulate-grad hook that changes the gradient, as one that clips does."""
    if param.grad is not None:  # another hook may have stepped, and thrown it away
        param.grad.mul_(0.5)


def step_now(param: Tensor) -> None:
    """A post-accumulate-grad hook that steps, as in torch's tutorial on optimizers in backward."""
    if param.grad is not None:  # another hook may have stepped before
        with torch.no_grad():
            param.sub_(param.grad, alpha=LR)
        param.grad = None


PostHook = Callable[[Tensor], None]
POST_HOOKS: dict[str, PostHook] = {"post_look": look, "post_scale": halve, "post_step": step_now}
