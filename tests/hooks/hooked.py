"""A small module, and a comm hook around it."""

from __future__ import annotations

from torch import nn

from tests.reference import DDP, batch


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def square(model, rank, i):
    model(batch(rank, i)).square().mean().backward()


def hooked(hook, state=None, **options):
    """Make a function that wraps a module and registers ``hook``."""

    def wrap(model):
        ddp = DDP(model, **options)
        ddp.register_comm_hook(state, hook)
        return ddp

    return wrap
