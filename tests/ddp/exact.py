"""Modules whose gradients are small multiples of a power of two, so that tests can ask for exact numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def line() -> nn.Module:
    """A module whose gradient is its input: rank r has r + 1, and the mean of two ranks is 1.5."""
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False)


class Sum(nn.Module):
    """``a(x) + b(x) + c(x)``, with b only if asked for."""

    def __init__(self, frozen: str = "") -> None:
        super().__init__()
        self.a, self.b, self.c = line(), line(), line()
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor, with_b: bool = True) -> Any:
        return self.a(x) + (self.b(x) if with_b else 0) + self.c(x)


def inputs_of(rank: int) -> Tensor:
    """The input of ``rank``."""
    return torch.full((1, 3), rank + 1.0)


def step(ddp: nn.Module, rank: int, *args: Any) -> None:
    ddp(inputs_of(rank), *args).sum().backward()


def assert_grad(module: nn.Module, value: float) -> None:
    (param,) = module.parameters()
    assert param.grad is not None
    assert param.grad.tolist() == [[value] * 3]
