"""The slots of the parameters that are reduced, and which of them are this wrapper's to reduce."""

from __future__ import annotations

from torch import Tensor

from paceline.bucket import Slot
from paceline.roster import Roster


class Slots:
    """One for each trainable parameter. Several wrappers may have some of the same parameters: see ``ownership``."""

    def __init__(self) -> None:
        self.by_id: dict[int, Slot] = {}
        """By the id of the parameter."""
        self.shared = False
        """Another wrapper has, or had, some of the same parameters."""

    def follow(self, roster: Roster) -> set[int]:
        """Be those of ``roster``'s parameters; the ids of the new ones among them that have a gradient already."""
        known, self.by_id = self.by_id, {}
        came_unnoticed: set[int] = set()
        for index, (param, spec) in enumerate(zip(roster.params, roster.specs, strict=True)):
            if spec.requires_grad:
                slot = self.by_id[id(param)] = known.get(id(param)) or Slot(spec.name, param)
                slot.index, slot.name = index, spec.name
                if known and id(param) not in known and param.grad is not None:
                    came_unnoticed.add(id(param))
        for key in known.keys() - self.by_id.keys():
            # A graph made before may still bring it a gradient.
            known[key].owned = False
        return came_unnoticed

    def of(self, param: Tensor) -> Slot:
        return self.by_id[id(param)]

    def has(self, param: Tensor) -> bool:
        return id(param) in self.by_id

    def owns(self, param: Tensor) -> bool:
        """Whether it is reduced here, and not by another wrapper of the same parameter."""
        slot = self.by_id.get(id(param))
        return slot is not None and slot.owned

    # -- several wrappers ----------------------------------------------------------------------------

    def yield_to(self, other: Slots) -> None:
        """Leave the parameters that ``other`` has, too, to it."""
        both = self.by_id.keys() & other.by_id.keys()
        if both:
            self.shared = other.shared = True
            for key in both:
                self.by_id[key].owned = False
                other.by_id[key].owned = True

    def owned_ids(self) -> set[int]:
        return {key for key, slot in self.by_id.items() if slot.owned}

    def own_all_but(self, taken: set[int]) -> set[int]:
        """Take what nobody has: the ids of those parameters."""
        free = self.by_id.keys() - taken
        for key in free:
            self.by_id[key].owned = True
        return free
