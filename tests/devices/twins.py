"""Two wrappers of one model, on the sim device and on the CPU: whatever they do, they must do alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline import DDP
from tests.devices import sim, simccl


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


class Twins:
    """A step runs on both, with the same inputs. They are compared at the end, because the host waits for that."""

    def __init__(self, make: Callable[[], nn.Module] = make_model, **options: Any) -> None:
        options = {"bucket_cap_mb": 0.01} | options
        self.group = simccl.join()
        self.on_cpu = DDP(make(), **options)
        self.on_sim = DDP(make().to(sim.DEVICE), process_group=self.group, **options)
        self.kept: list[tuple[list[Tensor | None], list[Tensor | None]]] = []
        """The gradients of each step."""

    @property
    def both(self) -> list[tuple[DDP, str]]:
        return [(self.on_cpu, "cpu"), (self.on_sim, sim.DEVICE)]

    def run(self, step: Callable[[Any, Any], None], inputs: list[Tensor]) -> None:
        """Call ``step(wrapper, input)`` for each input on both; the host must not wait for the device meanwhile."""
        given = [batch.detach().to(sim.DEVICE).requires_grad_(batch.requires_grad) for batch in inputs]
        sim.kernels_take(1e-3)
        for on_cpu, on_sim in zip(inputs, given, strict=True):
            step(self.on_cpu, on_cpu)
            with no_sync_of_host():
                step(self.on_sim, on_sim)
                kept = [None if p.grad is None else p.grad.clone() for p in self.on_sim.parameters()]
            self.kept.append(([None if p.grad is None else p.grad.clone() for p in self.on_cpu.parameters()], kept))

    def check(self) -> None:
        assert self.group.timed_waits == 0
        for expected, grads in self.kept:
            on_cpu = [None if grad is None else grad.cpu() for grad in grads]
            assert [grad is None for grad in on_cpu] == [grad is None for grad in expected]
            torch.testing.assert_close(on_cpu, expected)
        ours, theirs = self.on_sim.state_dict(), self.on_cpu.state_dict()
        torch.testing.assert_close({name: tensor.cpu() for name, tensor in ours.items()}, dict(theirs))


@contextlib.contextmanager
def no_sync_of_host() -> Iterator[None]:
    """Fail if the host waits for the device inside."""
    before = sim.host_syncs()
    yield
    assert sim.host_syncs() == before, f"the host waited for the device: {sim.last_sync()}"


def backward(wrapper: Any, batch: Tensor) -> None:
    """The plainest step."""
    wrapper.zero_grad()
    wrapper(batch).pow(2).mean().backward()
