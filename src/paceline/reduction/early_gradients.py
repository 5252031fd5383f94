"""Gradients that a compiled backward hands over while it runs, and what stands for them in its graph.

[Note: early gradients]
A compiled backward is one node to autograd, which hands out all of its gradients when it has ended. So the graph
itself hands them over as soon as they exist (``paceline.compiler``): they are absorbed into their buckets, and the
graph goes on with a *stand-in*, zeros that need no memory of their own. Nobody uses the gradient any more, so that the
next one can be computed in its memory.

When the graph has ended, autograd brings the stand-in to the parameter, where it is dropped. Since it is zero, it is
right whatever autograd does with it: a contribution from elsewhere in the same backward, such as a penalty on weights,
comes out of the sum as it is, and counts as one more gradient.

Nothing is taken where somebody else is to see the gradient; the graph then goes on with a copy. That is so with
``create_graph=True``, with ``autograd.grad`` or ``backward(inputs=...)`` without the parameter, and for a parameter
that has hooks of the user or of another library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline import _torch
from paceline.gradients.slots import Slot
from paceline.reduction.gradient_hooks import hears_alone

Strides = Sequence[int]


class Early(NamedTuple):
    """A gradient that a compiled backward hands over."""

    param: Tensor
    grad: Tensor
    strides: Strides
    """The parameter's strides, which the tensor that the graph goes on with is to have."""

    def copy(self) -> Tensor:
        """What the graph goes on with if the gradient is not taken."""
        return in_layout(self.grad, self.strides)


def in_layout(grad: Tensor, strides: Strides) -> Tensor:
    """A copy of ``grad`` with these strides."""
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


class StandIns:
    """Zeros of any shape, all in the same memory: as much as the largest of them needs."""

    def __init__(self) -> None:
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, early: Early) -> Tensor:
        """Zeros for one gradient, a new tensor each time, which autograd makes ``param.grad`` without a copy."""
        grad = early.grad
        key = grad.dtype, grad.device
        zeros = self._zeros.get(key)
        if zeros is None or zeros.numel() < grad.numel():
            zeros = self._zeros[key] = torch.zeros(grad.numel(), dtype=grad.dtype, device=grad.device)
        return zeros.as_strided(grad.shape, early.strides)

    def is_one(self, tensor: Tensor) -> bool:
        zeros = self._zeros.get((tensor.dtype, tensor.device))
        return zeros is not None and zeros.data_ptr() == tensor.data_ptr()

    def drop(self, slot: Slot, *, syncing: bool) -> bool:
        """Drop the stand-in that autograd has brought, unless more came with it. Return whether more came."""
        slot.awaits_stand_in = False
        grad = slot.param.grad
        # The stand-ins of several forwards are added up in new memory, which must be looked at: zeros are dropped, too.
        if grad is not None and not self.is_one(grad) and bool(grad.any()):
            return True
        if syncing:
            slot.param.grad = None
        else:
            # Nothing more will happen to the gradient in this backward: it accumulates in its bucket.
            slot.param.grad = slot.view
            slot.filled = False
        return False


def can_be_taken(slot: Slot) -> bool:
    """Whether the reducer alone is to see this gradient."""
    param = slot.leaf
    if not slot.owned or slot.view is None or _torch.has_tensor_hooks(param):
        return False
    # Our hook must be there, because it drops the stand-in. And the gradient must be accumulated, which it need not be
    # in autograd.grad() and backward(inputs=...).
    return hears_alone(param) and _torch.will_execute(slot.node())


def give_back(slots: Sequence[Slot]) -> None:
    """Give back what had been accumulated before a backward without synchronisation that has failed."""
    for slot in slots:
        if slot.awaits_stand_in:
            slot.param.grad = slot.view
