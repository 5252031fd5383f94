"""The plan in force: which parameters it is for, what backwards have shown of them, and when it is made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.control import replicas
from paceline.control.digest import digest
from paceline.control.replicas import Held
from paceline.errors import DisagreementError, ReplicaMismatchError, StateError
from paceline.gradients.layout import Layout
from paceline.gradients.ledger import Ledger
from paceline.gradients.plan import BucketPlan, arranged, make_plan
from paceline.gradients.roster import SPEC_FIELDS, Roster
from paceline.gradients.slots import Slots
from paceline.gradients.status import Status
from paceline.reduction.backward import Backward
from paceline.reduction.exchange import Exchange


@dataclass(frozen=True)
class ReducerOptions:
    """What the user promised and asked for in the constructor of the wrapper."""

    caps_bytes: tuple[int, ...] | None = None
    """The capacities of the buckets; None for those that suit the module."""
    static_graph: bool = False
    """Every backward uses the same parameters. This is checked."""
    skip_unused: bool = False
    """Parameters that no rank used in the first step are never used, and are not reduced. This is checked."""
    rebuild: bool = True
    """Put the buckets into the order in which gradients were ready in the first step."""
    stable_storage: bool = False
    """The user promised not to keep gradients over a step (``gradient_as_bucket_view=True``)."""
    copy_in_batches: bool = False
    """Copy large gradients, too, in batches instead of as they come."""


class Planner:
    """Makes the plan from a roster, and again from what the first synchronised backward shows.

    ``reread`` gives the module's parameters as they are now.
    """

    def __init__(
        self, roster: Roster, *, exchange: Exchange, options: ReducerOptions, reread: Callable[[], Roster]
    ) -> None:
        self.options = options
        self.reread = reread
        self.slots = Slots()
        self.roster: Roster
        self.layout: Layout
        self.first_plan: BucketPlan
        """The plan that was made before anything was known about the order of gradients."""
        self.has_rebuilt = False
        self.known_orders: dict[frozenset[int], list[int]] = {}
        """For each graph that brings all its gradients at once: the order in which it computes them, as indices."""
        self._exchange = exchange
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
        # What was learnt of other parameters does not hold for these.
        self._left_out, self._order_seen, self._is_first = frozenset(), None, True
        self.known_orders.clear()
        self.first_plan = make_plan(roster.specs, caps_bytes=self.options.caps_bytes)
        self._use(self.first_plan, used=used | came_unnoticed)

    def _use(self, plan: BucketPlan, *, used: set[int], known: Ledger | None = None) -> None:
        """Put ``plan`` into force. Storage comes with the next backward that needs it.

        ``used`` holds the ids of parameters that got a gradient since the last synchronisation. ``known`` is the ledger
        of a plan for the same parameters.
        """
        self.layout = Layout(
            plan,
            self.slots.by_id,
            n_ranks=self._exchange.size,
            wrapper=self._exchange.channel.progress.wrapper,
            copy_in_batches=self.options.copy_in_batches,
            ledger=known,
        )
        self.layout.mark_used(used)

    def agree_on_change(self, *, step: int) -> Roster:
        """Return the parameters as they are now, after a change, once all ranks agree on them."""
        newer = self.reread()
        reason = self.roster.difference(newer)
        if not any(spec.requires_grad for spec in newer.specs):
            raise StateError(f"No trainable parameter is left ({reason}); there is nothing to synchronise.")
        channel = self._exchange.channel
        channel.announce_replan(reason, step=step)
        # The caller adopts it. If ranks differ, nothing is adopted, and the next backward notices the change again.
        channel.compare("parameters after a change", newer.rows(), SPEC_FIELDS)
        self._compare_values(newer)
        return newer

    def _compare_values(self, newer: Roster) -> None:
        """Raise on all ranks if parameters that have come since the module was wrapped differ between ranks."""
        known = self.roster.has_kept()
        pairs = zip(newer.specs, newer.params, strict=True)
        new = {Held("parameter", spec.name): digest(param) for spec, param in pairs if id(param) not in known}
        # A rank may have replaced a parameter that another rank has kept.
        self._exchange.channel.compare("new parameters", [[held.name] for held in new], ["name"])
        digests = torch.stack([value.cpu() for value in new.values()]) if new else torch.empty(0)
        found = replicas.compare(self._exchange.channel, list(new), digests)
        if found is not None:
            raise ReplicaMismatchError(
                f"Parameters that were added or replaced after wrapping have different values: {found}. Give them the "
                "same values on every rank, for example with torch.manual_seed(), or add them before the module is "
                "wrapped, which gives all ranks those of rank 0."
            )

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

    def learn(self, backward: Backward, status: Status) -> None:
        """Remember what a backward showed: how often gradients come, in which order, and which are unused."""
        first, self._is_first = self._is_first, False
        ledger, options = self.layout.ledger, self.options
        countdown, representative = backward.countdown, backward.representative
        ledger.learn(
            countdown.arrivals if representative else ledger.expected,
            status.used,
            first=first and options.rebuild and representative,
            static_graph=options.static_graph and representative,
            broken=bool(status.complaints),
        )
        if first and options.rebuild:
            # The next backward puts the order to use, because the first one is slow enough already.
            self._order_seen = countdown.order
        if first and options.skip_unused:
            self._leave_out(status)

    def rebuild_if_due(self) -> None:
        """Make the plan anew in the order in which rank 0's gradients became ready in the first backward."""
        if self._order_seen is None:
            return
        order = arranged(self.layout.ledger.observe(self._order_seen), self.known_orders.values())
        self._order_seen = None
        if self._exchange.size > 1:
            order = self._order_of_rank_0(order)
        self.has_rebuilt = True
        old = self.layout.plan
        plan = make_plan(old.specs, caps_bytes=self.options.caps_bytes, order=order, leave_out=self._left_out)
        if plan.buckets != old.buckets:
            self._use(plan, used=self.layout.used_ids(), known=self.layout.ledger)

    def _order_of_rank_0(self, order: list[int]) -> list[int]:
        exchange = self._exchange
        shared = torch.tensor(order, dtype=torch.int64, device="cpu")
        exchange.channel.start_broadcast(shared, "the order of buckets", source=0)()
        theirs: list[int] = shared.tolist()
        if sorted(theirs) != sorted(order):
            raise DisagreementError(
                "The order of gradients that rank 0 has sent does not have this module's parameters in it. Build the "
                "module in the same way on every rank."
            )
        return theirs

    def _leave_out(self, status: Status) -> None:
        """Stop sending what no rank used (``skip_all_reduce_unused_params``)."""
        layout = self.layout
        unused = frozenset(slot.index for slot, n in zip(layout.slots, status.used, strict=True) if not n)
        if unused and len(unused) < len(layout.slots):
            self._left_out, self._order_seen = unused, None
            order = [i for i in layout.plan.order if i not in unused]
            plan = make_plan(layout.plan.specs, caps_bytes=self.options.caps_bytes, order=order, leave_out=unused)
            self._use(plan, used=layout.used_ids())
