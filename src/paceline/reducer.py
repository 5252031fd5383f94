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

import enum
import warnings
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from paceline import _torch, exchange
from paceline.bucket import SMALL_NUMEL, Allocator, Bucket, CommHook, GradBucket, Slot, empty_flat
from paceline.control import Channel
from paceline.errors import ContractError, DisagreementError, StateError
from paceline.higher_order import average_with_graph, blocking_sum
from paceline.messages import graph_changed_message
from paceline.plan import BucketPlan, make_plan
from paceline.roster import SPEC_FIELDS, Roster
from paceline.status import CARRIERS, Status
from paceline.telemetry import Telemetry, now_ns


class Phase(enum.Enum):
    IDLE = "no backward is running"
    BACKWARD = "entered with the first gradient (or output) of a backward, left when it has ended"
    INTERRUPTED = "entered when a backward raised; left by the next one if nothing was under way"
    BROKEN = "entered when communication failed; never left"


@dataclass(frozen=True)
class ReducerOptions:
    """What the constructor of the wrapper promises and wishes."""

    caps_bytes: tuple[int, ...]
    static_graph: bool = False
    """Every backward uses the same parameters, as often: checked."""
    skip_unused: bool = False
    """Parameters that no rank used in the first step are never used: not reduced, checked."""
    rebuild: bool = True
    """Put the buckets into the order in which gradients were ready in the first step."""
    stable_storage: bool = False
    """The user promised not to keep gradients over a step (``gradient_as_bucket_view=True``)."""
    copy_in_batches: bool = False
    """Copy all gradients of a bucket together when it leaves, large ones too."""


@dataclass
class _Step:
    """What belongs to the backward that runs now."""

    syncing: bool
    create_graph: bool = False
    scale: float = 1.0
    next_bucket: int = 0
    complaint: str = ""
    finishes: list[tuple[Bucket, exchange.Finish]] = field(default_factory=list)
    ready_order: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)


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
        allocator: Allocator = empty_flat,
    ) -> None:
        self.group = group
        self.channel = channel
        self.options = options
        self.telemetry = Telemetry()
        self.enabled = True
        """Whether the next backward synchronises (``no_sync``)."""
        self.weight: float | None = None
        """What the backwards of a ``weighted`` block weigh."""
        self.divide_by_participants = False
        self.hook: CommHook | None = None
        self.hook_state: object = None
        self.hook_overlaps = True
        self.reduce_dtype: torch.dtype | None = None
        self.on_finish: list[Callable[[], None]] = []
        """Called when a synchronised backward is complete (buffer hooks' futures)."""
        self.forwards_pending = False
        """A forward has run whose backward has not: what it saved must stay as it is."""
        self.phase = Phase.IDLE
        self.last_error = ""
        self.has_rebuilt = False
        self._needed_alone = False
        self._warned_of_eval = False
        self.graph_is_static = True
        self.ready_order: list[int] = []
        self.used_counts: list[float] = []
        self._reread = reread
        self._allocator = allocator
        self._slots_by_id: dict[int, Slot] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._step = _Step(syncing=False)
        self._weight_total = 0.0
        self._weighing = False
        self._unused_hint: frozenset[int] | None = None
        self._left_out: frozenset[int] = frozenset()
        self._static_fires: list[int] | None = None
        self._last_fired: list[bool] | None = None
        self._finalizer = weakref.finalize(self, _remove_all, self._handles)
        self.adopt(roster)

    # -- the roster and the plan ---------------------------------------------------------------------

    def adopt(self, roster: Roster) -> None:
        """Take ``roster``'s parameters as the ones to reduce."""
        self.roster = roster
        wanted = {id(p) for p, spec in zip(roster.params, roster.specs, strict=True) if spec.requires_grad}
        for key in self._slots_by_id.keys() - wanted:
            del self._slots_by_id[key]
            if key in self._handles:
                self._handles.pop(key).remove()
        for index, (param, spec) in enumerate(zip(roster.params, roster.specs, strict=True)):
            if id(param) in wanted:
                slot = self._slots_by_id.setdefault(id(param), Slot(index, spec.name, param, deferred=True))
                slot.index, slot.name = index, spec.name
        self._static_fires = self._last_fired = None
        self._left_out = frozenset()
        self.first_plan = make_plan(roster.specs, caps_bytes=self.options.caps_bytes)
        self._use(self.first_plan)
        self.listen()

    def _use(self, plan: BucketPlan) -> None:
        """Make the buckets of ``plan``; storage comes with the next backward that needs it."""
        self.plan = plan
        slot_of = {slot.index: slot for slot in self._slots_by_id.values()}
        self._buckets = [Bucket(spec, [slot_of[i] for i in spec.params]) for spec in plan.buckets]
        self._bucket_of: list[Bucket | None] = [None] * len(plan.specs)
        self._slots: list[Slot] = []
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._bucket_of[slot.index] = bucket
                slot.view = None
                in_backward = hasattr(slot.param, "_in_backward_optimizers")
                # An optimizer that waits for this gradient must not find the local one.
                slot.deferred = not in_backward and (self.options.copy_in_batches or slot.param.numel() <= SMALL_NUMEL)
        self._slots = sorted((s for b in self._buckets for s in b.slots), key=lambda slot: slot.index)
        self._place = {slot.index: n for n, slot in enumerate(self._slots)}
        self._status_numel = Status.numel(len(self._buckets), len(self._slots))
        self._n_in_backward = 0

    @property
    def param_ids(self) -> Container[int]:
        return self._slots_by_id.keys()

    @property
    def active(self) -> bool:
        """Whether there is anything to do at all: one rank alone needs no buckets."""
        return self.channel.size > 1 or self._needed_alone

    def activate(self) -> None:
        """Use buckets even on a rank that is alone: something needs them."""
        self._needed_alone = True
        self.listen()

    def use_hook(self, hook: CommHook | None, state: object, *, overlaps: bool) -> None:
        """Let ``hook`` communicate the buckets; None for the plain average."""
        self.hook, self.hook_state, self.hook_overlaps = hook, state, overlaps
        if hook is not None:
            self.activate()

    def move_to(self, group: dist.ProcessGroup, channel: Channel) -> None:
        """Reduce over another group from now on."""
        if self.phase is Phase.BACKWARD:
            raise StateError("The process group cannot be changed while a backward is running.")
        self.group, self.channel = group, channel
        self.phase = Phase.IDLE
        self._step = _Step(syncing=False)
        self.listen()

    def listen(self) -> None:
        """Register for the parameters' gradients (not on a rank that is alone)."""
        if not self.active:
            return
        ref = weakref.ref(self)
        for key, slot in self._slots_by_id.items():
            if key not in self._handles:
                self._handles[key] = slot.param.register_post_accumulate_grad_hook(_ready_hook(ref, slot))

    def stop_listening(self) -> None:
        _remove_all(self._handles)

    def set_static_graph(self) -> None:
        """Promise it after construction; too late once a backward has been seen."""
        if self.telemetry.steps or self.phase is Phase.BACKWARD:
            raise StateError("set_static_graph() should be called before training loop starts, not after a backward.")
        self.options = replace(self.options, static_graph=True, rebuild=True)

    def unfinished(self) -> list[str]:
        """The parameters whose gradients a backward that has begun still waits for."""
        if self.phase not in (Phase.BACKWARD, Phase.INTERRUPTED):
            return []
        return [slot.name for slot in self._slots if slot.left > 0] or ["(none: it raised at the end)"]

    def unused_bytes(self) -> int:
        """The size of the parameters that no rank used in the last synchronised backward."""
        pairs = zip(self._slots, self.used_counts, strict=False)
        return sum(slot.param.numel() * slot.param.element_size() for slot, used in pairs if not used)

    def place_of(self, index: int) -> int:
        """The number of a parameter among the trainable ones."""
        return self._place[index]

    def trainable(self) -> list[Slot]:
        """The slots of all parameters that are reduced, in registration order."""
        return self._slots

    def yield_to(self, other: Reducer) -> None:
        """Let ``other``, a wrapper of some of the same parameters, reduce those."""
        for key in self._slots_by_id.keys() & other._slots_by_id.keys():
            self._slots_by_id[key].owned = False
            other._slots_by_id[key].owned = True

    def shares_with(self, other: Reducer) -> bool:
        return not self._slots_by_id.keys().isdisjoint(other._slots_by_id.keys())

    # -- a backward begins ---------------------------------------------------------------------------

    def output_needed(self, probe: Node) -> None:
        """An output of forward takes part in a backward: it counts even if it uses no parameter.

        ``probe`` is a leaf of that output: ``autograd.grad`` does not reach it, and is none of our business.
        """
        if self.phase is not Phase.BACKWARD and self.active and _torch.will_execute(probe):
            self.start_backward(through_forward=True)

    def expect_unused(self, unused: frozenset[int]) -> None:
        """These parameters (by index) cannot be reached from forward's output (``find_unused_parameters``)."""
        hint = self._unused_hint
        self._unused_hint = unused if hint is None else hint & unused

    def start_backward(self, *, through_forward: bool = False) -> None:
        self.check_usable()
        syncing = self.enabled and (through_forward or self.forwards_pending or self._is_training())
        self._watch_backward()
        if self.roster.changed():
            self._replan()
        if _torch.optimizers_in_backward() != self._n_in_backward:
            self._take_optimizers()
        self.phase = Phase.BACKWARD
        step = self._step = _Step(syncing=syncing, create_graph=torch.is_grad_enabled())
        self.telemetry.current.backward_start_ns = now_ns()
        self._begin_weighing()
        weighing = self._weighing or self.divide_by_participants
        if not weighing and self.hook is None:
            step.scale = 1.0 / self.channel.size
        if not step.create_graph:
            self._prepare_storage()
        for bucket in self._buckets:
            bucket.reset()
        if step.syncing and self._unused_hint is not None:
            self._apply_unused_hint(self._unused_hint)
            self._unused_hint = None

    def _take_optimizers(self) -> None:
        """Optimizers that run in backward are to find the averaged gradient: from now on we call them."""
        self._n_in_backward = _torch.optimizers_in_backward()
        for slot in self._slots:
            slot.steps_in_backward = _torch.take_optimizers_in_backward(slot.param)

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

    def _watch_backward(self) -> None:
        """Be told when the backward that runs now, the outermost one, has ended or has failed."""
        end = _BackwardEnd(self)
        _torch.queue_callback(end)

    def _apply_unused_hint(self, unused: frozenset[int]) -> None:
        for bucket in self._buckets:
            for slot in bucket.slots:
                if slot.index in unused and slot.owned and slot.expected:
                    bucket.left -= 1
                    slot.left = 0

    def _begin_weighing(self) -> None:
        if self.weight is not None and self._weight_total == 0.0:
            # What the gradients hold from before was not weighted: it is set aside until afterwards.
            for slot in self._slots:
                if slot.param.grad is not None and slot.base is None:
                    slot.base, slot.param.grad = slot.param.grad.clone(), None
        self._weighing = self._weighing or self.weight is not None
        self._weight_total += 1.0 if self.weight is None else self.weight

    def _prepare_storage(self) -> None:
        """See to it that every bucket has storage that nobody else looks at."""
        last = self._buckets[-1]
        for bucket in self._buckets:
            if bucket.spec.sparse:
                continue
            # A gradient of an earlier step that somebody kept is his, once the parameters have let go of it.
            if not self.options.stable_storage and bucket.is_kept_by_somebody() and bucket.is_let_go():
                bucket.release()
            if bucket.flat is None:
                # Room for the status even while a hook keeps it from riding there: hooks come and go.
                bucket.allocate(self._allocator, tail_numel=self._status_numel if bucket is last else 0)

    def _replan(self) -> None:
        """The module's parameters have changed since the plan was made: agree on a new one."""
        newer = self._reread()
        reason = self.roster.difference(newer)
        self.channel.announce_replan(reason)
        self.adopt(newer)
        self.channel.agree("parameters after a change", newer.rows(), SPEC_FIELDS)
        if not self._slots:
            raise StateError(f"No trainable parameter is left ({reason}); there is nothing to synchronise.")

    # -- gradients become ready ----------------------------------------------------------------------

    def grad_ready(self, slot: Slot) -> None:
        if not slot.owned:
            return
        if self.phase is not Phase.BACKWARD:
            self.start_backward()
        step = self._step
        slot.fires += 1
        slot.used = True
        bucket = self._bucket_of[slot.index]
        if bucket is None:
            # Left out of the plan by a contract; finish() will complain.
            return
        if not step.syncing:
            if not (slot.deferred or step.create_graph or bucket.spec.sparse):
                slot.absorb(1.0)
                slot.param.grad = slot.view
                slot.filled = False
            return
        if bucket.launched:
            self._keep_late(slot, bucket)
            return
        if not (slot.deferred or step.create_graph or bucket.spec.sparse):
            slot.absorb(step.scale)
        slot.left -= 1
        step.ready_order.append(slot.index)
        if slot.left == 0:
            bucket.left -= 1
            if bucket.left == 0:
                self._launch_ready()

    def _keep_late(self, slot: Slot, bucket: Bucket) -> None:
        grad = slot.param.grad
        assert grad is not None, "autograd has just put it there"
        slot.late = grad if slot.late is None else slot.late + grad
        slot.param.grad = None
        self._step.late.add(bucket.spec.index)

    def _launch_ready(self) -> None:
        """Start the buckets whose turn it is. The last one waits for the end: it carries the status."""
        step = self._step
        if step.create_graph:
            return
        while step.next_bucket < len(self._buckets) - 1 and self._buckets[step.next_bucket].left <= 0:
            self._launch(self._buckets[step.next_bucket])
            step.next_bucket += 1

    def _launch(self, bucket: Bucket) -> None:
        step = self._step
        times = self.telemetry.current
        if not times.comm_start_ns:
            times.comm_start_ns = now_ns()
        bucket.launched = True
        if bucket.spec.sparse:
            step.finishes.append((bucket, self._launch_sparse(bucket)))
            return
        with torch.no_grad():
            bucket.gather(step.scale)
        assert bucket.payload is not None
        assert bucket.flat is not None
        if bucket.tail is not None and self._can_carry(bucket):
            self._local_status().write(bucket.tail)
            finish = self._start(bucket, bucket.flat)
        else:
            finish = self._start(bucket, bucket.payload)
        step.finishes.append((bucket, finish))

    def _start(self, bucket: Bucket, buffer: Tensor) -> exchange.Finish:
        if self.hook is not None:
            is_last = bucket is self._buckets[-1]
            return exchange.start_hook(
                self.hook,
                self.hook_state,
                GradBucket(bucket, is_last=is_last, buffer=buffer),
                buffer,
                channel=self.channel,
                what=self._describe(bucket),
                overlaps=self.hook_overlaps,
            )
        return exchange.start_all_reduce(
            buffer,
            group=self.group,
            channel=self.channel,
            what=self._describe(bucket),
            reduce_dtype=self.reduce_dtype,
        )

    def _launch_sparse(self, bucket: Bucket) -> exchange.Finish:
        (slot,) = bucket.slots
        grad = slot.param.grad if slot.owned else None
        if grad is not None and not slot.used:
            slot.saved = grad
        slot.param.grad = None if slot.owned else slot.param.grad
        return self._start_sparse(slot, bucket, grad)

    def _start_sparse(self, slot: Slot, bucket: Bucket, grad: Tensor | None) -> exchange.Finish:
        was_dense = grad is not None and grad.layout is torch.strided
        if grad is None:
            index = torch.empty((1, 0), dtype=torch.long, device=slot.param.device)
            grad = torch.sparse_coo_tensor(
                index,
                slot.param.new_empty((0, *slot.param.shape[1:])),
                slot.param.shape,
                check_invariants=False,
            )
        elif was_dense:
            # Tied to a dense use: rows travel all the same, as the other ranks expect a sparse exchange.
            grad = grad.to_sparse(1)

        def deliver(total: Tensor) -> None:
            total = total.to_dense() if was_dense else total
            slot.view = total if slot.view is None else slot.view + total

        slot.view = None if slot.late is None else slot.view
        if self.hook is not None:
            sparse_bucket = GradBucket(bucket, is_last=bucket is self._buckets[-1], buffer=grad)
            future = self.hook(self.hook_state, sparse_bucket)
            return lambda: deliver(self.channel.wait_future(future, self._describe(bucket)))
        return exchange.start_sparse_all_reduce(
            grad.detach() * self._step.scale,
            group=self.group,
            channel=self.channel,
            what=self._describe(bucket),
            deliver=deliver,
        )

    def _describe(self, bucket: Bucket) -> str:
        names = [slot.name for slot in bucket.slots]
        told = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"bucket {bucket.spec.index} ({told})"

    # -- backward ends -------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """The outermost backward has ended on this rank."""
        self.telemetry.current.backward_end_ns = now_ns()
        self.forwards_pending = False
        step = self._step
        if not step.syncing:
            self._settle()
            self.phase = Phase.IDLE
            return
        try:
            self._finish()
        except DisagreementError as error:
            # All ranks raise it together, with nothing under way: the next step may go on.
            self.phase = Phase.IDLE
            self.last_error = str(error)
            raise
        except BaseException as error:
            self.phase = Phase.BROKEN
            self.last_error = str(error)
            self.channel.report("backward", error)
            raise

    def interrupt_backward(self) -> None:
        """The backward that was running raised an exception; the caller sees that one."""
        if self.phase is not Phase.BACKWARD:
            return
        self.channel.report("backward", None)
        self.phase = Phase.INTERRUPTED

    def check_usable(self) -> None:
        if self.phase is Phase.BROKEN:
            raise StateError(
                "This wrapper's communication failed earlier (see the first error); its process group is out of "
                "step with the other ranks. Start the job again, or build a new process group and wrapper."
            )
        if self.phase is Phase.INTERRUPTED:
            under_way = len(self._step.finishes)
            if under_way:
                raise StateError(
                    f"The previous backward on rank {self.channel.rank} raised while {under_way} buckets were "
                    "being reduced, which the other ranks cannot undo. Start the job again, or build a new "
                    "process group and wrapper."
                )
            self.phase = Phase.IDLE
        if self.channel.given_up():
            self.phase = Phase.BROKEN
            raise StateError(
                f"An earlier step raised on this rank ({self.channel.rank}) and the other ranks have given up because "
                "of it. Start the job again, or build a new process group and wrapper."
            )
        self.channel.retract()

    def _settle(self) -> None:
        """After a backward without synchronisation: gradients move into their buckets, nothing else."""
        if self._step.create_graph:
            return
        views, grads, owners = [], [], []
        for slot in self._slots:
            grad, view = slot.param.grad, slot.view
            if not (slot.fires and slot.deferred) or view is None or grad is None or grad is view or view.is_sparse:
                continue
            views.append(view)
            grads.append(grad if grad.layout is torch.strided else grad.to_dense())
            owners.append(slot.param)
        if views:
            with torch.no_grad():
                _torch.copy_each(views, grads)
            for param, view in zip(owners, views, strict=True):
                param.grad = view

    def shadow_backward(self) -> None:
        """Take part in the others' synchronisation with nothing to add (a rank that has run out of inputs)."""
        self.check_usable()
        self.phase = Phase.BACKWARD
        self._step = _Step(syncing=True)
        self._prepare_storage()
        for bucket in self._buckets:
            bucket.reset()
            for slot in bucket.slots:
                # Whatever it holds stays out of the sum.
                slot.used, slot.param.grad = False, None
        self._weight_total, self._weighing = 0.0, self.divide_by_participants
        try:
            self._finish()
        finally:
            for slot in self._slots:
                slot.param.grad = None

    def _finish(self) -> None:
        """Send what has not left, wait for everything, hand the averages out."""
        step, times = self._step, self.telemetry.current
        step.complaint = self._complaint()
        if step.create_graph and self.hook is None:
            status = self._finish_with_graph()
        else:
            for bucket in self._buckets[step.next_bucket :]:
                self._launch(bucket)
            status = self._exchange_status()
            times.comm_end_ns = now_ns()
            with torch.no_grad():
                self._second_round(status)
                self._unweigh(status)
                self._hand_out(status)
        for callback in self.on_finish:
            callback()
        self.on_finish.clear()
        self._learn(status)
        self.telemetry.finish_step()
        self.phase = Phase.IDLE
        if status.complaints:
            said = self.channel.gather("complaint", step.complaint)
            raise ContractError("\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(said) if text))

    def _finish_with_graph(self) -> Status:
        """``create_graph=True``: the same exchange, but differentiable, and all of it at the end."""
        carrier: Tensor | None = None
        averaged: list[tuple[Bucket, list[Tensor]]] = []
        for bucket in self._buckets:
            tail = None
            if bucket is self._buckets[-1] and self._can_carry(bucket):
                tail = bucket.slots[0].param.new_empty(self._status_numel)
                self._local_status().write(tail)
            grads, carrier = average_with_graph(bucket, self._step.scale, blocking_sum(self.group), tail)
            averaged.append((bucket, grads))
        status = self._read_status(carrier)
        factor = self._weight_factor(status)
        for bucket, grads in averaged:
            for slot, grad in zip(bucket.slots, grads, strict=True):
                if slot.owned and status.used[self._place[slot.index]]:
                    slot.param.grad = grad if factor is None else grad * factor
        return status

    def _second_round(self, status: Status) -> None:
        """[Note: late gradients]: send the buckets again for which some rank has a late contribution."""
        for bucket, ranks in zip(self._buckets, status.late, strict=True):
            if not ranks:
                continue
            if bucket.spec.sparse:
                (slot,) = bucket.slots
                self._start_sparse(slot, bucket, slot.late)()
                continue
            assert bucket.payload is not None
            scratch = torch.zeros_like(bucket.payload)
            for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
                if slot.late is not None:
                    place = scratch.as_strided(slot.param.shape, _stride_of(slot), offset)
                    torch.mul(slot.late, self._step.scale, out=place)
            self._start(bucket, scratch)()
            bucket.payload.add_(scratch)

    def _weight_factor(self, status: Status) -> float | None:
        """What the weighted sums are to be multiplied by; None when nothing was weighed."""
        if not status.weighing:
            return None
        # A comm hook has divided by the number of ranks already. No weight at all: no gradient.
        divided = self.channel.size if self.hook is not None else 1
        return divided / status.weight if status.weight else 0.0

    def _unweigh(self, status: Status) -> None:
        factor = self._weight_factor(status)
        if factor is None:
            return
        for bucket in self._buckets:
            if bucket.payload is not None:
                bucket.payload.mul_(factor)
            else:
                (slot,) = bucket.slots
                slot.view = None if slot.view is None else slot.view * factor

    def _hand_out(self, status: Status) -> None:
        """Give every parameter its gradient back: averaged if anybody used it, untouched if nobody did."""
        for slot, used in zip(self._slots, status.used, strict=True):
            if not slot.owned:
                continue
            param = slot.param
            if used:
                param.grad = slot.view
                if slot.base is not None:
                    param.grad.add_(slot.base)  # type: ignore[union-attr]
            elif slot.saved is not None:
                saved, slot.saved = slot.saved, None
                if slot.view is not None and saved.shape == slot.view.shape and not saved.is_sparse:
                    slot.view.copy_(saved)
                    saved = slot.view
                param.grad = saved
            elif slot.base is not None:
                param.grad = slot.base
            slot.base = None
            if used and slot.steps_in_backward:
                for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                param.grad = None

    # -- afterwards ----------------------------------------------------------------------------------

    def _learn(self, status: Status) -> None:
        """Remember what this backward showed: how often gradients come, in which order, which are unused."""
        first = not self.telemetry.steps
        order = self._step.ready_order
        self.used_counts = status.used
        fired = [slot.fires > 0 for slot in self._slots]
        self.graph_is_static &= self._last_fired in (None, fired)
        self._last_fired = fired
        if self.options.static_graph and (self._static_fires is None or status.complaints):
            # After a broken promise, what has just been seen is what the next backward is held to.
            self._static_fires = [slot.fires for slot in self._slots]
        for slot in self._slots:
            if slot.fires > slot.expected or (first and self.options.rebuild):
                slot.expected = slot.fires
            slot.used = False
        self._weight_total, self._weighing = 0.0, False
        # A rank that takes part with nothing to add has seen no order; rank 0's is what counts.
        if self.options.rebuild and not self.has_rebuilt:
            self._rebuild(order)
        if self.options.skip_unused and first:
            self._leave_out(status)

    def _rebuild(self, observed: Sequence[int]) -> None:
        """Make the plan anew in the order in which rank 0's gradients became ready."""
        # A gradient that came several times was ready with the last of them.
        seen = dict.fromkeys(reversed(observed))
        ready = list(reversed(seen))
        self.ready_order = [self._place[i] for i in ready]
        order = ready + [i for i in self.plan.order if i not in seen]
        if self.channel.size > 1:
            shared = torch.tensor(order, dtype=torch.int64, device=self._status_device())
            work = dist.broadcast(shared, group_src=0, group=self.group, async_op=True)
            assert work is not None
            self.channel.wait(work, "the broadcast of the order of buckets")
            order = shared.tolist()
        self.has_rebuilt = True
        plan = make_plan(self.plan.specs, caps_bytes=self.options.caps_bytes, order=order)
        if plan.buckets != self.plan.buckets:
            self._use(plan)

    def _leave_out(self, status: Status) -> None:
        unused = frozenset(slot.index for slot, n in zip(self._slots, status.used, strict=True) if not n)
        if unused and len(unused) < len(self._slots):
            self._left_out = unused
            order = [i for i in self.plan.order if i not in unused]
            self._use(make_plan(self.plan.specs, caps_bytes=self.options.caps_bytes, order=order, leave_out=unused))

    # -- status --------------------------------------------------------------------------------------

    def _can_carry(self, bucket: Bucket) -> bool:
        """[Note: the last bucket carries the status]: whether this one can."""
        param = bucket.slots[0].param
        return (
            self.hook is None
            and self.reduce_dtype is None
            and not bucket.spec.sparse
            and param.dtype in CARRIERS
            and param.device.type == "cpu"
        )

    def _local_status(self) -> Status:
        step = self._step
        return Status(
            self._weight_total,
            float(self._weighing or self.divide_by_participants),
            float(bool(step.complaint)),
            [float(bucket.spec.index in step.late) for bucket in self._buckets],
            [float(slot.used and slot.owned) for slot in self._slots],
        )

    def _exchange_status(self) -> Status:
        """Wait for all buckets; everybody's status comes with the last one, or beside it."""
        last = self._buckets[-1]
        if self._can_carry(last):
            self._wait_for_buckets()
            return self._read_status(last.tail)
        beside, finish = self._start_status()
        self._wait_for_buckets()
        finish()
        return self._checked(Status.read(beside, len(self._buckets)))

    def _wait_for_buckets(self) -> None:
        for _, finish in self._step.finishes:
            finish()
        self.telemetry.buckets_reduced = len(self._step.finishes)
        self.telemetry.sent_bytes = self.plan.size_bytes

    def _start_status(self) -> tuple[Tensor, exchange.Finish]:
        beside = torch.empty(self._status_numel, dtype=torch.float64, device=self._status_device())
        self._local_status().write(beside)
        if self.channel.size == 1:
            return beside, lambda: None
        finish = exchange.start_all_reduce(
            beside, group=self.group, channel=self.channel, what="the status", reduce_dtype=None
        )
        return beside, finish

    def _read_status(self, carrier: Tensor | None) -> Status:
        if carrier is None:
            carrier, finish = self._start_status()
            finish()
        return self._checked(Status.read(carrier, len(self._buckets)))

    def _status_device(self) -> torch.device:
        """Where the status travels: on the host where the group can, as reading it must not stall a device."""
        device = self._slots[0].param.device
        if device.type != "cpu" and "cpu:" in str(dist.get_backend_config(self.group)):
            return torch.device("cpu")
        return device

    def _checked(self, status: Status) -> Status:
        if status.weighing not in (0.0, float(self.channel.size)):
            raise DisagreementError(
                f"{status.weighing:.0f} of {self.channel.size} ranks weighed their backward and the others did "
                f"not (this rank, {self.channel.rank}, {'did' if self._weighing else 'did not'}). Use "
                "`with ddp.weighted(n):` around backward on every rank or on none."
            )
        return status

    def _complaint(self) -> str:
        """How this rank has broken a contract in this backward, if it has."""
        if self._left_out:
            out = [slot.name for slot in self._slots_by_id.values() if slot.index in self._left_out and slot.fires]
            if out:
                return (
                    "skip_all_reduce_unused_params=True promised that parameters unused in the first step stay "
                    f"unused, but these received gradients: {', '.join(out)}."
                )
        if self._static_fires is None:
            return ""
        pairs = list(zip(self._slots, self._static_fires, strict=True))
        newly = [slot.index for slot, before in pairs if slot.fires and not before]
        missing = [slot.index for slot, before in pairs if before and not slot.fires]
        if not (newly or missing):
            return ""
        return graph_changed_message(self.plan, self.channel.rank, newly=newly, missing=missing, place=self._place)


class _BackwardEnd:
    """Called by the engine when a backward has ended; dropped by it uncalled when that backward raised."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._dropped = weakref.finalize(self, _interrupted, self._reducer)
        self._dropped.atexit = False

    def __call__(self) -> None:
        outer = _torch.current_node()
        if outer is not None:
            # This backward ran inside a node of another one (reentrant checkpointing): wait for that one.
            # The node's own hook runs in the outer backward, where the engine takes our callback.
            def requeue(*_: object) -> None:
                handle.remove()
                _torch.queue_callback(self)

            handle: RemovableHandle = outer.register_hook(requeue)
            return
        self._dropped.detach()
        reducer = self._reducer()
        if reducer is not None:
            reducer.end_backward()


def _interrupted(ref: weakref.ref[Reducer]) -> None:
    reducer = ref()
    if reducer is not None:
        reducer.interrupt_backward()


def _ready_hook(ref: weakref.ref[Reducer], slot: Slot) -> Callable[[Tensor], None]:
    # Weak: a wrapper that is dropped must take its hooks off the module at once, not when gc comes by.
    def grad_ready(param: Tensor) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.grad_ready(slot)

    return grad_ready


def _remove_all(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


def _stride_of(slot: Slot) -> tuple[int, ...]:
    assert slot.view is not None
    return slot.view.stride()
