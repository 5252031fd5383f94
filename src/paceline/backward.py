"""One backward on this rank: gradients go into their buckets, which leave in plan order and come back averaged.

[Note: late gradients]
How often a gradient becomes ready in one backward is learnt from the first one (a layer under reentrant
checkpointing that is used twice: two times; an unused parameter: never). A bucket leaves when each of its
gradients has come that often. A contribution that comes after that is kept aside; the last bucket's status
tells everybody, and those buckets travel a second time with only what was late. Summing is linear, so the
result is right; and from then on the bucket waits for that contribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline import early
from paceline.bucket import Bucket, Slot, absorb_together
from paceline.courier import Courier
from paceline.early import Early, StandIns
from paceline.exchange import Finish
from paceline.higher_order import average_with_graph, blocking_sum, with_strides_of_gradient
from paceline.layout import Layout
from paceline.portion import Portion
from paceline.settlement import hand_out, multiply, send_late
from paceline.slots import Slots
from paceline.status import Status
from paceline.step import Step
from paceline.telemetry import Telemetry, now_ns
from paceline.weighing import Weighing


class Backward:
    """What becomes of the gradients of one backward. ``slots`` tell which of ``layout``'s are not ours to reduce."""

    def __init__(
        self,
        layout: Layout,
        slots: Slots,
        step: Step,
        *,
        courier: Courier,
        weighing: Weighing,
        telemetry: Telemetry,
    ) -> None:
        self.step = step
        self._layout = layout
        self._slots = slots
        self._courier = courier
        self._weighing = weighing
        self._telemetry = telemetry
        if courier.hook is None and not weighing.active:
            step.scale, step.factor = 1.0 / courier.size, courier.mean_factor

    def expect(self, *, unused: frozenset[int] = frozenset()) -> None:
        """Count how many gradients each bucket waits for; those of ``unused`` (by index) are not among them."""
        step, layout = self.step, self._layout
        for index in unused:
            place = layout.ledger.place_of.get(index)
            if place is not None:
                step.left[place] = 0
        if self._slots.shared:
            for slot in layout.slots:
                if not slot.owned:
                    step.left[slot.place] = 0
                    step.telling = False
        if 0 in step.left:
            step.bucket_left = [sum(1 for s in b.slots if step.left[s.place]) for b in layout.buckets]
        else:
            step.bucket_left = [len(b.slots) for b in layout.buckets]

    def awaited(self) -> list[str]:
        """The parameters whose gradients have not come yet."""
        return [slot.name for slot, left in zip(self._layout.slots, self.step.left, strict=True) if left > 0]

    # -- gradients become ready ----------------------------------------------------------------------

    def take_in(self, slots: list[Slot]) -> None:
        """The gradients of these are ready: absorb them, and send the buckets that are complete."""
        # The hottest code there is: it sees each of a thousand small parameters in every step.
        step = self.step
        if not step.syncing:
            self._settle(slots)
            return
        fires, left, bucket_left, next_bucket = step.fires, step.left, step.bucket_left, step.next_bucket
        buckets, used = self._layout.buckets, self._layout.ledger.used
        together: list[Slot] = []
        complete = False
        for slot in slots:
            place, number = slot.place, slot.bucket
            if number < next_bucket or not slot.owned:
                self._out_of_turn(slot)
                continue
            fires[place] += 1
            if slot.deferred:
                together.append(slot)
            elif not (step.create_graph or buckets[number].spec.sparse) and slot.absorb(step.scale, step.factor):
                used[place] = 1.0
            if step.observing:
                step.order.append(place)
            left[place] -= 1
            if left[place] == 0:
                bucket_left[number] -= 1
                complete = complete or bucket_left[number] == 0
        if step.create_graph:
            return
        if together:
            absorb_together(together, used)
        if complete:
            self._launch_complete()

    def take_early(self, come: Sequence[tuple[Slot, Early]], stand_ins: StandIns) -> list[Tensor]:
        """[Note: early gradients] in early.py: the same for these; what a compiled backward is to go on with."""
        # Without no_grad(), which costs 30 us a report: nothing here belongs to a graph, or it would not be early.
        going_on = early.take(come, self.step, self._layout.ledger.used, stand_ins)
        if self.step.syncing:
            self._launch_complete()
        return going_on

    def _out_of_turn(self, slot: Slot) -> None:
        """A gradient that belongs to another wrapper, to no bucket, or to one that has left."""
        step, param = self.step, slot.param
        if not slot.owned:
            return
        if slot.bucket < 0:
            step.came_though_left_out.add(slot.name)
            return
        step.fires[slot.place] += 1
        if param.grad is not None:
            slot.late = param.grad if slot.late is None else slot.late + param.grad
            param.grad = None
            self._layout.ledger.used[slot.place] = 1.0
            step.late.add(slot.bucket)

    def _settle(self, slots: list[Slot]) -> None:
        """Gradients of a backward without synchronisation move into their buckets, nothing else."""
        step, used = self.step, self._layout.ledger.used
        for slot in slots:
            if slot.owned and slot.bucket >= 0:
                step.fires[slot.place] += 1
                used[slot.place] = 1.0
        if step.create_graph:
            for slot in slots:
                if slot.owned and isinstance(slot.param, Portion):
                    # Now: when its bucket leaves is another moment on each rank of its mesh.
                    slot.param.place_grad()
            return
        dense = [slot for slot in slots if slot.owned and slot.view is not None]
        with torch.no_grad():
            for slot in absorb_together(dense, used):
                slot.param.grad = slot.view
                slot.filled = False

    # -- buckets leave -------------------------------------------------------------------------------

    def _launch_complete(self) -> None:
        """Start the buckets whose turn it is. The last one waits for the end: it carries the status."""
        step, buckets = self.step, self._layout.buckets
        while step.next_bucket < len(buckets) - 1 and step.bucket_left[step.next_bucket] <= 0:
            self._launch(buckets[step.next_bucket])

    def _launch(self, bucket: Bucket) -> None:
        step, times, courier = self.step, self._telemetry.current, self._courier
        times.launches_ns.append(now_ns())
        if not times.comm_start_ns:
            times.comm_start_ns = times.launches_ns[0]
        step.next_bucket = bucket.spec.index + 1
        is_last = bucket is self._layout.buckets[-1]
        with torch.no_grad():
            if bucket.spec.sparse:
                grad = self._take_sparse(bucket)
                step.finishes.append(courier.start_sparse(bucket, grad, scale=step.scale, is_last=is_last))
                return
            bucket.complete(step.scale, self._layout.ledger.used)
            buffer = bucket.payload
            if is_last and courier.can_carry_status(bucket):
                assert bucket.tail is not None
                self._layout.status_code.write(self._local_status(), bucket.tail)
                buffer = bucket.flat
        assert buffer is not None
        step.finishes.append(courier.start(bucket, buffer, is_last=is_last))

    def _take_sparse(self, bucket: Bucket) -> Tensor | None:
        (slot,) = bucket.slots
        if not slot.owned:
            return None
        used = self._layout.ledger.used
        grad, slot.param.grad = slot.param.grad, None
        if grad is not None and self.step.fires[slot.place]:
            used[slot.place] = 1.0
        elif grad is not None and not used[slot.place]:
            slot.saved = grad
        return grad

    # -- they come back ------------------------------------------------------------------------------

    def finish(self) -> Status:
        """Send what has not left, wait for everything, hand the averages out; what all ranks said."""
        step, layout, courier = self.step, self._layout, self._courier
        step.complaint = self._complaint()
        if step.create_graph and courier.hook is None:
            return self._finish_with_graph()
        for bucket in layout.buckets[step.next_bucket :]:
            self._launch(bucket)
        status = self._wait()
        with torch.no_grad():
            if any(status.late):
                send_late(layout.buckets, status, courier=courier, scale=step.scale)
            divided_by = courier.size if courier.hook is not None else 1
            factor = self._weighing.factor(status, n_ranks=courier.size, divided_by=divided_by)
            if factor is not None:
                self._weighing.warn_of_overflow(layout.buckets, courier.reduce_dtype)
                multiply(layout.buckets, factor)
            plain = not (self._slots.shared or layout.optimizers_taken or factor is not None or self._weighing.apart)
            hand_out(layout.slots, None if plain and layout.status_code.is_usual(status) else status.used)
        return status

    def _wait(self) -> Status:
        """Wait for all buckets; everybody's status comes with the last one, or beside it."""
        last = self._layout.buckets[-1]
        beside: tuple[Tensor, Finish] | None = None
        if not self._courier.can_carry_status(last):
            beside = self._start_status()
        finishes, self.step.finishes = self.step.finishes, []
        for finish in finishes:
            finish()
        if beside is None:
            assert last.tail is not None
            numbers = last.tail
        else:
            numbers, finish = beside
            finish()
        self._telemetry.current.comm_end_ns = now_ns()
        self._telemetry.buckets_reduced = len(finishes)
        return self._read(numbers)

    def _finish_with_graph(self) -> Status:
        """``create_graph=True``: the same exchange, but differentiable, and all of it at the end."""
        layout, courier = self._layout, self._courier
        for slot in layout.slots:
            if self.step.fires[slot.place] and slot.param.grad is not None:
                layout.ledger.used[slot.place] = 1.0
        reduce = blocking_sum(courier.group, courier.channel)
        numbers: Tensor | None = None
        averaged: list[tuple[Bucket, list[Tensor]]] = []
        for bucket in layout.buckets:
            tail = None
            if bucket is layout.buckets[-1] and courier.can_carry_status(bucket):
                tail = bucket.slots[0].local.new_empty(layout.status_code.numel)
                layout.status_code.write(self._local_status(), tail)
            grads, numbers = average_with_graph(bucket, self.step.scale, reduce, tail)
            averaged.append((bucket, grads))
        if numbers is None:
            numbers, finish = self._start_status()
            finish()
        status = self._read(numbers)
        factor = self._weighing.factor(status, n_ranks=courier.size, divided_by=1)
        for bucket, grads in averaged:
            for slot, grad in zip(bucket.slots, grads, strict=True):
                if slot.owned and status.used[slot.place]:
                    total = grad if factor is None else grad * factor
                    total = total if slot.base is None else total + slot.base
                    slot.param.grad = with_strides_of_gradient(total, slot.local)
                elif slot.base is not None:
                    slot.param.grad = slot.base
                slot.base = None
        return status

    # -- status --------------------------------------------------------------------------------------

    def _local_status(self) -> Status:
        step = self.step
        return Status(
            self._weighing.share(),
            self._weighing.vote(self._courier.size),
            float(bool(step.complaint)),
            [float(number in step.late) for number in range(len(self._layout.buckets))],
            self._layout.ledger.used,
        )

    def _start_status(self) -> tuple[Tensor, Finish]:
        device = self._courier.status_device(self._layout.slots[0].local.device)
        numbers = torch.empty(self._layout.status_code.numel, dtype=torch.float64, device=device)
        self._layout.status_code.write(self._local_status(), numbers)
        return numbers, self._courier.start_status(numbers)

    def _read(self, numbers: Tensor) -> Status:
        """What all ranks said, now that everything has crossed."""
        self._telemetry.sent_bytes = self._layout.plan.size_bytes
        status = self._layout.status_code.read(numbers)
        self._weighing.check(status, n_ranks=self._courier.size, rank=self._courier.channel.rank)
        return status

    def _complaint(self) -> str:
        """How this rank has broken a contract in this backward, if it has."""
        if not self.step.telling:
            return ""
        came = self.step.came_though_left_out
        if came:
            return (
                "skip_all_reduce_unused_params=True promised that parameters unused in the first step stay unused, "
                f"but these received gradients: {', '.join(sorted(came))}."
            )
        return self._layout.ledger.complaint(self.step.fires, self._courier.channel.rank)
