"""Faults that follow a script: one rank fails, at one step, in one phase.

::

    fault = fail_at(rank=1, step=2, phase="backward")
    model = nn.Sequential(nn.Linear(4, 4), fault.layer(), nn.Linear(4, 1))
    ...
    with pytest.raises(InjectedFaultError):   # on rank 1, in the third step
        model(x).sum().backward()
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Phase = Literal["loader", "forward", "backward", "comm_hook", "optimizer"]
Action = Literal["raise", "exit", "kill", "stop", "hold_lock"]

_EXIT_CODE = 17


class InjectedFaultError(RuntimeError):
    """The error that a fault raises. Nothing else raises it, so a test knows that it saw its own fault."""


@dataclass(frozen=True)
class Fault:
    """Where and how to fail. Made by :func:`fail_at`."""

    rank: int
    # Steps count from 0. A step is a call of the layer's forward or backward; for a comm hook it is a round of all
    # buckets.
    step: int
    phase: Phase
    # "exit" and "kill" end the process without a word, as a crash or an out-of-memory kill does. "stop" is SIGSTOP.
    # "hold_lock" stays in C for ever and keeps the interpreter lock.
    action: Action = "raise"

    def layer(self) -> nn.Module:
        """An identity layer that fails in its forward or backward; harmless for other phases."""
        return _FaultLayer(self)

    def hook(self, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A comm hook that does what ``inner`` does until it is time to fail."""
        step = 0

        def failing_hook(state: Any, bucket: Any) -> Any:
            nonlocal step
            now = step
            step += bool(bucket.is_last())
            self.strike("comm_hook", now)
            return inner(state, bucket)

        return failing_hook

    def optimizer_hook(self) -> Callable[..., None]:
        """A hook for ``optimizer.register_step_pre_hook`` that fails when the optimizer is about to step."""
        step = 0

        def failing_step(*_: object) -> None:
            nonlocal step
            now, step = step, step + 1
            self.strike("optimizer", now)

        return failing_step

    def strike(self, phase: Phase, step: int) -> None:
        """Fail if this is the phase, the step and the rank."""
        if (phase, step, dist.get_rank()) != (self.phase, self.step, self.rank):
            return
        match self.action:
            case "exit":
                os._exit(_EXIT_CODE)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hold_lock":
                # This reads from a pipe that nobody writes to, and a signal does not end the read.
                ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        raise InjectedFaultError(f"injected: rank {self.rank}, step {self.step}, {self.phase}")


def fail_at(*, rank: int, step: int = 0, phase: Phase = "backward", action: Action = "raise") -> Fault:
    """A fault of ``rank`` (of the default group) at ``step`` in ``phase``."""
    return Fault(rank=rank, step=step, phase=phase, action=action)


class _FaultLayer(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault
        self._forwards = 0
        self._backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        step = self._forwards
        self._forwards += 1
        self._fault.strike("forward", step)
        passed: Tensor = _StrikeInBackward.apply(x, self)
        return passed

    def in_backward(self) -> None:
        step = self._backwards
        self._backwards += 1
        self._fault.strike("backward", step)


class _StrikeInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _FaultLayer) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.layer.in_backward()
        return grad, None
