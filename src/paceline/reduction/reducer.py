"""The phases of a step: a backward begins, gradients become ready, it ends with averages; or it fails.

Autograd alone drives it: a hook on each parameter says *ready*, and a callback of the engine says *over*. What forward
did, or whether it went through the wrapper at all, does not matter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from paceline import _torch
from paceline.control import Channel
from paceline.errors import ContractError, DisagreementError, StateError
from paceline.gradients.ledger import Ledger
from paceline.gradients.plan import BucketPlan
from paceline.gradients.roster import Roster
from paceline.gradients.slots import Slot, Slots
from paceline.reduction import turns
from paceline.reduction.backward import Backward
from paceline.reduction.backward_end import BackwardEnd
from paceline.reduction.early_gradients import Early, StandIns, give_back
from paceline.reduction.exchange import Exchange
from paceline.reduction.gradient_hooks import HookTable, call_others
from paceline.reduction.higher_order import average_with_graph
from paceline.reduction.inbox import Inbox
from paceline.reduction.origin import Origins
from paceline.reduction.phase import ForwardToken, Phase
from paceline.reduction.planner import Planner, ReducerOptions
from paceline.reduction.telemetry import Telemetry, now_ns
from paceline.reduction.usable import check_usable
from paceline.reduction.weighing import Weighing


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
        self.exchange = Exchange(group, channel)
        self.planner = Planner(roster, exchange=self.exchange, options=options, reread=reread)
        self.telemetry = Telemetry()
        self.weighing = Weighing()
        self.enabled = True
        """Whether the next backward synchronises (``no_sync``)."""
        self.forwards: weakref.WeakSet[ForwardToken] = weakref.WeakSet()
        """The forwards whose graph is alive and has seen no backward. What they saved must stay as it is."""
        self.around_backward: contextlib.AbstractContextManager[object] | None = None
        """A context that is entered when a backward begins and left when it has ended, in whatever way."""
        self.before_sync: Callable[[], None] | None = None
        """Called when a synchronised backward begins, before it communicates anything (``join``)."""
        self.compare: Callable[[], None] | None = None
        """Called once, before the first collective, if the ranks did not compare at the start what they have."""
        self.on_finish: list[Callable[[], None]] = []
        """Called once each, when a synchronised backward is complete (futures of buffer hooks)."""
        self.verify: Callable[[int, Channel, bool], None] | None = None
        """Called when a synchronised backward is complete, with its number and whether this rank contributed to it."""
        self.phase = Phase.IDLE
        self.last_error = ""
        self.inbox = Inbox(self)
        self._stand_ins = StandIns()
        self.backward: Backward | None = None
        """The backward that runs, or that was interrupted."""
        self.origins = Origins()
        self._needed_alone = False
        self._unused_hint: frozenset[int] | None = None
        self.listen()

    @property
    def channel(self) -> Channel:
        return self.exchange.channel

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
        """Whether there is anything to do: a rank that is alone needs no buckets."""
        return self.exchange.size > 1 or self._needed_alone

    def activate(self) -> None:
        """Use buckets even on a rank that is alone, because something needs them."""
        was_active, self._needed_alone = self.active, True
        if not was_active:
            self.listen()

    def listen(self) -> None:
        if self.active:
            self.inbox.thread.applies = all(spec.device == "cpu" for spec in self.roster.specs)
            self.inbox.listen_to(self.slots.by_id, self.roster.params)

    def stop_listening(self) -> None:
        self.inbox.stop_listening()

    def move_to(self, group: dist.ProcessGroup, channel: Channel) -> None:
        """Reduce over another group from now on. The caller has compared the parameters with that group's ranks."""
        self.exchange.move_to(group, channel)
        # If a comparison was still due, it was with the old group.
        self.compare = None
        self._forget_backward()
        self.phase, self.backward = Phase.IDLE, None
        # The plan is made anew: the ranks of this group may have learnt different things before.
        self.adopt(self.planner.reread())

    def check_idle(self, what: str) -> None:
        if self.phase is Phase.BACKWARD:
            raise StateError(f"{what} while a backward is running; wait for its end.")

    def set_static_graph(self) -> None:
        """Promise a static graph after construction. Once a backward has been seen it is too late."""
        if self.telemetry.steps or self.phase is Phase.BACKWARD:
            raise StateError("set_static_graph() should be called before training loop starts, not after a backward.")
        self.planner.promise_static_graph()

    # -- a backward begins ---------------------------------------------------------------------------

    def output_needed(self, token: ForwardToken, probe: Node) -> None:
        """Hear that an output of forward takes part in a backward. That backward counts even if it uses no parameter.

        ``probe`` is a leaf of that output. ``autograd.grad`` does not reach it, and is not our business.
        """
        if not _torch.will_execute(probe):
            return
        self.forwards.discard(token)
        if self.phase is Phase.BACKWARD:
            self.origins.output_reached()
            return
        if not self.active or self.roster.is_frozen():
            # A module that is frozen as a whole has nothing to synchronise, though a backward may pass through it.
            return
        if not self.slots.shared or any(slot.owned for slot in self.trainable()) or self.roster.changed():
            with self._telling_others():
                self._start_backward(through_forward=True)

    def expect_unused(self, unused: frozenset[int]) -> None:
        """Expect no gradients of these indices: forward's output does not lead there (``find_unused_parameters``)."""
        hint = self._unused_hint
        self._unused_hint = unused if hint is None else hint & unused

    def _start_backward(self, came: Sequence[Slot] = (), *, stranger: str = "", through_forward: bool = False) -> None:
        """Begin a backward. Gradients of the slots ``came``, or of the parameter ``stranger``, have announced it."""
        check_usable(self)
        syncing = self.enabled and (through_forward or self.roster.training())
        changed = syncing and self.roster.changed()
        if changed and through_forward and self.roster.is_frozen_now():
            return
        self.inbox.thread.enter()
        self.origins.begin_backward(output_reached=through_forward)
        if self.enabled and not syncing:
            self.origins.warn_of_eval()
        if syncing and torch.is_grad_enabled() and self.exchange.hook is not None:
            raise StateError(
                "backward(create_graph=True) cannot differentiate through a comm hook. Remove the hook "
                "(remove_comm_hook()), or run this backward inside no_sync()."
            )
        self.channel.step = self.telemetry.steps
        BackwardEnd(self).wait_for()
        # This comes before a new plan, which means other buckets.
        self.weighing.notice(came, stranger)
        if syncing:
            turns.after_others(self, begins=True)
            self.channel.progress.begin_backward(self.telemetry.steps + 1)
            if self.before_sync is not None:
                self.before_sync()
            self.compare_if_due()
            if changed:
                self.adopt(self.planner.agree_on_change(step=self.telemetry.steps))
            self.planner.rebuild_if_due()
        if _torch.optimizers_in_backward() != self.planner.layout.optimizers_taken:
            self.planner.layout.take_optimizers()
        self.telemetry.current.backward_start_ns = now_ns()
        self._begin(syncing=syncing, create_graph=torch.is_grad_enabled())

    def _begin(self, *, syncing: bool, create_graph: bool = False, representative: bool = True) -> Backward:
        """Set everything to the start of a backward."""
        self.phase = Phase.BACKWARD
        if self.around_backward is not None:
            self.around_backward.__enter__()
        self.inbox.begin_backward(averaging=syncing)
        planner, layout = self.planner, self.planner.layout
        self.weighing.begin_backward(layout.slots, syncing=syncing)
        unused: frozenset[int] | None = None
        if syncing:
            unused, self._unused_hint = self._unused_hint, None
        backward = self.backward = Backward(
            layout,
            planner.slots,
            exchange=self.exchange,
            weighing=self.weighing,
            telemetry=self.telemetry,
            origins=self.origins,
            syncing=syncing,
            create_graph=create_graph,
            observing=syncing and planner.observes,
            representative=representative,
            unused=unused or frozenset(),
        )
        if syncing:
            turns.begin(self)
        if syncing and not layout.sharing_is_settled and not planner.is_provisional:
            # This waits for a layout that stays: the buckets of the first step may be about to be made anew. It is a
            # collective, which comes at this place on all ranks.
            layout.share(self.exchange.allocate)
        if not create_graph:
            layout.prepare_storage(is_stable=planner.options.stable_storage)
        return backward

    def compare_if_due(self) -> None:
        """Raise on all ranks if they differ in what they are about to exchange, unless they already compared it."""
        if self.compare is not None:
            self.compare()
            self.compare = None

    # -- gradients become ready ----------------------------------------------------------------------

    def announce(self, slot: Slot) -> None:
        """Say that a slot's gradient is ready, as autograd does. This is for code that drives backward by itself."""
        self.inbox.hook(slot)(slot.leaf)

    def gradients_ready(self, slots: list[Slot]) -> None:
        """Take in the gradients of these slots."""
        try:
            if self.phase is not Phase.BACKWARD:
                self._start_backward(slots)
            assert self.backward is not None
            self.backward.take_in(slots)
        except BaseException as error:
            self.fail(error)
            raise

    def stranger_ready(self, param: Tensor) -> None:
        """Look at a parameter that has a gradient though it was frozen, or not there, when the roster was read.

        A backward that does not synchronise leaves it to the next one that does, which reads the roster anew.
        """
        if self.phase is Phase.BACKWARD:
            return
        name = self.roster.name_now(param)
        if name is None:
            return
        with self._telling_others():
            self._start_backward(stranger=name)
            assert self.backward is not None
            if self.backward.syncing and self.slots.has(param):
                self.backward.take_in([self.slots.of(param)])

    # -- gradients of a compiled backward ------------------------------------------------------------

    def why_not_early(self, param: Tensor) -> str | None:
        """Why a compiled backward should not hand ``param``'s gradient over as soon as it exists; None if it should.

        ``param`` has to be one that this reducer owns.
        """
        if not self.active:
            return "there is only one rank"
        return self.planner.layout.why_not_early(self.slots.of(param))

    def gradients_early(self, come: Sequence[Early]) -> list[Tensor]:
        """Take in gradients that a compiled backward hands over; return what it is to hand to autograd for each.

        See [Note: early gradients] in early_gradients.py.
        """
        with self._telling_others():
            pairs = [(self.slots.of(each.param), each) for each in come]
            if self.phase is not Phase.BACKWARD:
                if not any(_torch.will_execute(slot.node()) for slot, _ in pairs):
                    return [each.copy() for each in come]
                self._start_backward()
            backward = self.backward
            assert backward is not None
            if backward.create_graph:
                return [each.copy() for each in come]
            # Autograd may have brought other gradients before this report: they came first, and are counted first.
            backward.take_in(self.inbox.take())
            return backward.take_early(pairs, self._stand_ins)

    def brings_more(self, slot: Slot) -> bool:
        """Autograd has brought the stand-in of a gradient that was taken early. Return whether more came with it."""
        assert self.backward is not None
        return self._stand_ins.drop(slot, syncing=self.backward.syncing)

    # -- other wrappers in the same backward ---------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup:
        return self.exchange.group

    @property
    def is_sending(self) -> bool:
        """Whether a backward runs that averages gradients."""
        return self.phase is Phase.BACKWARD and self.backward is not None and self.backward.syncing

    def send_all_but_last(self) -> None:
        """Send all buckets but the last, complete or not ([Note: several wrappers in one backward] in turns.py)."""
        assert self.backward is not None
        with self._telling_others():
            self.backward.take_in(self.inbox.take())
            self.backward.launch_all_but_last()

    # -- backward ends -------------------------------------------------------------------------------

    def backward_ended(self) -> None:
        """The outermost backward has ended on this rank."""
        backward = self.backward
        assert backward is not None
        with self._telling_others():
            backward.take_in(self.inbox.take())
            self._stop_collecting()
            self.telemetry.current.backward_end_ns = now_ns()
            if backward.syncing:
                turns.after_others(self, begins=False)
            self._finish(backward)
        if backward.syncing and HookTable.some_are_of_others:
            counts = backward.layout.ledger.counts
            used = [slot.leaf for slot in backward.layout.slots if slot.owned and counts[slot.position]]
            # This is queued because other wrappers may still have to end their part of this backward. An exception of
            # a hook concerns this rank only, and must not keep them from that.
            _torch.queue_callback(partial(call_others, used))

    def _finish(self, backward: Backward) -> None:
        """Have the averages handed out, and learn from what all ranks said."""
        self.inbox.thread.check()
        if backward.syncing:
            by_graph = backward.create_graph and self.exchange.hook is None
            status = average_with_graph(backward) if by_graph else backward.finish()
            for callback in self.on_finish:
                callback()
            self.on_finish.clear()
            self.planner.learn(backward, status)
            self.weighing.end_backward()
            self.origins.end_backward()
            self.telemetry.finish_step()
            if status.complaints:
                said = self.channel.gather("complaint", backward.complaint)
                raise ContractError("\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(said) if text))
            if self.verify is not None:
                self.verify(self.telemetry.steps, self.channel, backward.representative)
        self.inbox.thread.leave()
        self.phase, self.backward = Phase.IDLE, None

    def shadow_backward(self) -> None:
        """Take part in the others' synchronisation with nothing to add (a rank that has run out of inputs)."""
        check_usable(self)
        self.channel.step = self.telemetry.steps
        self.channel.progress.begin_backward(self.telemetry.steps + 1)
        self.compare_if_due()
        self.planner.rebuild_if_due()
        # What its gradients hold stays out of the sum.
        for slot in self.trainable():
            slot.param.grad = None
        self.ledger.used = [0.0] * len(self.trainable())
        backward = self._begin(syncing=True, representative=False)
        self.weighing.take_no_part()
        with self._telling_others():
            self._stop_collecting()
            self._finish(backward)

    def _stop_collecting(self) -> None:
        self.inbox.end_backward()
        if self.around_backward is not None:
            self.around_backward.__exit__(None, None, None)

    # -- failure -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _telling_others(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that something in here raised ``error``."""
        self.last_error = str(error)
        self.inbox.thread.ident = 0
        if isinstance(error, DisagreementError):
            # All ranks raise it together, with nothing under way: the next step may go on.
            self.origins.end_backward()
            self._forget_backward()
            self.phase, self.backward = Phase.IDLE, None
            return
        self.channel.report("backward", error)
        if not isinstance(error, StateError) or self.inbox.thread.crossed:
            # (Any other StateError is a wrong call: nothing was started because of it.)
            self.phase = Phase.BROKEN
            self._forget_backward()

    def backward_raised(self) -> None:
        """An exception, which the caller sees, has ended the backward that was running."""
        self._forget_backward()
        if self.phase is Phase.BACKWARD:
            self.channel.report("backward", None)
            self.phase = Phase.INTERRUPTED

    def _forget_backward(self) -> None:
        """Drop what a backward that came to nothing has left behind."""
        self.inbox.take()
        self._stop_collecting()
        self.inbox.thread.ident = 0
        self.on_finish.clear()
        slots = self.trainable()
        self.ledger.used = [0.0] * len(slots)
        self.weighing.end_backward()
        if self.backward is not None and not self.backward.syncing:
            give_back(slots)
        for slot in slots:
            slot.base = None
            slot.forget()
