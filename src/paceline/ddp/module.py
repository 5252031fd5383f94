"""``DistributedDataParallel``: a module whose backward averages gradients across ranks.

The class makes the parts and connects them. The work is done in the parts:

- ``forward``: what happens around a forward of the module
- ``paceline.reduction.reducer``: what happens in a backward
- ``buffers``: how buffers are kept equal; ``join``: uneven inputs; ``precision``: mixed precision; ``verify``: digests
- ``compat``: the names that torch's class has for all of it
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from paceline import hooks
from paceline.control import Channel
from paceline.ddp.arguments import Arguments, BufferPolicy, Caps, Delay, Placement, Switches, as_flag, choose_group
from paceline.ddp.broadcast import CHUNK_BYTES, StateBroadcast
from paceline.ddp.buffers import BufferHook, BufferHookLocation, Buffers, BufferSync
from paceline.ddp.compat import TorchNames, register_as_torch_s_class
from paceline.ddp.forward import Forward, traced_forward
from paceline.ddp.join import DDPJoinHook, Joining
from paceline.ddp.logging_data import Logbook
from paceline.ddp.output_watch import OutputWatch
from paceline.ddp.precision import Swap
from paceline.ddp.start_checks import check_trainable, failure_is_reported
from paceline.ddp.stats import Stats
from paceline.ddp.verify import Verifier
from paceline.errors import BadTypeError, MisuseError, StateError
from paceline.gradients import portion
from paceline.gradients.plan import BucketPlan
from paceline.gradients.roster import SPEC_FIELDS, Roster, ignored_names
from paceline.reduction import newcomers, ownership
from paceline.reduction.exchange import hook_name
from paceline.reduction.reducer import Reducer
from paceline.reduction.weighing import as_weight

# These belong to this process, and are not copied with a wrapper.
_MADE_ANEW = ("process_group", "_reducer", "module_buffers", "buffer_sync", "joining", "_forward", "_swap", "logger")


class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Replicate ``module`` on every rank and average its gradients during backward.

    A drop-in for :class:`torch.nn.parallel.DistributedDataParallel`: the arguments are the same, by name, order and
    default, and ``verify_every`` is new. What holds, and when it stops holding, is in docs/guarantees.md.

    Arguments:
        module: any module with a trainable parameter. Lazy and meta parameters are refused.
        device_ids: None, or a list of one device, to which inputs are moved; None for a module on the CPU.
        output_device: kept as an attribute. Outputs stay where the module left them.
        dim: the dimension along which ``scatter`` and ``gather`` divide and join.
        broadcast_buffers: deprecated. False leaves buffers as they are, also when wrapping.
        init_sync: compare parameters and options between ranks, then take the values of rank 0. False: compare later.
        process_group: the ranks to average over; all of them by default.
        bucket_cap_mb: the size of a bucket in MiB. None chooses by the size of the module.
        find_unused_parameters: buckets do not wait for what outputs do not lead to. Gradients are right without it.
        check_reduction: deprecated, and does nothing.
        gradient_as_bucket_view: you promise to keep no gradient over a step, which saves a check.
        static_graph: you promise that every backward uses the same parameters, which is checked.
        delay_all_reduce_named_params: ``(name, parameter)`` pairs that travel after all others.
        param_to_hook_all_reduce: a parameter that has to be given with the argument above. It triggers nothing.
        mixed_precision: a ``paceline.MixedPrecision``: the dtypes to compute and to reduce in.
        device_mesh: a mesh of one dimension, whose group is used instead of ``process_group``.
        skip_all_reduce_unused_params: do not send what no rank used in the first step, which is checked.
        bucket_cap_mb_list: the sizes of the first, second, ... bucket in MiB. The last one repeats.
        batched_grad_copy: copy large gradients into their bucket in batches too.
        forward_sync_buffers: broadcast the buffers of rank 0 before each forward. None: as ``broadcast_buffers``.
        verify_every: ranks compare digests of all that they hold each time so many steps are over. 0: never.

    >>> import torch, paceline
    >>> world = paceline.init()
    >>> model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> paceline.shutdown()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        verify_every: int = 0,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if not isinstance(module, nn.Module):
            raise BadTypeError(
                f"DistributedDataParallel wraps an nn.Module, not a {type(module).__name__}: {repr(module)[:80]}."
            )
        self.process_group = choose_group(process_group, device_mesh)
        channel = Channel(self.process_group)
        with failure_is_reported(channel):
            self.arguments = Arguments(
                caps=Caps.from_arguments(bucket_cap_mb, bucket_cap_mb_list),
                delay=Delay.from_arguments(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
                buffer_policy=BufferPolicy.from_arguments(broadcast_buffers, forward_sync_buffers),
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                gradient_as_bucket_view=gradient_as_bucket_view,
                batched_grad_copy=batched_grad_copy,
                mixed_precision=mixed_precision,
                verify_every=verify_every,
            )
            sync = as_flag("init_sync", init_sync)
            self.arguments.warn(check_reduction=check_reduction)
            self._keep_for_torch_names(dim, device_mesh)
            self.module = module
            self.parameters_to_ignore = set(ignored_names(module))
            self.switches = Switches.of(self.arguments)
            self.module_buffers = Buffers(module, ignored=frozenset(self.parameters_to_ignore))
            roster = self._read_roster()
            check_trainable(module, roster)
            self.placement = Placement.from_arguments(roster.params, device_ids, output_device)
            self._start(roster, channel, sync=sync)
        if mixed_precision is not None:
            self._set_mixed_precision(mixed_precision)

    def _arguments_now(self) -> Arguments:
        """The arguments that would make this wrapper as it is now."""
        return self.arguments.with_switches(self.switches)

    def _read_roster(self, group: dist.ProcessGroup | None = None) -> Roster:
        """Read the parameters from the module as it is now, and check that ``group`` can reduce them."""
        ignored, delayed = frozenset(self.parameters_to_ignore), self.arguments.delay.names
        roster = Roster(self.module, ignored=ignored, delayed=delayed, tree=self.module_buffers.tree())
        group = group or self.process_group
        portion.check_parameters(roster.specs, roster.params, group)
        if self._arguments_now().buffer_policy.ever:
            portion.check_buffers(self.module_buffers.named(), group)
        return roster

    def _start(self, roster: Roster, channel: Channel, *, sync: bool) -> None:
        """Make the parts that run the steps. With ``sync``, ranks agree first, and all take the state of rank 0."""
        ref = weakref.ref(self)
        arguments = self._arguments_now()
        state: StateBroadcast | None = None
        if sync and channel.size > 1:
            self._compare(channel, roster)
            # The state is on its way while the rest is made.
            with_buffers = arguments.buffer_policy.at_start
            state = StateBroadcast(self._state(roster, with_buffers=with_buffers), source=0, channel=channel)
        # The reducer is made only now: a wrapper that could not be made must not leave hooks on the module.
        reducer = self._reducer = Reducer(
            roster,
            group=self.process_group,
            channel=channel,
            options=arguments.reducer_options(),
            reread=lambda: _alive(ref)._reread(),
        )
        if not sync:
            reducer.compare = lambda: _alive(ref)._compare_as_it_is()
        verifier: Verifier | None = None
        if arguments.verify_every and channel.size > 1:
            ignored = frozenset(self.parameters_to_ignore)
            verifier = Verifier(self.module, every=arguments.verify_every, ignored=ignored)
            reducer.verify = verifier.backward_ended
        self._swap: Swap | None = None
        self.logbook = Logbook()
        device = self.placement.device
        self.buffer_sync = BufferSync(self.module_buffers, reducer, self.switches)
        self.joining = Joining(self, reducer, self.buffer_sync, self.switches)
        self._forward = Forward(
            self,
            self.module,
            reducer,
            placement=self.placement,
            buffers=self.module_buffers,
            buffer_sync=self.buffer_sync,
            joining=self.joining,
            output_watch=OutputWatch(reducer, self.switches, device=device),
            verifier=verifier,
            logbook=self.logbook,
        )
        ownership.enter(reducer)
        newcomers.watch()
        if state is not None:
            state.finish()

    def _reread(self) -> Roster:
        newer = self._read_roster()
        if [id(param) for param in newer.params] != [id(param) for param in self._reducer.roster.params]:
            # Graphs that were compiled before have no taps for the parameters that are new.
            self._forward.mark.renew()
        return newer

    def _compare(self, channel: Channel, roster: Roster) -> None:
        """Raise on all ranks if they differ in what has to be the same on all."""
        options = self._arguments_now().rows(self.module_buffers.named())
        channel.compare("parameters or options", options + roster.rows(), SPEC_FIELDS)

    def _compare_as_it_is(self) -> None:
        self._compare(self.channel, self._reducer.roster)

    def _broadcast_state(self, *, source: int = 0, with_buffers: bool) -> None:
        """Give all ranks the parameters (frozen ones too), and buffers, of rank ``source``."""
        self._broadcast_tensors(self._state(self._reducer.roster, with_buffers=with_buffers), source=source)

    def _state(self, roster: Roster, *, with_buffers: bool) -> list[Tensor]:
        return [*roster.params, *(self.module_buffers.named().values() if with_buffers else ())]

    def _broadcast_tensors(self, tensors: Sequence[Tensor], *, source: int = 0, chunk_bytes: int | None = None) -> None:
        """Overwrite ``tensors`` on all ranks with those of rank ``source`` (its number in this group)."""
        if self.channel.size > 1 and tensors:
            StateBroadcast(
                tensors, source=source, channel=self.channel, chunk_bytes=chunk_bytes or CHUNK_BYTES
            ).finish()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return self._forward(*inputs, **kwargs)
        if torch.compiler.is_exporting():
            return self.module(*inputs, **kwargs)
        return traced_forward(
            self.module,
            inputs,
            kwargs,
            mark=self._forward.mark,
            placement=self.placement,
            swap=self._swap,
            ignored=self.parameters_to_ignore,
        )

    # -- synchronising -------------------------------------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward synchronises gradients; read when that backward begins."""
        return self._reducer.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reducer.enabled = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add to the gradients without synchronising them.

        What counts is where backward runs, not where forward did.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def weighted(self, weight: float | Tensor) -> Iterator[None]:
        """Let each backward inside count ``weight`` in the average, such as its number of tokens or samples.

        Gradients become ``sum(weight * gradient) / sum(weight)`` over all ranks and all backwards since the last
        synchronisation. Use it on every rank or on none. If all weights are zero, gradients are zero.

        >>> with ddp.weighted(num_tokens):  # doctest: +SKIP
        ...     loss.backward()
        """
        factor = as_weight(weight)
        if self.channel.size > 1 and any(
            isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in self.module.modules()
        ):
            # Its backward mixes the gradients of the ranks before they reach the parameters, where weights apply.
            raise StateError(
                "weighted() cannot weigh a backward through SyncBatchNorm, which sums over the ranks by itself. "
                "Multiply the loss instead, by weight * n_ranks / sum(weights), where weight is this rank's."
            )
        # A rank that is alone needs buckets too: the mean over several backwards is a weighted one.
        self._reducer.activate()
        params = [
            param
            for name, param in self.module.named_parameters()
            if param.requires_grad and name not in self.parameters_to_ignore
        ]
        with self._reducer.weighing.block(factor, params):
            yield

    def stats(self) -> Stats:
        """What the steps so far have sent, how long backward waited for it, and the plan. ``print`` shows a table."""
        figures = self._reducer.telemetry.summary()
        return Stats(**figures, buckets=len(self.plan.buckets), world_size=self.channel.size, plan=self.plan)

    @property
    def channel(self) -> Channel:
        """The control channel of this wrapper's ranks."""
        return self._reducer.channel

    @property
    def plan(self) -> BucketPlan:
        """The buckets as they are now. ``print`` shows them as a table, with the names of the parameters."""
        return self._reducer.plan

    # -- comm hooks ----------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` communicate each bucket instead of averaging it; replaces an earlier one.

        The hook gets gradients that are not divided, and returns a future of one tensor. See ``paceline.hooks``.
        """
        self._reducer.check_idle("A comm hook was registered")
        try:
            hooks.check_hook(hook)
            run = hooks.resolve(hook)
            hooks.check_state(run, state, self.process_group)
        except MisuseError as error:
            self._fail(error)
        self.logbook.hook_names.append(hook_name(hook))
        self._reducer.exchange.use_hook(run, state, overlaps=hooks.overlaps(run), takes_group=hooks.takes_group(run))
        self._reducer.activate()

    def remove_comm_hook(self) -> None:
        """Average plainly again."""
        self._reducer.exchange.use_hook(None)

    def _fail(self, error: Exception) -> NoReturn:
        """Raise ``error``, and remember it for the logging data."""
        self.logbook.last_error = str(error)
        raise error

    def register_buffer_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` synchronise buffers; it may return futures to wait for in backward."""
        if not callable(hook):
            raise BadTypeError(f"A buffer hook must be callable, not a {type(hook).__name__}.")
        self.buffer_sync.hook = BufferHook(hook, state, location)

    # -- uneven inputs -------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train with a different number of inputs on each rank: see torch.distributed.algorithms.join."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
            alone=True,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        divide = bool(kwargs.get("divide_by_initial_world_size", True))
        return DDPJoinHook(self, divide_by_initial_world_size=divide, alone=bool(kwargs.get("alone", False)))

    @property
    def join_device(self) -> torch.device:
        return self.placement.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    # -- the rest of a module ------------------------------------------------------------------------

    def _set_mixed_precision(self, config: Any) -> None:
        """Run forward and backward in low precision from now on; see :mod:`paceline.ddp.precision`."""
        self.mixed_precision = config
        self._swap = Swap(self.module, config, ignored=frozenset(self.parameters_to_ignore))
        self._reducer.around_backward = self._swap
        self._reducer.exchange.reduce_dtype = config.reduce_dtype or config.param_dtype
        self._reducer.activate()
        self._mark_mixed_precision()

    def update_process_group(self, group: dist.ProcessGroup) -> None:
        """Go on with another group (fewer or more ranks) without wrapping anew."""
        self._reducer.check_idle("The process group was changed")
        group = choose_group(group, None)
        exchange = self._reducer.exchange
        if exchange.hook is not None:
            hooks.check_state(exchange.hook, exchange.hook_state, group)
        channel = Channel(group)
        self._compare(channel, self._read_roster(group))
        self.process_group = group
        self._reducer.move_to(group, channel)

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return {name: value for name, value in self.__dict__.items() if name not in _MADE_ANEW}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = choose_group(None, None)
        self.logger = None
        self.module_buffers = Buffers(self.module, ignored=frozenset(self.parameters_to_ignore))
        rate = self.logbook.sample_rate
        self._start(self._read_roster(), Channel(self.process_group), sync=False)
        self.logbook.sample_rate = rate
        if self.mixed_precision is not None:
            self._set_mixed_precision(self.mixed_precision)


def _alive(ref: weakref.ref[DistributedDataParallel]) -> DistributedDataParallel:
    """The wrapper that a reducer belongs to. The wrapper holds the reducer, so the reducer must not hold it."""
    ddp = ref()
    assert ddp is not None
    return ddp


register_as_torch_s_class(DistributedDataParallel)
DDP = DistributedDataParallel
