"""One backward on this rank: gradients go into their buckets, which leave in the order of the plan and come back.

[Note: late gradients]
How often a gradient becomes ready in one backward is learnt from the first one: the gradients of a layer
that is used twice under reentrant checkpointing come twice, and that of an unused parameter never comes. A bucket
leaves when each of its gradients has come that often. A contribution that comes after that is kept aside. The last
bucket's status tells everybody which buckets have such contributions, and those buckets travel a second time with only
what was late. Summing is linear, so the result is right. From then on the bucket waits for that contribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from paceline.control.user_code import line_of_caller
from paceline.errors import DisagreementError
from paceline.gradients.bucket import Bucket, absorb, absorb_early, hand_out
from paceline.gradients.layout import Layout
from paceline.gradients.portion import Portion
from paceline.gradients.slots import Slot, Slots
from paceline.gradients.status import Status
from paceline.reduction.countdown import Countdown
from paceline.reduction.early_gradients import Early, StandIns, can_be_taken
from paceline.reduction.exchange import Exchange, Finish
from paceline.reduction.origin import Origin, Origins
from paceline.reduction.telemetry import Telemetry, now_ns
from paceline.reduction.weighing import Weighing


class Backward:
    """What becomes of the gradients of one backward, from their arrival until they are averages in ``.grad``."""

    def __init__(
        self,
        layout: Layout,
        slots: Slots,
        *,
        exchange: Exchange,
        weighing: Weighing,
        telemetry: Telemetry,
        origins: Origins,
        syncing: bool,
        create_graph: bool = False,
        observing: bool = False,
        representative: bool = True,
        unused: frozenset[int] = frozenset(),
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.exchange = exchange
        self.weighing = weighing
        self.telemetry = telemetry
        self.origins = origins
        self.syncing = syncing
        """Whether this backward averages gradients, or only accumulates them (``no_sync``)."""
        self.create_graph = create_graph
        of_others = frozenset(slot.index for slot in layout.slots if not slot.owned) if slots.shared else frozenset()
        self.representative = representative and not of_others
        """Whether this backward shows what backwards of the module are like. It does not on a rank that has run out of
        inputs, nor while another wrapper has some of the parameters: then there is nothing to learn from it, and no
        contract to hold it to."""
        self.countdown = Countdown(layout, observing=observing, unused=unused | of_others)
        self.scale = 1.0
        """What gradients are multiplied by before they travel."""
        self.factor: Tensor | None = None
        """The scale as a tensor: see ``bucket.absorb``."""
        if syncing and exchange.hook is None and not weighing.active:
            self.scale, self.factor = 1.0 / exchange.size, exchange.mean_factor
        self.under_way: list[Finish] = []
        """A function for each bucket that has left, which waits until it is back."""
        self._late: set[int] = set()
        self._came_though_left_out: set[str] = set()

    # -- gradients become ready ----------------------------------------------------------------------

    def take_in(self, slots: list[Slot]) -> None:
        """Absorb the gradients of these slots, which are ready, and send the buckets that are complete."""
        come, out_of_turn = slots, set(self.countdown.arrived(slots))
        if out_of_turn:
            slots = [slot for slot in slots if slot not in out_of_turn]
        if not self.syncing:
            self._accumulate(slots)
            if self.create_graph:
                _redistribute(come)
            return
        for slot in out_of_turn:
            self._set_aside(slot)
        if not self.create_graph:
            absorb(slots, self.layout.ledger.used, scale=self.scale, factor=self.factor)
            self._launch_complete()

    def take_early(self, come: Sequence[tuple[Slot, Early]], stand_ins: StandIns) -> list[Tensor]:
        """Absorb gradients that a compiled backward hands over, and send the buckets that are complete.

        Return what the compiled backward goes on with.

        See [Note: early gradients] in early_gradients.py.
        """
        # No early gradient belongs to a graph. So this needs no no_grad(), which would cost 30 us per report.
        going_on: list[Tensor] = []
        taken: dict[Slot, Tensor] = {}
        for slot, early in come:
            if can_be_taken(slot):
                going_on.append(stand_ins.like(early))
                taken[slot] = early.grad
                slot.awaits_stand_in = True
                self.layout.ledger.used[slot.position] = 1.0
            else:
                going_on.append(early.copy())
        for slot in self.countdown.arrived(list(taken)):
            grad = taken.pop(slot)
            slot.late = grad.clone() if slot.late is None else slot.late + grad
            self._late.add(slot.bucket)
        absorb_early(taken.items(), scale=self.scale, factor=self.factor)
        if self.syncing:
            self._launch_complete()
        return going_on

    def _set_aside(self, slot: Slot) -> None:
        """Keep a gradient whose bucket has left; remember one that was promised not to come."""
        param = slot.param
        if not slot.owned:
            return
        if slot.bucket < 0:
            self._came_though_left_out.add(slot.name)
        elif param.grad is not None:
            slot.late = param.grad if slot.late is None else slot.late + param.grad
            param.grad = None
            self.layout.ledger.used[slot.position] = 1.0
            self._late.add(slot.bucket)

    def _accumulate(self, slots: list[Slot]) -> None:
        """Move gradients of a backward without synchronisation into their buckets, where they stay."""
        used = self.layout.ledger.used
        for slot in slots:
            used[slot.position] = 1.0
        if self.create_graph:
            return
        with torch.no_grad():
            for slot in absorb(slots, used):
                slot.param.grad = slot.view
                slot.filled = False

    # -- buckets leave -------------------------------------------------------------------------------

    def _launch_complete(self) -> None:
        for number in self.countdown.leaving():
            self._launch(self.layout.buckets[number])

    def launch_all_but_last(self) -> None:
        """Send every bucket but the last, complete or not ([Note: several wrappers in one backward] in turns.py)."""
        if not self.create_graph:
            for number in self.countdown.leaving(incomplete=True):
                self._launch(self.layout.buckets[number])

    def _launch(self, bucket: Bucket) -> None:
        times, exchange, layout = self.telemetry.current, self.exchange, self.layout
        times.launches_ns.append(now_ns())
        if not times.comm_start_ns:
            times.comm_start_ns = times.launches_ns[0]
        is_last = bucket is layout.buckets[-1]
        with torch.no_grad():
            if bucket.spec.sparse:
                grad = self._take_sparse(bucket)
                self.under_way.append(exchange.start_sparse(bucket, grad, scale=self.scale, is_last=is_last))
                return
            bucket.complete(self.scale, layout.ledger.used)
            buffer = bucket.payload
            if is_last and exchange.can_carry_status(bucket):
                assert bucket.tail is not None
                layout.status_code.write(self.local_status(), bucket.tail)
                buffer = bucket.flat
        assert buffer is not None
        self.under_way.append(exchange.start(bucket, buffer, is_last=is_last))

    def _take_sparse(self, bucket: Bucket) -> Tensor | None:
        (slot,) = bucket.slots
        if not slot.owned:
            return None
        used = self.layout.ledger.used
        grad, slot.param.grad = slot.param.grad, None
        if grad is not None and self.countdown.arrivals[slot.position]:
            used[slot.position] = 1.0
        elif grad is not None and not used[slot.position]:
            slot.saved = grad
        return grad

    # -- the averages come back ----------------------------------------------------------------------

    def finish(self) -> Status:
        """Send what has not left, wait for everything, and hand the averages out; return what all ranks said."""
        layout, exchange, weighing = self.layout, self.exchange, self.weighing
        for number in self.countdown.leaving(incomplete=True, with_last=True):
            self._launch(layout.buckets[number])
        status = self._wait()
        with torch.no_grad():
            if any(status.late):
                self._send_late(status)
            divided_by = exchange.size if exchange.hook is not None else 1
            factor = weighing.factor(status, n_ranks=exchange.size, divided_by=divided_by)
            if factor is not None:
                weighing.warn_of_overflow(layout.buckets, exchange.reduce_dtype)
                for bucket in layout.buckets:
                    bucket.multiply(factor)
            plain = not (self.slots.shared or layout.optimizers_taken or factor is not None or weighing.apart)
            hand_out(layout.slots, None if plain and layout.status_code.is_usual(status) else status.used)
        return status

    def _wait(self) -> Status:
        """Wait for all buckets. Everybody's status comes with the last one, or beside it."""
        last = self.layout.buckets[-1]
        numbers: Tensor | None = last.tail
        if not self.exchange.can_carry_status(last):
            numbers, finish_status = self.start_status()
            self.under_way.append(finish_status)
        for finish in self.under_way:
            finish()
        assert numbers is not None
        self.telemetry.current.comm_end_ns = now_ns()
        self.telemetry.buckets_reduced = len(self.layout.buckets)
        return self.read_status(numbers)

    def _send_late(self, status: Status) -> None:
        """Send again the buckets for which some rank has a late contribution ([Note: late gradients])."""
        for bucket, ranks in zip(self.layout.buckets, status.late, strict=True):
            if not ranks:
                continue
            if bucket.spec.sparse:
                self.exchange.start_sparse(bucket, bucket.slots[0].late, scale=self.scale, is_last=False)()
                continue
            assert bucket.payload is not None
            late = bucket.late_contributions(self.scale)
            self.exchange.start(bucket, late, is_last=False)()
            bucket.payload.add_(late)

    # -- status --------------------------------------------------------------------------------------

    def local_status(self) -> Status:
        """What this rank has to say about this backward."""
        origin = self.origins.of_backward()
        has_opinion = origin is not Origin.UNKNOWN and not self.weighing.abstains
        mark = self.layout.status_code.mark(of_module=origin is Origin.MODULE) if has_opinion else (0.0, 0.0, 0.0)
        return Status(
            self.weighing.share(),
            self.weighing.vote(self.exchange.size),
            float(bool(self.complaint)),
            [float(number in self._late) for number in range(len(self.layout.buckets))],
            self.layout.ledger.used,
            *mark,
        )

    def start_status(self) -> tuple[Tensor, Finish]:
        """Send the status by itself, beside the buckets. The numbers are everybody's once it has been waited for."""
        numbers = torch.empty(self.layout.status_code.numel, dtype=torch.float64, device="cpu")
        self.layout.status_code.write(self.local_status(), numbers)
        return numbers, self.exchange.start_status(numbers)

    def read_status(self, numbers: Tensor) -> Status:
        """What all ranks have said. It raises if they ran different backwards, or if only some weighed theirs."""
        self.telemetry.sent_bytes = self.layout.plan.size_bytes
        status = self.layout.status_code.read(numbers)
        if not status.is_one_backward:
            raise DisagreementError(self._who_ran_what())
        self.weighing.check(status, n_ranks=self.exchange.size, rank=self.exchange.channel.rank)
        return status

    def _who_ran_what(self) -> str:
        """Which backward each rank ran, if they are not the same ([Note: backwards that meet] in origin.py)."""
        channel = self.exchange.channel
        number = f"backward {channel.step + 1} of wrapper {channel.progress.wrapper}"
        mine = f"{number}, {self.origins.of_backward().value}, at {line_of_caller()}"
        told = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(channel.gather_in_group(mine)))
        return (
            f"Ranks ran different backwards at the same time, and their gradients cannot be averaged:{told}\n"
            "Run the same backwards in the same order on every rank. If one rank runs a backward by itself, put it "
            "into `with ddp.no_sync():`. The gradients are lost: call zero_grad() before you go on."
        )

    @cached_property
    def complaint(self) -> str:
        """How this rank has broken a contract in this backward. The text is empty if it has not.

        The status is the first to ask, when the last gradient has come.
        """
        if not self.representative:
            return ""
        if self._came_though_left_out:
            names = ", ".join(sorted(self._came_though_left_out))
            return (
                "skip_all_reduce_unused_params=True promised that parameters unused in the first step stay unused, "
                f"but these received gradients: {names}."
            )
        return self.layout.ledger.complaint(self.countdown.arrivals, self.exchange.channel.rank)


def _redistribute(slots: list[Slot]) -> None:
    """Redistribute gradients of DTensors that only accumulate, and that belong to a graph."""
    for slot in slots:
        if slot.owned and isinstance(slot.param, Portion):
            # This is a collective of its mesh, whose ranks do not launch their buckets at the same moment.
            slot.param.redistribute_grad()
