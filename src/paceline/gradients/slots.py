"""The slot of each parameter that is reduced: where its gradient lives, and which wrapper reduces it."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor
from torch.autograd.graph import Node

from paceline import _torch
from paceline.gradients.portion import Portion
from paceline.gradients.roster import Roster


class Slot:
    """A parameter's part of a bucket, and whether its gradient is there already."""

    __slots__ = (
        "accumulator",
        "awaits_stand_in",
        "base",
        "bucket",
        "deferred",
        "filled",
        "immediate",
        "index",
        "late",
        "leaf",
        "name",
        "owned",
        "param",
        "position",
        "saved",
        "steps_in_backward",
        "view",
    )

    def __init__(self, name: str, param: Tensor) -> None:
        self.name = name
        self.leaf = param
        """The parameter as autograd and the user know it."""
        self.param: Tensor | Portion = Portion(param) if _torch.is_dtensor(param) else param
        """What has the gradient: the parameter, or the portion that stands for it if it is distributed."""
        self.index = -1
        """The parameter's number among all parameters of the roster."""
        self.position = -1
        """The parameter's number among those that the plan reduces."""
        self.bucket = -1
        """The number of its bucket; -1 if the plan leaves it out."""
        self.deferred = False
        """Whether the gradient is copied together with others and scaled with the whole bucket."""
        self.immediate = True
        """Whether the gradient is looked at as soon as it is ready, and does not wait for a batch."""
        self.owned = True
        """False while another wrapper of the same parameter is in use and reduces it."""
        self.steps_in_backward = False
        """Whether an optimizer waits for the averaged gradient."""
        self.view: Tensor | None = None
        """The gradient's memory in the bucket."""
        self.accumulator: Node | None = None
        self.base: Tensor | None = None
        """A gradient that must survive unscaled until after the reduction (weighted averaging)."""
        self.forget()

    def forget(self) -> None:
        """Drop what a backward has left."""
        self.filled = False
        """Whether the bucket holds a gradient of this backward."""
        self.awaits_stand_in = False
        """Whether autograd has yet to bring the stand-in of a gradient that was taken ([Note: early gradients])."""
        self.late: Tensor | None = None
        """What came after the bucket had left ([Note: late gradients])."""
        self.saved: Tensor | None = None
        """The gradient of an earlier step, which stays if no rank uses the parameter in this one."""

    @property
    def local(self) -> Tensor:
        """What this rank holds of the parameter."""
        return self.param.local if isinstance(self.param, Portion) else self.param

    def node(self) -> Node:
        """The node in which autograd accumulates the gradient. It is kept, since asking torch for it is slow."""
        if self.accumulator is None:
            self.accumulator = _torch.accumulate_grad_node(self.leaf)
        return self.accumulator

    def hand_out(self, *, used: bool) -> None:
        """Give ``param.grad`` back: the reduced gradient if any rank used the parameter, else what it was before."""
        param, view = self.param, self.view
        if used:
            param.grad = view
            if self.base is not None and view is not None:
                view.add_(self.base)
            if self.steps_in_backward:
                for optimizer in _torch.optimizers_of(self.leaf):
                    optimizer.step()
                param.grad = None
        elif self.saved is not None:
            if view is not None and not self.saved.is_sparse:
                view.copy_(self.saved)
                param.grad = view
            else:
                param.grad = self.saved
        elif self.base is not None:
            param.grad = self.base


class Slots:
    """One slot for each trainable parameter. Several wrappers may share parameters: see ``reduction/ownership.py``."""

    def __init__(self) -> None:
        self.by_id: dict[int, Slot] = {}
        """The slots by the id of their parameter."""
        self.shared = False
        """Whether another wrapper has, or had, some of the same parameters."""

    def follow(self, roster: Roster) -> set[int]:
        """Become the slots of ``roster``'s parameters.

        Returns the ids of parameters that are new here and have a gradient already.
        """
        known, self.by_id = self.by_id, {}
        came_unnoticed: set[int] = set()
        for index, (param, spec) in enumerate(zip(roster.params, roster.specs, strict=True)):
            if spec.requires_grad:
                slot = self.by_id[id(param)] = known.get(id(param)) or Slot(spec.name, param)
                slot.index, slot.name = index, spec.name
                if known and id(param) not in known and param.grad is not None:
                    came_unnoticed.add(id(param))
        for key in known.keys() - self.by_id.keys():
            # An older graph may still bring it a gradient.
            known[key].owned = False
        return came_unnoticed

    def of(self, param: Tensor) -> Slot:
        return self.by_id[id(param)]

    def has(self, param: Tensor) -> bool:
        return id(param) in self.by_id

    def owns(self, param: Tensor) -> bool:
        """Whether the parameter is reduced here, and not by another wrapper."""
        slot = self.by_id.get(id(param))
        return slot is not None and slot.owned

    # -- several wrappers ----------------------------------------------------------------------------

    def leave(self, param_ids: Set[int]) -> None:
        """Leave these parameters to another wrapper."""
        for key in self.by_id.keys() & param_ids:
            self.by_id[key].owned = False
