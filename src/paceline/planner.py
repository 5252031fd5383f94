"""The plan in force: which parameters it is for, what steps have shown of them, and when it is made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from paceline.courier import Courier
from paceline.errors import StateError
from paceline.layout import Layout
from paceline.ledger import Ledger
from paceline.plan import BucketPlan, arranged, make_plan
from paceline.roster import SPEC_FIELDS, Roster
from paceline.slots import Slots
from paceline.status import Status
from paceline.step import ReducerOptions, Step


class Planner:
    """Makes the plan from a roster, and again from what the first synchronised backward shows.

    ``reread`` gives the module's parameters as they are now.
    """

    def __init__(
        self, roster: Roster, *, courier: Courier, options: ReducerOptions, reread: Callable[[], Roster]
    ) -> None:
        self.options = options
        self.reread = reread
        self.slots = Slots()
        self.roster: Roster
        self.layout: Layout
        self.first_plan: BucketPlan
        """The one before anything was known of the order of gradients."""
        self.has_rebuilt = False
        self.known_orders: dict[frozenset[int], list[int]] = {}
        """Of graphs that bring all gradients at once: the order in which they compute them, as indices."""
        self._courier = courier
        self._left_out: frozenset[int] = frozenset()
        self._order_seen: list[int] | None = None
        self._is_first = True
        self._adopt(roster, used=set())

    # -- other parameters ----------------------------------------------------------------------------

    def adopt(self, roster: Roster) -> None:
        """Take ``roster``'s parameters as the ones to reduce."""
        self._adopt(roster, used=self.layout.used_ids())

    def _adopt(self, roster: Roster, *, used: set[int]) -> None:
        self.roster = roster
        came_unnoticed = self.slots.follow(roster)
        # Whatever was learnt of other parameters does not hold for these.
        self._left_out, self._order_seen, self._is_first = frozenset(), None, True
        self.known_orders.clear()
        self.first_plan = make_plan(roster.specs, caps_bytes=self.options.caps_bytes)
        self._use(self.first_plan, used=used | came_unnoticed)

    def _use(self, plan: BucketPlan, *, used: set[int], known: Ledger | None = None) -> None:
        """Put ``plan`` into force; storage comes with the next backward that needs it.

        ``used`` holds the ids of parameters that got a gradient since the last synchronisation; ``known`` is the
        ledger of a plan for the same parameters.
        """
        self.layout = Layout(
            plan,
            self.slots.by_id,
            n_ranks=self._courier.size,
            copy_in_batches=self.options.copy_in_batches,
            ledger=known,
        )
        self.layout.mark_used(used)

    def agree_on_change(self, *, step: int) -> Roster:
        """The module's parameters have changed since the plan was made: what all ranks agree they are now."""
        newer = self.reread()
        reason = self.roster.difference(newer)
        if not any(spec.requires_grad for spec in newer.specs):
            raise StateError(f"No trainable parameter is left ({reason}); there is nothing to synchronise.")
        channel = self._courier.channel
        channel.announce_replan(reason, step=step)
        # It is for the caller to adopt it: if ranks differ, the change is still there for the next backward to notice.
        channel.compare("parameters after a change", newer.rows(), SPEC_FIELDS)
        return newer

    def promise_static_graph(self) -> None:
        self.options = replace(self.options, static_graph=True, rebuild=True)

    # -- what steps show -----------------------------------------------------------------------------

    @property
    def observes(self) -> bool:
        """Whether the next synchronised backward is the first one of these parameters."""
        return self._is_first

    @property
    def is_provisional(self) -> bool:
        """Whether the buckets are to be made anew once the first backward has been seen."""
        return self._is_first and self.options.rebuild

    def learn(self, step: Step, status: Status) -> None:
        """Remember what a backward showed: how often gradients come, in which order, which are unused."""
        first, self._is_first = self._is_first, False
        ledger, options = self.layout.ledger, self.options
        ledger.learn(
            step.fires if step.telling else ledger.expected,
            status.used,
            first=first and options.rebuild and step.telling,
            static_graph=options.static_graph and step.telling,
            broken=bool(status.complaints),
        )
        if first and options.rebuild:
            # Put to use in the next backward: the first one is slow enough.
            self._order_seen = step.order
        if first and options.skip_unused:
            self._leave_out(status)

    def rebuild_if_due(self) -> None:
        """Make the plan anew in the order in which rank 0's gradients became ready in the first backward."""
        if self._order_seen is None:
            return
        order = arranged(self.layout.ledger.observe(self._order_seen), self.known_orders.values())
        self._order_seen = None
        if self._courier.size > 1:
            order = self._order_of_rank_0(order)
        self.has_rebuilt = True
        old = self.layout.plan
        plan = make_plan(old.specs, caps_bytes=self.options.caps_bytes, order=order, leave_out=self._left_out)
        if plan.buckets != old.buckets:
            self._use(plan, used=self.layout.used_ids(), known=self.layout.ledger)

    def _order_of_rank_0(self, order: list[int]) -> list[int]:
        courier = self._courier
        device = courier.status_device(self.layout.slots[0].local.device)
        shared = torch.tensor(order, dtype=torch.int64, device=device)
        courier.channel.progress.start("broadcast", "the order of buckets", shared)
        work = dist.broadcast(shared, group_src=0, group=courier.group, async_op=True)
        assert work is not None
        courier.channel.wait(work, "the broadcast of the order of buckets")
        return shared.tolist()

    def _leave_out(self, status: Status) -> None:
        """``skip_all_reduce_unused_params``: what no rank used is not sent any more."""
        layout = self.layout
        unused = frozenset(slot.index for slot, n in zip(layout.slots, status.used, strict=True) if not n)
        if unused and len(unused) < len(layout.slots):
            self._left_out, self._order_seen = unused, None
            order = [i for i in layout.plan.order if i not in unused]
            plan = make_plan(layout.plan.specs, caps_bytes=self.options.caps_bytes, order=order, leave_out=unused)
            self._use(plan, used=layout.used_ids())
