"""The phases of a step: a backward begins, gradients become ready, it ends with averages; or it fails.

Driven by autograd alone: a hook on each parameter says *ready*, a callback of the engine says *backward is
over*. What forward did, or whether it went through the wrapper at all, does not matter.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from paceline import _torch, early
from paceline.backward import Backward
from paceline.bucket import CommHook, Slot
from paceline.control import Channel
from paceline.courier import Courier
from paceline.errors import ContractError, DisagreementError, StateError
from paceline.inbox import Inbox
from paceline.ledger import Ledger
from paceline.plan import BucketPlan
from paceline.planner import Planner
from paceline.portion import Portion
from paceline.roster import Roster
from paceline.slots import Slots
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
        self.planner = Planner(roster, courier=self.courier, options=options, reread=reread)
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
        self.compare: Callable[[], None] | None = None
        """Called once, before the first collective of ranks that did not compare what they have at the start."""
        self.on_finish: list[Callable[[], None]] = []
        """Called once, when a synchronised backward is complete (buffer hooks' futures)."""
        self.verify: Callable[[int, Channel, bool], None] | None = None
        """Called when a synchronised backward is complete: how many were, and whether this rank added to it."""
        self.phase = Phase.IDLE
        self.last_error = ""
        self._inbox = Inbox(self)
        self._stand_ins = early.StandIns()
        self._backward: Backward | None = None
        """The one that runs, or that was interrupted."""
        self._needed_alone = False
        self._warned_of_eval = False
        self._unused_hint: frozenset[int] | None = None
        self.listen()

    @property
    def channel(self) -> Channel:
        return self.courier.channel

    @property
    def roster(self) -> Roster:
        return self.planner.roster

    @property
    def slots(self) -> Slots:
        return self.planner.slots

    @property
    def plan(self) -> BucketPlan:
        return self.planner.layout.plan

    @property
    def ledger(self) -> Ledger:
        return self.planner.layout.ledger

    def trainable(self) -> list[Slot]:
        """The slots of all parameters that are reduced, in registration order."""
        return self.planner.layout.slots

    # -- settings ------------------------------------------------------------------------------------

    def adopt(self, roster: Roster) -> None:
        """Take ``roster``'s parameters as the ones to reduce."""
        self.planner.adopt(roster)
        self._unused_hint = None
        self.listen()

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
            self._inbox.listen_to(self.slots.by_id)

    def stop_listening(self) -> None:
        self._inbox.stop_listening()

    def use_hook(
        self, hook: CommHook | None, state: object, *, overlaps: bool = True, takes_group: bool = False
    ) -> None:
        """Let ``hook`` communicate the buckets; None for the plain average."""
        courier = self.courier
        courier.hook, courier.hook_state = hook, state
        courier.hook_overlaps, courier.hook_takes_group = overlaps, takes_group
        if hook is not None:
            self.activate()

    def move_to(self, group: dist.ProcessGroup, channel: Channel) -> None:
        """Reduce over another group from now on, with whose ranks this one has compared what it has."""
        self.courier.move_to(group, channel)
        # If it was due, then in the group before.
        self.compare = None
        self._forget_step()
        self.phase, self._backward = Phase.IDLE, None
        # Anew: the ranks of this group may have learnt different things before.
        self.adopt(self.planner.reread())

    def check_idle(self, what: str) -> None:
        if self.phase is Phase.BACKWARD:
            raise StateError(f"{what} while a backward is running; wait for its end.")

    def set_static_graph(self) -> None:
        """Promise it after construction; too late once a backward has been seen."""
        if self.telemetry.steps or self.phase is Phase.BACKWARD:
            raise StateError("set_static_graph() should be called before training loop starts, not after a backward.")
        self.planner.promise_static_graph()

    def unfinished(self) -> list[str]:
        """The parameters whose gradients a backward that has begun still waits for."""
        if self.phase not in (Phase.BACKWARD, Phase.INTERRUPTED):
            return []
        missing = self._backward.awaited() if self._backward is not None else []
        return missing or ["(none: it raised at the end)"]

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
        if not self.slots.shared or any(slot.owned for slot in self.trainable()):
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
        if syncing:
            self.compare_if_due()
        if syncing and self.roster.changed():
            self.adopt(self.planner.agree_on_change(step=self.telemetry.steps))
        if syncing:
            self.planner.rebuild_if_due()
        if _torch.optimizers_in_backward() != self.planner.layout.optimizers_taken:
            self.planner.layout.take_optimizers()
        self.telemetry.current.backward_start_ns = now_ns()
        self._begin(syncing=syncing, create_graph=torch.is_grad_enabled())

    def _begin(self, *, syncing: bool, create_graph: bool = False) -> Backward:
        """Set everything to the start of a backward."""
        self.phase = Phase.BACKWARD
        if self.around_backward is not None:
            self.around_backward.__enter__()
        self._inbox.begin_backward()
        planner, layout = self.planner, self.planner.layout
        self.weighing.begin_backward(layout.slots, syncing=syncing)
        step = Step(
            syncing,
            create_graph,
            observing=syncing and planner.observes,
            fires=[0] * len(layout.slots),
            left=layout.ledger.expected.copy(),
        )
        backward = self._backward = Backward(
            layout, planner.slots, step, courier=self.courier, weighing=self.weighing, telemetry=self.telemetry
        )
        if syncing and not layout.sharing_is_settled and not planner.is_provisional:
            # Not in a first step whose buckets are about to be made anew. All ranks are here, with nothing under way.
            layout.share(self.courier.allocate)
        if not create_graph:
            layout.prepare_storage(is_stable=planner.options.stable_storage)
        if syncing:
            unused, self._unused_hint = self._unused_hint, None
            backward.expect(unused=unused or frozenset())
        return backward

    def compare_if_due(self) -> None:
        """Raise on all ranks if they differ in what they are about to exchange, and have not looked yet."""
        if self.compare is not None:
            self.compare()
            self.compare = None

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

    # -- gradients become ready ----------------------------------------------------------------------

    def announce(self, slot: Slot) -> None:
        """Say that a slot's gradient is ready, as autograd does; for who drives backward in another way."""
        self._inbox.hook(slot)(slot.leaf)

    def gradients_ready(self) -> None:
        """Look at what is in the inbox."""
        try:
            if self.phase is not Phase.BACKWARD:
                self._start_backward()
            self._take_in()
        except BaseException as error:
            self._tell_others(error)
            raise

    def _take_in(self) -> Backward:
        backward = self._backward
        assert backward is not None
        backward.take_in(self._inbox.take())
        return backward

    # -- gradients of a compiled backward ------------------------------------------------------------

    def why_not_early(self, param: Tensor) -> str | None:
        """Why a compiled backward should not hand ``param``'s gradient over as soon as it exists; None if it should.

        Only of parameters that this one owns.
        """
        slot, layout = self.slots.of(param), self.planner.layout
        if not self.active:
            return "there is one rank only"
        if isinstance(slot.param, Portion):
            return "it is a DTensor, whose gradient is brought to its placement first"
        if slot.bucket < 0:
            return "no rank used it in the first step (skip_all_reduce_unused_params)"
        if layout.buckets[slot.bucket].spec.sparse:
            return "its gradient is sparse"
        if len(layout.buckets) == 1:
            return "there is one bucket, which leaves when backward has ended"
        return None

    def gradients_early(self, come: Sequence[early.Early]) -> list[Tensor]:
        """[Note: early gradients] in early.py: what a compiled backward is to hand to autograd for each of these."""
        try:
            pairs = [(self.slots.of(each.param), each) for each in come]
            if self.phase is not Phase.BACKWARD:
                if not any(_torch.will_execute(slot.node()) for slot, _ in pairs):
                    return [each.copy() for each in come]
                self._start_backward()
            assert self._backward is not None
            if self._backward.step.create_graph:
                return [each.copy() for each in come]
            # In the order in which they came, should autograd have brought others in between.
            return self._take_in().take_early(pairs, self._stand_ins)
        except BaseException as error:
            self._tell_others(error)
            raise

    def brings_more(self, slot: Slot) -> bool:
        """Autograd has brought what stands for a gradient that was taken early; whether more came with it."""
        assert self._backward is not None
        return early.brings_more(slot, self._backward.step, self._stand_ins)

    # -- backward ends -------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The outermost backward has ended on this rank."""
        try:
            backward = self._take_in()
            self._leave_backward()
            self.telemetry.current.backward_end_ns = now_ns()
            if backward.step.syncing:
                self._finish(backward)
            self.phase, self._backward = Phase.IDLE, None
        except BaseException as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: BaseException) -> None:
        """Something in here raised, which the other ranks have to hear of."""
        self.last_error = str(error)
        if isinstance(error, DisagreementError):
            # All ranks raise it together, with nothing under way: the next step may go on.
            self._forget_step()
            self.phase, self._backward = Phase.IDLE, None
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
        slots = self.trainable()
        self.ledger.used = [0.0] * len(slots)
        self.weighing.end_backward()
        if self._backward is not None and not self._backward.step.syncing:
            early.give_back(slots)
        for slot in slots:
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
            under_way = self._backward.step.next_bucket if self._backward is not None else 0
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
        self.compare_if_due()
        self.planner.rebuild_if_due()
        # Whatever its gradients hold stays out of the sum.
        for slot in self.trainable():
            slot.param.grad = None
        self.ledger.used = [0.0] * len(self.trainable())
        backward = self._begin(syncing=True)
        backward.step.telling = False
        self.weighing.take_no_part()
        try:
            self._leave_backward()
            self._finish(backward)
            self.phase, self._backward = Phase.IDLE, None
        except BaseException as error:
            self._tell_others(error)
            raise

    def _finish(self, backward: Backward) -> None:
        """All ranks have come to the end of their backward: have the averages, and what follows from them."""
        status = backward.finish()
        for callback in self.on_finish:
            callback()
        self.on_finish.clear()
        self.planner.learn(backward.step, status)
        self.weighing.end_backward()
        self.telemetry.finish_step()
        if status.complaints:
            said = self.channel.gather("complaint", backward.step.complaint)
            raise ContractError("\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(said) if text))
        if self.verify is not None:
            self.verify(self.telemetry.steps, self.channel, backward.step.telling)
