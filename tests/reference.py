"""The class under test, and the single-process reference that its gradients are compared with.

``PACELINE_TEST_DDP=torch`` runs the tests against torch's own class: that is how a test whose behaviour torch
shares is known to be a good test. Tests of what torch gets wrong are marked ``ours_only``; with
``PACELINE_TEST_ALL=1`` they run too, and can be seen to fail.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

# torch's own optimizers for hooks use its deprecated torch.jit.script; here, so that it happens once.
with warnings.catch_warnings():
    for kind in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", kind)
    import torch.distributed.optim

STOCK = os.environ.get("PACELINE_TEST_DDP") == "torch"

if STOCK:
    from torch.nn.parallel import DistributedDataParallel as DDP
else:
    from paceline import DistributedDataParallel as DDP

ours_only = pytest.mark.skipif(
    STOCK and not os.environ.get("PACELINE_TEST_ALL"), reason="torch's class is wrong, hangs or has no such thing here"
)

# float64 throughout: what differs then is the algorithm, not the rounding.
_RTOL, _ATOL = 1e-11, 1e-12

Step = Callable[[nn.Module, int, int], Any]


def batch(rank: int, step: int = 0, *shape: int) -> torch.Tensor:
    """Rank and step decide the numbers, so that the reference can make any rank's batch."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(*(shape or (3, 4)), generator=generator, dtype=torch.float64)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """``no_sync`` of a wrapper; nothing for the reference, which has nobody to sync with."""
    return model.no_sync() if isinstance(model, DDP) else contextlib.nullcontext()


def mlp() -> nn.Sequential:
    """A small model that takes a ``batch``."""
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def square(model: nn.Module, rank: int, i: int = 0) -> None:
    """A step whose loss is the mean of squares."""
    model(batch(rank, i)).square().mean().backward()


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be in parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Branches(nn.Module):
    """Three layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[way](x)


def grads_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients by the name the inner module knows them by."""
    inner = module.module if isinstance(module, DDP) else module
    return {
        name: None if p.grad is None else (p.grad.detach().to_dense().clone()) for name, p in inner.named_parameters()
    }


def mean_over_ranks(
    model: nn.Module, run: Callable[[nn.Module, int], Any], world_size: int
) -> dict[str, torch.Tensor | None]:
    """What averaging should give: each rank's work in turn on ``model``; None only if None everywhere."""
    per_rank = []
    for rank in range(world_size):
        for p in model.parameters():
            p.grad = None
        run(model, rank)
        per_rank.append(grads_of(model))
    means: dict[str, torch.Tensor | None] = {}
    for name in per_rank[0]:
        present = [grads[name] for grads in per_rank if grads[name] is not None]
        means[name] = sum(present[1:], present[0]) / world_size if present else None
    return means


def assert_grads(
    module: nn.Module,
    expected: dict[str, torch.Tensor | None],
    when: object = "",
    *,
    zero_is_none: bool = False,
) -> None:
    """``zero_is_none``: after ``zero_grad(set_to_none=False)`` an unused gradient stays the zero it was."""
    actual = grads_of(module)
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        if want is None:
            if zero_is_none and got is not None and not got.any():
                continue
            assert got is None, f"{when}: {name} should have no gradient, has {got}"
            continue
        assert got is not None, f"{when}: {name} has no gradient"
        torch.testing.assert_close(
            got,
            want,
            rtol=_RTOL,
            atol=_ATOL,
            msg=lambda text, name=name: f"{when}: gradient of {name}: {text}",
        )


def assert_in_sync(module: nn.Module, *, grads: bool = True, group: dist.ProcessGroup | None = None) -> None:
    """Parameters and gradients are the same, to the bit, on every rank of the group (of two or more, with rank 0)."""
    for name, p in module.named_parameters():
        tensors = [p.detach()] + ([p.grad.detach().to_dense()] if grads and p.grad is not None else [])
        for tensor in tensors:
            mine = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            mine = mine.contiguous()
            theirs = mine.clone()
            dist.broadcast(theirs, src=0, group=group)
            assert torch.equal(mine, theirs), f"{name} differs from rank 0"


def compare_with_reference(
    rank: int,
    world_size: int,
    make_model: Callable[[], nn.Module],
    step: Step,
    *,
    steps: int = 3,
    set_to_none: bool = True,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    lr: float = 0.1,
    **ddp_options: Any,
) -> nn.Module:
    """Train with the class and with the single-process reference; gradients must agree at every step.

    ``step(model, rank, i)`` does forward and backward of rank ``rank`` at step ``i``; it is called with the
    wrapper for this rank, and with the bare model for all ranks in turn. Returns the wrapper.
    """
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    reference = make_model()
    # A different start on each rank: only the broadcast from rank 0 makes it equal to the reference.
    torch.manual_seed(7 + rank)
    model = make_model()
    ddp = wrap(model) if wrap is not None else DDP(model, **ddp_options)
    inner = ddp.module if isinstance(ddp, DDP) else ddp
    for i in range(steps):
        expected = mean_over_ranks(reference, lambda m, r, i=i: step(m, r, i), world_size)
        step(ddp, rank, i)
        assert_grads(ddp, expected, f"step {i}", zero_is_none=not set_to_none)
        assert_in_sync(inner)
        with torch.no_grad():
            for p, q in zip(inner.parameters(), reference.parameters(), strict=True):
                q.grad = None
                want = expected[next(n for n, x in reference.named_parameters() if x is q)]
                if want is not None:
                    q.sub_(want, alpha=lr)
                    p.sub_(p.grad.to_dense(), alpha=lr)
        ddp.zero_grad(set_to_none=set_to_none)
        if not set_to_none:
            # What was None stays None and what was a gradient is zero.
            assert all(p.grad is None or not p.grad.to_dense().any() for p in inner.parameters())
    return ddp
