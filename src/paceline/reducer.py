"""The phases of a step: gradients become ready, buckets leave in plan order, backward ends with averages.

Driven by autograd alone: a hook on each parameter says *ready*, a callback of the engine says *backward is
over*. What forward did, or whether it went through the wrapper at all, does not matter.

[Note: late gradients]
How often a gradient becomes ready in one backward is learnt from the first one (a layer under reentrant
checkpointing that is used twice: two times; an unused parameter: never). A bucket leaves when each of its
gradients has come that often. A contribution that comes after that is kept aside; the last bucket's status
tells everybody, and those buckets travel a second time with only what was late. Summing is linear, so the
result is right; and from then on the bucket waits for that contribution.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from paceline import _torch, early
from paceline.bucket import Bucket, CommHook, Slot, absorb_together
from paceline.control import Channel
from paceline.courier import Courier
from paceline.errors import ContractError, DisagreementError, StateError
from paceline.exchange import Finish
from paceline.higher_order import average_with_graph, blocking_sum
from paceline.inbox import Inbox
from paceline.layout import Layout
from paceline.ledger import Ledger
from paceline.plan import BucketPlan, arranged, make_plan
from paceline.roster import SPEC_FIELDS, Roster
from paceline.settlement import hand_out, multiply, send_late
from paceline.status import Status
from paceline.step import ForwardToken, Phase, ReducerOptions, Step
from paceline.telemetry import Telemetry, now_ns
from paceline.watch import BackwardWatch
from paceline.weighing import Weighing


class Reducer:
    """Averages the gradients of a roster's parameters over a process group while backward runs."""

    def __init__(
        self,
        roster: Roster,
        *,
        group: dist.ProcessGroup,
        channel: Channel,
        options: ReducerOptions,
        reread: Callable[[], Roster],
    ) -> None:
        self.courier = Courier(group, channel)
        self.options = options
        self.telemetry = Telemetry()
        self.weighing = Weighing()
        self.enabled = True
        """Whether the next backward synchronises (``no_sync``)."""
        self.forwards: weakref.WeakSet[ForwardToken] = weakref.WeakSet()
        """Forwards whose graph is alive and has seen no backward: what they saved must stay as it is."""
        self.around_backward: contextlib.AbstractContextManager[object] | None = None
        """Entered when a backward begins and left when it has ended, in whatever way."""
        self.before_sync: Callable[[], None] | None = None
        """Called when a synchronised backward begins, before it communicates anything (``join``)."""
        self.on_finish: list[Callable[[], None]] = []
        """Called once, when a synchronised backward is complete (buffer hooks' futures)."""
        self.verify: Callable[[int, Channel, bool], None] | None = None
        """Called when a synchronised backward is complete: how many were, and whether this rank added to it."""
        self.phase = Phase.IDLE
        self.last_error = ""
        self.has_rebuilt = False
        self._reread = reread
        self._inbox = Inbox(self)
        self._stand_ins = early.StandIns()
        self._step = Step()
        self._slots_by_id: dict[int, Slot] = {}
        self._layout: Layout
        self._needed_alone = False
        self.shares = False
        """Another wrapper has, or had, some of the same parameters."""
        self._warned_of_eval = False
        self._unused_hint: frozenset[int] | None = None
        self._left_out: frozenset[int] = frozenset()
        self._order_seen: list[int] | None = None
        self.known_orders: dict[frozenset[int], list[int]] = {}
        """Of graphs that bring all gradients at once: the order in which they compute them, as indices."""
        self._is_first = True
        self._adopt(roster, used=set())

    @property
    def channel(self) -> Channel:
        return self.courier.channel

    # -- the roster and the plan ---------------------------------------------------------------------

    def adopt(self, roster: Roster) -> None:
        """Take ``roster``'s parameters as the ones to reduce."""
        self._adopt(roster, used=self._layout.used_ids())

    def _adopt(self, roster: Roster, *, used: set[int]) -> None:
        self.roster = roster
        known, self._slots_by_id = self._slots_by_id, {}
        came_unnoticed: list[Slot] = []
        for index, (param, spec) in enumerate(zip(roster.params, roster.specs, strict=True)):
            if spec.requires_grad:
                slot = self._slots_by_id[id(param)] = known.get(id(param)) or Slot(spec.name, param)
                slot.index, slot.name = index, spec.name
                if known and id(param) not in known and param.grad is not None:
                    came_unnoticed.append(slot)
        for key in known.keys() - self._slots_by_id.keys():
            # A graph made before may still bring it a gradient.
            known[key].owned = False
        self._left_out = frozenset()
        # Whatever was learnt of other parameters does not hold for these.
        self._order_seen, self._is_first, self._unused_hint = None, True, None
        self.known_orders.clear()
        self.first_plan = make_plan(roster.specs, caps_bytes=self.options.caps_bytes)
        self._use(self.first_plan, used=used | {id(slot.param) for slot in came_unnoticed})
        self.listen()

    def _use(self, plan: BucketPlan, *, used: set[int], known: Ledger | None = None) -> None:
        """Put ``plan`` into force; storage comes with the next backward that needs it.

        ``used`` holds the ids of parameters that got a gradient since the last synchronisation; ``known`` is the
        ledger of a plan for the same parameters.
        """
        self._layout = Layout(
            plan,
            self._slots_by_id,
            n_ranks=self.courier.size,
            copy_in_batches=self.options.copy_in_batches,
            ledger=known,
        )
        self._layout.mark_used(used)
        self._mean_factor = torch.tensor(1.0 / self.courier.size, dtype=torch.float64)
        self._n_in_backward = 0

    @property
    def plan(self) -> BucketPlan:
        return self._layout.plan

    @property
    def ledger(self) -> Ledger:
        return self._layout.ledger

    @property
    def param_ids(self) -> set[int]:
        return set(self._slots_by_id)

    def reduces(self, param: Tensor) -> bool:
        return id(param) in self._slots_by_id

    def owns(self, param: Tensor) -> bool:
        """Whether it is reduced here, and not by another wrapper of the same parameter."""
        slot = self._slots_by_id.get(id(param))
        return slot is not None and slot.owned

    def name_of(self, param: Tensor) -> str:
        return self._slots_by_id[id(param)].name

    @property
    def active(self) -> bool:
        """Whether there is anything to do at all: one rank alone needs no buckets."""
        return self.courier.size > 1 or self._needed_alone

    def activate(self) -> None:
        """Use buckets even on a rank that is alone: something needs them."""
        self._needed_alone = True
        self.listen()

    def listen(self) -> None:
        if self.active:
            self._inbox.listen_to(self._slots_by_id)

    def stop_listening(self) -> None:
        self._inbox.stop_listening()

    def use_hook(self, hook: CommHook | None, state: object, *, overlaps: bool) -> None:
        """Let ``hook`` communicate the buckets; None for the plain average."""
        courier = self.courier
        courier.hook, courier.hook_state, courier.hook_overlaps = hook, state, overlaps
        if hook is not None:
            self.activate()

    def move_to(self, group: dist.ProcessGroup, channel: Channel) -> None:
        """Reduce over another group from now on."""
        self.courier.group, self.courier.channel = group, channel
        self._forget_step()
        self.phase = Phase.IDLE
        self._step = Step()
        # Anew: the ranks of this group may have learnt different things before.
        self.adopt(self._reread())

    def check_idle(self, what: str) -> None:
        if self.phase is Phase.BACKWARD:
            raise StateError(f"{what} while a backward is running; wait for its end.")

    def set_static_graph(self) -> None:
        """Promise it after construction; too late once a backward has been seen."""
        if self.telemetry.steps or self.phase is Phase.BACKWARD:
            raise StateError("set_static_graph() should be called before training loop starts, not after a backward.")
        self.options = replace(self.options, static_graph=True, rebuild=True)

    def unfinished(self) -> list[str]:
        """The parameters whose gradients a backward that has begun still waits for."""
        if self.phase not in (Phase.BACKWARD, Phase.INTERRUPTED):
            return []
        missing = [slot.name for slot, left in zip(self._layout.slots, self._step.left, strict=False) if left > 0]
        return missing or ["(none: it raised at the end)"]

    def unused_bytes(self) -> int:
        """The size of the parameters that no rank used in the last synchronised backward."""
        return sum(self.plan.specs[index].size_bytes for index in self.ledger.unused_on_all())

    def trainable(self) -> list[Slot]:
        """The slots of all parameters that are reduced, in registration order."""
        return self._layout.slots

    def yield_to(self, other: Reducer) -> None:
        """Let ``other``, a wrapper of some of the same parameters, reduce those."""
        shared = self.param_ids & other.param_ids
        if shared:
            self.shares = other.shares = True
            for key in shared:
                self._slots_by_id[key].owned = False
            other.own(shared)

    def own(self, param_ids: set[int]) -> set[int]:
        for key in param_ids:
            self._slots_by_id[key].owned = True
        return param_ids

    def owned_ids(self) -> set[int]:
        return {key for key, slot in self._slots_by_id.items() if slot.owned}

    # -- a backward begins ---------------------------------------------------------------------------

    def output_needed(self, token: ForwardToken, probe: Node) -> None:
        """An output of forward takes part in a backward: it counts even if it uses no parameter.

        ``probe`` is a leaf of that output: ``autograd.grad`` does not reach it, and is none of our business.
        """
        if not _torch.will_execute(probe):
            return
        self.forwards.discard(token)
        if self.phase is Phase.BACKWARD or not self.active:
            return
        if not self.shares or any(slot.owned for slot in self._layout.slots):
            try:
                self._start_backward(through_forward=True)
            except BaseException as error:
                self._tell_others(error)
                raise

    def expect_unused(self, unused: frozenset[int]) -> None:
        """These parameters (by index) cannot be reached from forward's output (``find_unused_parameters``)."""
        hint = self._unused_hint
        self._unused_hint = unused if hint is None else hint & unused

    def _start_backward(self, *, through_forward: bool = False) -> None:
        self.check_usable()
        syncing = self.enabled and (through_forward or self._is_training())
        if syncing and torch.is_grad_enabled() and self.courier.hook is not None:
            raise StateError(
                "backward(create_graph=True) cannot differentiate through a comm hook. Remove the hook "
                "(remove_comm_hook()), or run this backward inside no_sync()."
            )
        self.channel.step = self.telemetry.steps
        BackwardWatch(self).start()
        # Now, as a new plan means other buckets.
        self.weighing.notice(self._inbox.peek())
        if syncing and self.before_sync is not None:
            self.before_sync()
        if syncing and self.roster.changed():
            self._replan()
        if _torch.optimizers_in_backward() != self._n_in_backward:
            self.take_optimizers()
        if syncing and self._order_seen is not None:
            self._rebuild()
        self.telemetry.current.backward_start_ns = now_ns()
        self._begin(syncing=syncing, create_graph=torch.is_grad_enabled())

    def _begin(self, *, syncing: bool, create_graph: bool = False) -> None:
        """Set everything to the start of a backward."""
        self.phase = Phase.BACKWARD
        if self.around_backward is not None:
            self.around_backward.__enter__()
        self._inbox.begin_backward()
        step = self._step = Step(
            syncing,
            create_graph,
            observing=syncing and self._is_first,
            fires=[0] * len(self._layout.slots),
            left=self.ledger.expected.copy(),
        )
        self.weighing.begin_backward(self._layout.slots, syncing=syncing)
        if self.courier.hook is None and not self.weighing.active:
            step.scale, step.factor = 1.0 / self.courier.size, self._mean_factor
        if syncing and not self._layout.sharing_is_settled and not (self._is_first and self.options.rebuild):
            # Not in a first step whose buckets are about to be made anew. All ranks are here, with nothing under way.
            self._layout.share(self.courier.allocate)
        if not create_graph:
            self._layout.prepare_storage(is_stable=self.options.stable_storage)
        if syncing:
            self._count_what_is_left(step)

    def _count_what_is_left(self, step: Step) -> None:
        """How many gradients each bucket waits for."""
        if self._unused_hint is not None:
            for index in self._unused_hint:
                place = self.ledger.place_of.get(index)
                if place is not None:
                    step.left[place] = 0
            self._unused_hint = None
        if self.shares:
            for slot in self._layout.slots:
                if not slot.owned:
                    step.left[slot.place] = 0
                    step.telling = False
        if 0 in step.left:
            step.bucket_left = [sum(1 for s in b.slots if step.left[s.place]) for b in self._layout.buckets]
        else:
            step.bucket_left = [len(b.slots) for b in self._layout.buckets]

    def _is_training(self) -> bool:
        """Whether a backward that did not come through the wrapper's forward is one of training.

        The bare module in eval mode is what one rank uses alone, for saliency or an attack say: synchronising
        there would wait for ranks that do no such thing.
        """
        if self.roster.training():
            return True
        if self.enabled and not self._warned_of_eval:
            self._warned_of_eval = True
            warnings.warn(
                "Backward through the bare module in eval mode is not synchronised across ranks. Call the wrapper "
                "instead of its module, or use train() mode, if it is meant to be.",
                stacklevel=2,
            )
        return False

    def take_optimizers(self) -> None:
        """Optimizers that run in backward are to find the averaged gradient: from now on we call them."""
        self._n_in_backward = _torch.optimizers_in_backward()
        for slot in self._layout.slots:
            slot.steps_in_backward = _torch.take_optimizers_in_backward(slot.param)

    def _replan(self) -> None:
        """The module's parameters have changed since the plan was made: agree on a new one."""
        newer = self._reread()
        reason = self.roster.difference(newer)
        if not any(spec.requires_grad for spec in newer.specs):
            raise StateError(f"No trainable parameter is left ({reason}); there is nothing to synchronise.")
        self.channel.announce_replan(reason, step=self.telemetry.steps)
        self.channel.compare("parameters after a change", newer.rows(), SPEC_FIELDS)
        # Only now: if ranks differ, the change is still there to be noticed by the next backward.
        self.adopt(newer)

    # -- gradients become ready ----------------------------------------------------------------------

    def announce(self, slot: Slot) -> None:
        """Say that a slot's gradient is ready, as autograd does; for who drives backward in another way."""
        self._inbox.hook(slot)(slot.param)

    def gradients_ready(self) -> None:
        """Look at what is in the inbox: absorb it, and send the buckets that are complete."""
        try:
            if self.phase is not Phase.BACKWARD:
                self._start_backward()
            self._take_in()
        except BaseException as error:
            self._tell_others(error)
            raise

    def _take_in(self) -> None:
        # The hottest code there is: it sees each of a thousand small parameters in every step.
        step = self._step
        slots = self._inbox.take()
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

    # -- gradients of a compiled backward ------------------------------------------------------------

    def why_not_early(self, param: Tensor) -> str | None:
        """Why a compiled backward should not hand ``param``'s gradient over as soon as it exists; None if it should.

        Only of parameters that this one owns.
        """
        slot = self._slots_by_id[id(param)]
        if not self.active:
            return "there is one rank only"
        if slot.bucket < 0:
            return "no rank used it in the first step (skip_all_reduce_unused_params)"
        if self._layout.buckets[slot.bucket].spec.sparse:
            return "its gradient is sparse"
        if len(self._layout.buckets) == 1:
            return "there is one bucket, which leaves when backward has ended"
        return None

    def gradients_early(self, come: Sequence[early.Early]) -> list[Tensor]:
        """[Note: early gradients] in early.py: what a compiled backward is to hand to autograd for each of these."""
        try:
            pairs = [(self._slots_by_id[id(each.param)], each) for each in come]
            if self.phase is not Phase.BACKWARD:
                if not any(_torch.will_execute(slot.node()) for slot, _ in pairs):
                    return [each.copy() for each in come]
                self._start_backward()
            step = self._step
            if step.create_graph:
                return [each.copy() for each in come]
            # In the order in which they came, should autograd have brought others in between.
            self._take_in()
            with torch.no_grad():
                going_on = early.take(pairs, step, self.ledger.used, self._stand_ins)
            if step.syncing:
                self._launch_complete()
            return going_on
        except BaseException as error:
            self._tell_others(error)
            raise

    def brings_more(self, slot: Slot) -> bool:
        """Autograd has brought what stands for a gradient that was taken early; whether more came with it."""
        return early.brings_more(slot, self._step, self._stand_ins)

    def _out_of_turn(self, slot: Slot) -> None:
        """A gradient that belongs to another wrapper, to no bucket, or to one that has left."""
        step, param = self._step, slot.param
        if not slot.owned:
            return
        if slot.bucket < 0:
            step.came_though_left_out.add(slot.name)
            return
        step.fires[slot.place] += 1
        if param.grad is not None:
            slot.late = param.grad if slot.late is None else slot.late + param.grad
            param.grad = None
            self.ledger.used[slot.place] = 1.0
            step.late.add(slot.bucket)

    def _settle(self, slots: list[Slot]) -> None:
        """Gradients of a backward without synchronisation move into their buckets, nothing else."""
        step, used = self._step, self.ledger.used
        for slot in slots:
            if slot.owned and slot.bucket >= 0:
                step.fires[slot.place] += 1
                used[slot.place] = 1.0
        if step.create_graph:
            return
        dense = [slot for slot in slots if slot.owned and slot.view is not None]
        with torch.no_grad():
            for slot in absorb_together(dense, used):
                slot.param.grad = slot.view
                slot.filled = False

    def _launch_complete(self) -> None:
        """Start the buckets whose turn it is. The last one waits for the end: it carries the status."""
        step = self._step
        while step.next_bucket < len(self._layout.buckets) - 1 and step.bucket_left[step.next_bucket] <= 0:
            self._launch(self._layout.buckets[step.next_bucket])

    def _launch(self, bucket: Bucket) -> None:
        step, times = self._step, self.telemetry.current
        times.launches_ns.append(now_ns())
        if not times.comm_start_ns:
            times.comm_start_ns = times.launches_ns[0]
        step.next_bucket = bucket.spec.index + 1
        is_last = bucket is self._layout.buckets[-1]
        with torch.no_grad():
            if bucket.spec.sparse:
                grad = self._take_sparse(bucket)
                step.finishes.append(self.courier.start_sparse(bucket, grad, scale=step.scale, is_last=is_last))
                return
            bucket.complete(step.scale, self.ledger.used)
            buffer = bucket.payload
            if is_last and self.courier.can_carry_status(bucket):
                assert bucket.tail is not None
                self._layout.status_code.write(self._local_status(), bucket.tail)
                buffer = bucket.flat
        assert buffer is not None
        step.finishes.append(self.courier.start(bucket, buffer, is_last=is_last))

    def _take_sparse(self, bucket: Bucket) -> Tensor | None:
        (slot,) = bucket.slots
        if not slot.owned:
            return None
        grad, slot.param.grad = slot.param.grad, None
        if grad is not None and self._step.fires[slot.place]:
            self.ledger.used[slot.place] = 1.0
        elif grad is not None and not self.ledger.used[slot.place]:
            slot.saved = grad
        return grad

    # -- backward ends -------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The outermost backward has ended on this rank."""
        try:
            self._take_in()
            self._leave_backward()
            self.telemetry.current.backward_end_ns = now_ns()
            if self._step.syncing:
                self._finish()
            self.phase = Phase.IDLE
        except BaseException as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: BaseException) -> None:
        """Something in here raised, which the other ranks have to hear of."""
        self.last_error = str(error)
        if isinstance(error, DisagreementError):
            # All ranks raise it together, with nothing under way: the next step may go on.
            self.phase = Phase.IDLE
            self._forget_step()
            return
        self.channel.report("backward", error)
        if not isinstance(error, StateError):
            # (A StateError is a wrong call: nothing was started because of it.)
            self.phase = Phase.BROKEN
            self._forget_step()

    def interrupt_backward(self) -> None:
        """The backward that was running raised an exception; the caller sees that one."""
        self._forget_step()
        if self.phase is Phase.BACKWARD:
            self.channel.report("backward", None)
            self.phase = Phase.INTERRUPTED

    def _leave_backward(self) -> None:
        self._inbox.end_backward()
        if self.around_backward is not None:
            self.around_backward.__exit__(None, None, None)

    def _forget_step(self) -> None:
        """Drop what a backward that came to nothing has left behind."""
        self._inbox.take()
        self._leave_backward()
        self.on_finish.clear()
        self.ledger.used = [0.0] * len(self._layout.slots)
        self.weighing.end_backward()
        if not self._step.syncing:
            early.give_back(self._layout.slots)
        for slot in self._layout.slots:
            slot.base = None
            slot.forget()

    def check_usable(self) -> None:
        remedy = "Start the job again, or build a new process group and wrapper."
        if not _torch.group_is_alive(self.courier.group):
            raise StateError(f"The process group of this wrapper has been destroyed. {remedy}")
        if self.phase is Phase.BROKEN:
            raise StateError(
                f"This wrapper failed earlier ({self.last_error}), and its process group is out of step with the other "
                f"ranks since. {remedy}"
            )
        if self.phase is Phase.INTERRUPTED:
            under_way = self._step.next_bucket
            if under_way:
                raise StateError(
                    f"The previous backward on rank {self.channel.rank} raised while {under_way} buckets were being "
                    f"reduced, which the other ranks cannot undo. {remedy}"
                )
            self.phase = Phase.IDLE
        self.channel.check_news()
        if self.channel.given_up():
            self.phase = Phase.BROKEN
            raise StateError(
                f"An earlier step raised on this rank ({self.channel.rank}) and the other ranks have given up because "
                f"of it. {remedy}"
            )
        self.channel.retract()

    def shadow_backward(self) -> None:
        """Take part in the others' synchronisation with nothing to add (a rank that has run out of inputs)."""
        self.check_usable()
        self.channel.step = self.telemetry.steps
        if self._order_seen is not None:
            self._rebuild()
        # Whatever its gradients hold stays out of the sum.
        for slot in self._layout.slots:
            slot.param.grad = None
        self.ledger.used = [0.0] * len(self._layout.slots)
        self._begin(syncing=True)
        self._step.telling = False
        self.weighing.take_no_part()
        try:
            self._leave_backward()
            self._finish()
            self.phase = Phase.IDLE
        except BaseException as error:
            self._tell_others(error)
            raise

    def _finish(self) -> None:
        """Send what has not left, wait for everything, hand the averages out."""
        step = self._step
        step.complaint = self._complaint()
        if step.create_graph and self.courier.hook is None:
            status = self._finish_with_graph()
        else:
            for bucket in self._layout.buckets[step.next_bucket :]:
                self._launch(bucket)
            status = self._wait()
            with torch.no_grad():
                if any(status.late):
                    send_late(self._layout.buckets, status, courier=self.courier, scale=step.scale)
                divided_by = self.courier.size if self.courier.hook is not None else 1
                factor = self.weighing.factor(status, n_ranks=self.courier.size, divided_by=divided_by)
                if factor is not None:
                    multiply(self._layout.buckets, factor)
                plain = not (self.shares or self._n_in_backward or factor is not None or self.weighing.apart)
                hand_out(
                    self._layout.slots, None if plain and self._layout.status_code.is_usual(status) else status.used
                )
        for callback in self.on_finish:
            callback()
        self.on_finish.clear()
        self._learn(status)
        self.telemetry.finish_step()
        if status.complaints:
            said = self.channel.gather("complaint", step.complaint)
            raise ContractError("\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(said) if text))
        if self.verify is not None:
            self.verify(self.telemetry.steps, self.channel, step.telling)

    def _wait(self) -> Status:
        """Wait for all buckets; everybody's status comes with the last one, or beside it."""
        last = self._layout.buckets[-1]
        beside: tuple[Tensor, Finish] | None = None
        if not self.courier.can_carry_status(last):
            beside = self._start_status()
        finishes, self._step.finishes = self._step.finishes, []
        for finish in finishes:
            finish()
        if beside is None:
            assert last.tail is not None
            numbers = last.tail
        else:
            numbers, finish = beside
            finish()
        telemetry = self.telemetry
        telemetry.current.comm_end_ns = now_ns()
        telemetry.buckets_reduced = len(finishes)
        telemetry.sent_bytes = self.plan.size_bytes
        status = self._layout.status_code.read(numbers)
        self.weighing.check(status, n_ranks=self.courier.size, rank=self.channel.rank)
        return status

    def _finish_with_graph(self) -> Status:
        """``create_graph=True``: the same exchange, but differentiable, and all of it at the end."""
        for slot in self._layout.slots:
            if self._step.fires[slot.place] and slot.param.grad is not None:
                self.ledger.used[slot.place] = 1.0
        reduce = blocking_sum(self.courier.group, self.channel)
        self.telemetry.sent_bytes = self.plan.size_bytes
        numbers: Tensor | None = None
        averaged: list[tuple[Bucket, list[Tensor]]] = []
        for bucket in self._layout.buckets:
            tail = None
            if bucket is self._layout.buckets[-1] and self.courier.can_carry_status(bucket):
                tail = bucket.slots[0].param.new_empty(self._layout.status_code.numel)
                self._layout.status_code.write(self._local_status(), tail)
            grads, numbers = average_with_graph(bucket, self._step.scale, reduce, tail)
            averaged.append((bucket, grads))
        if numbers is None:
            numbers, finish = self._start_status()
            finish()
        status = self._layout.status_code.read(numbers)
        self.weighing.check(status, n_ranks=self.courier.size, rank=self.channel.rank)
        factor = self.weighing.factor(status, n_ranks=self.courier.size, divided_by=1)
        for bucket, grads in averaged:
            for slot, grad in zip(bucket.slots, grads, strict=True):
                if slot.owned and status.used[slot.place]:
                    total = grad if factor is None else grad * factor
                    slot.param.grad = total if slot.base is None else total + slot.base
                elif slot.base is not None:
                    slot.param.grad = slot.base
                slot.base = None
        return status

    # -- afterwards ----------------------------------------------------------------------------------

    def _learn(self, status: Status) -> None:
        """Remember what this backward showed: how often gradients come, in which order, which are unused."""
        first, self._is_first = self._is_first, False
        step = self._step
        self.ledger.learn(
            step.fires if step.telling else self.ledger.expected,
            status.used,
            first=first and self.options.rebuild and step.telling,
            static_graph=self.options.static_graph and step.telling,
            broken=bool(status.complaints),
        )
        self.weighing.end_backward()
        if first and self.options.rebuild:
            # Put to use in the next backward: the first one is slow enough.
            self._order_seen = step.order
        if first and self.options.skip_unused:
            self._leave_out(status)

    def _rebuild(self) -> None:
        """Make the plan anew in the order in which rank 0's gradients became ready in the first backward."""
        assert self._order_seen is not None
        order = arranged(self.ledger.observe(self._order_seen), self.known_orders.values())
        self._order_seen = None
        if self.courier.size > 1:
            device = self.courier.status_device(self._layout.slots[0].param.device)
            shared = torch.tensor(order, dtype=torch.int64, device=device)
            self.channel.progress.start("broadcast", "the order of buckets", shared)
            work = dist.broadcast(shared, group_src=0, group=self.courier.group, async_op=True)
            assert work is not None
            self.channel.wait(work, "the broadcast of the order of buckets")
            order = shared.tolist()
        self.has_rebuilt = True
        plan = make_plan(self.plan.specs, caps_bytes=self.options.caps_bytes, order=order, leave_out=self._left_out)
        if plan.buckets != self.plan.buckets:
            self._use(plan, used=self._layout.used_ids(), known=self.ledger)

    def _leave_out(self, status: Status) -> None:
        """``skip_all_reduce_unused_params``: what no rank used is not sent any more."""
        unused = frozenset(slot.index for slot, n in zip(self._layout.slots, status.used, strict=True) if not n)
        if unused and len(unused) < len(self._layout.slots):
            self._left_out, self._order_seen = unused, None
            order = [i for i in self.plan.order if i not in unused]
            plan = make_plan(self.plan.specs, caps_bytes=self.options.caps_bytes, order=order, leave_out=unused)
            self._use(plan, used=self._layout.used_ids())

    # -- status --------------------------------------------------------------------------------------

    def _local_status(self) -> Status:
        step = self._step
        return Status(
            self.weighing.share(),
            self.weighing.vote(self.courier.size),
            float(bool(step.complaint)),
            [float(number in step.late) for number in range(len(self._layout.buckets))],
            self.ledger.used,
        )

    def _start_status(self) -> tuple[Tensor, Finish]:
        device = self.courier.status_device(self._layout.slots[0].param.device)
        numbers = torch.empty(self._layout.status_code.numel, dtype=torch.float64, device=device)
        self._layout.status_code.write(self._local_status(), numbers)
        return numbers, self.courier.start_status(numbers)

    def _complaint(self) -> str:
        """How this rank has broken a contract in this backward, if it has."""
        if not self._step.telling:
            return ""
        came = self._step.came_though_left_out
        if came:
            return (
                "skip_all_reduce_unused_params=True promised that parameters unused in the first step stay unused, "
                f"but these received gradients: {', '.join(sorted(came))}."
            )
        return self.ledger.complaint(self._step.fires, self.channel.rank)
