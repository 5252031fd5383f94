"""Gradients that a compiled backward hands over while it runs.

[Note: early gradients]
A compiled backward is one node to autograd, which hands out all of its gradients when it has ended. So the graph
itself hands them over as soon as they exist (``paceline.compiler``): they are absorbed into their buckets, and what
the graph goes on with is a *stand-in*, zeros that cost no memory of their own. The gradient is then used by nobody
any more, and the next one is computed in its place.

Autograd brings the stand-in to the parameter when the graph has ended, where it is dropped. Since it is zero, it is
right whatever autograd does with it: a contribution from elsewhere in the same backward, a penalty on weights say,
comes out of the sum as it is, and counts as one more gradient.

Who is to see the gradient itself still does: with ``create_graph=True``, ``autograd.grad`` or ``backward(inputs=...)``
without the parameter, for a parameter with hooks of the user's or of another wrapper, nothing is taken, and the graph
goes on with a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline import _torch
from paceline.bucket import Slot
from paceline.step import Step

Strides = Sequence[int]
INBOX = "paceline.inbox"


class Early(NamedTuple):
    """What a compiled backward hands over."""

    param: Tensor
    grad: Tensor
    strides: Strides
    """Those of the parameter: what goes on is to be laid out like it."""

    def copy(self) -> Tensor:
        """What goes on where nothing is taken."""
        return in_layout(self.grad, self.strides)


def in_layout(grad: Tensor, strides: Strides) -> Tensor:
    """A copy of ``grad`` with these strides."""
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


class StandIns:
    """Zeros of any shape, all in one memory: as much as the largest of them needs."""

    def __init__(self) -> None:
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, early: Early) -> Tensor:
        """Zeros for one gradient, a new tensor each time: autograd makes it ``param.grad`` without a copy."""
        grad = early.grad
        key = grad.dtype, grad.device
        zeros = self._zeros.get(key)
        if zeros is None or zeros.numel() < grad.numel():
            zeros = self._zeros[key] = torch.zeros(grad.numel(), dtype=grad.dtype, device=grad.device)
        return zeros.as_strided(grad.shape, early.strides)

    def is_one(self, tensor: Tensor) -> bool:
        zeros = self._zeros.get((tensor.dtype, tensor.device))
        return zeros is not None and zeros.data_ptr() == tensor.data_ptr()


def can_be_taken(slot: Slot) -> bool:
    """Whether nobody but the reducer is to see this gradient."""
    param = slot.leaf
    if not slot.owned or slot.view is None or _torch.has_tensor_hooks(param):
        return False
    hooks = _torch.post_accumulate_hooks(param)
    # Ours drops the stand-in; it must be there, and without company.
    if not hooks:
        return False
    for hook in hooks:
        if getattr(hook, "__module__", "") != INBOX:
            return False
    # Of autograd.grad() and backward(inputs=...) not all that is computed is accumulated.
    return _torch.will_execute(slot.node())


def take(come: Sequence[tuple[Slot, Early]], step: Step, used: list[float], stand_ins: StandIns) -> list[Tensor]:
    """Absorb what has come early; give, for each, what the graph goes on with.

    ``used`` is by place, as in :class:`~paceline.ledger.Ledger`.
    """
    going_on: list[Tensor] = []
    views: list[Tensor] = []
    grads: list[Tensor] = []
    for slot, early in come:
        if not can_be_taken(slot):
            going_on.append(early.copy())
            continue
        going_on.append(stand_ins.like(early))
        grad, place, number = early.grad, slot.place, slot.bucket
        slot.awaits_stand_in = True
        used[place] = 1.0
        step.fires[place] += 1
        if step.syncing and number < step.next_bucket:
            slot.late = grad.clone() if slot.late is None else slot.late + grad
            step.late.add(number)
            continue
        if slot.deferred and not slot.filled and slot.param.grad is None:
            assert slot.view is not None
            views.append(slot.view)
            grads.append(grad)
            slot.filled = True
        elif slot.deferred or not step.syncing:
            slot.absorb_early(grad, 1.0)
        else:
            slot.absorb_early(grad, step.scale, step.factor)
        if step.observing:
            step.order.append(place)
        if step.syncing:
            step.left[place] -= 1
            if step.left[place] == 0:
                step.bucket_left[number] -= 1
    if views:
        _torch.copy_each(views, grads)
    return going_on


def brings_more(slot: Slot, step: Step, stand_ins: StandIns) -> bool:
    """Autograd has brought a stand-in, which is dropped. Whether there is something else with it, which stays."""
    slot.awaits_stand_in = False
    grad = slot.param.grad
    # Several stand-ins, of several forwards, are added up in new memory.
    if grad is not None and not stand_ins.is_one(grad) and bool(grad.any()):
        return True
    if step.syncing:
        slot.param.grad = None
    else:
        # Nothing more will happen to it in this backward: this is where it accumulates.
        slot.param.grad = slot.view
        slot.filled = False
    return False


def give_back(slots: Sequence[Slot]) -> None:
    """A backward without synchronisation came to nothing: what was accumulated before is not to be lost with it."""
    for slot in slots:
        if slot.awaits_stand_in:
            slot.param.grad = slot.view
