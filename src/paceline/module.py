"""``DistributedDataParallel``: a module whose backward averages gradients across ranks. Thin: it connects."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.profiler import record_function

from paceline import _torch, compiler, hooks, ownership, portion
from paceline.arguments import Arguments
from paceline.buffers import BufferHook, BufferHookLocation, BufferSync, Delivery
from paceline.compat import TorchNames, register_as_torch_s_class
from paceline.control import Channel
from paceline.errors import BadTypeError, DisagreementError, StateError
from paceline.exchange import hook_name
from paceline.join import DDPJoinHook, Joining, Word, say_word
from paceline.logging_data import Logbook
from paceline.lookout import Lookout
from paceline.options import BROADCAST_CHUNK_BYTES, BufferPolicy, Caps, Delay, Placement, as_flag, choose_group
from paceline.outputs import move_to_device, needs_grad, plain_tensors, tie_to_graph
from paceline.plan import BucketPlan
from paceline.precision import Swap
from paceline.reducer import Reducer
from paceline.roster import SPEC_FIELDS, Roster, ignored_names
from paceline.telemetry import now_ns
from paceline.verify import Verifier
from paceline.weighing import as_weight

# What belongs to this process, and is not copied with a wrapper.
MADE_ANEW = frozenset(
    ("process_group", "_reducer", "_buffer_sync", "_verifier", "_lookout", "_swap", "_mark", "_inside", "logger")
)


class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Replicate ``module`` on every rank and average its gradients during backward.

    A drop-in for :class:`torch.nn.parallel.DistributedDataParallel`: the arguments are the same, by name,
    order and default. One is new: with ``verify_every=N`` ranks compare digests of all they hold every N steps.
    What holds, and when it stops holding, is in docs/guarantees.md.

    >>> import torch, paceline
    >>> world = paceline.init()
    >>> model = paceline.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> paceline.shutdown()
    """

    _active_ddp_module: DistributedDataParallel | None = None

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
        try:
            self.arguments = Arguments(
                caps=Caps.from_arguments(bucket_cap_mb, bucket_cap_mb_list),
                delay=Delay.from_arguments(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
                buffer_policy=BufferPolicy.from_arguments(broadcast_buffers, forward_sync_buffers),
                find_unused_parameters=as_flag("find_unused_parameters", find_unused_parameters),
                static_graph=as_flag("static_graph", static_graph),
                skip_all_reduce_unused_params=as_flag("skip_all_reduce_unused_params", skip_all_reduce_unused_params),
                gradient_as_bucket_view=as_flag("gradient_as_bucket_view", gradient_as_bucket_view),
                batched_grad_copy=as_flag("batched_grad_copy", batched_grad_copy),
                mixed_precision=mixed_precision,
                verify_every=verify_every,
            )
            self.arguments.check()
            init_sync = as_flag("init_sync", init_sync)
            if check_reduction:
                warnings.warn(
                    "The `check_reduction` argument of `DistributedDataParallel` is deprecated and does nothing.",
                    FutureWarning,
                    stacklevel=2,
                )
            self._keep_for_torch_s_names(module, dim, device_mesh)
            self._buffer_sync = BufferSync(module, ignored=frozenset(self.parameters_to_ignore))
            roster = self._read_roster()
            self._check_roster(roster)
            self.placement = Placement.from_arguments(roster.params, device_ids, output_device)
        except BaseException as error:
            # The other ranks may be about to compare notes with this one.
            channel.report("the constructor of DistributedDataParallel", error)
            raise
        try:
            self._start(roster, channel, sync=init_sync)
        except DisagreementError:
            # Which all ranks raise.
            raise
        except BaseException as error:
            channel.report("the constructor of DistributedDataParallel", error)
            raise
        if mixed_precision is not None:
            self.set_mixed_precision(mixed_precision)

    def _keep_for_torch_s_names(self, module: nn.Module, dim: int, device_mesh: Any) -> None:
        """What programs read, and some of it change, under the names that torch's class has for it."""
        self.module = module
        self.parameters_to_ignore = set(ignored_names(module))
        self.dim = dim
        self.device_mesh = device_mesh
        self.find_unused_parameters = self.arguments.find_unused_parameters
        self.gradient_as_bucket_view = self.arguments.gradient_as_bucket_view
        self.static_graph = self.arguments.static_graph
        self.skip_all_reduce_unused_params = self.arguments.skip_all_reduce_unused_params
        self.batched_grad_copy = self.arguments.batched_grad_copy
        self.mixed_precision = None
        self.forward_sync_buffers = self.arguments.buffer_policy.before_forward
        self.require_forward_param_sync = True
        self.logger = None

    def _arguments_now(self) -> Arguments:
        """The arguments as if the wrapper were made now."""
        return replace(
            self.arguments,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            buffer_policy=replace(self.arguments.buffer_policy, before_forward=self.forward_sync_buffers),
        )

    def _read_roster(self, group: dist.ProcessGroup | None = None) -> Roster:
        ignored = frozenset(self.parameters_to_ignore)
        roster = Roster(self.module, ignored=ignored, delayed=self.arguments.delay.names, tree=self._buffer_sync.tree())
        group = group or self.process_group
        portion.check_parameters(roster.specs, roster.params, group)
        if self._arguments_now().buffer_policy.ever:
            portion.check_buffers(self._buffer_sync.named(), group)
        return roster

    def _check_roster(self, roster: Roster) -> None:
        if not any(spec.requires_grad for spec in roster.specs):
            raise StateError(
                "DistributedDataParallel is not needed when a module has no parameter that requires a gradient: "
                f"{type(self.module).__name__} has {len(roster.specs)} parameters and none is trainable. Use the "
                "module as it is."
            )

    def _start(self, roster: Roster, channel: Channel, *, sync: bool) -> None:
        """Make what runs the steps; ``sync``: agree with the other ranks first, and take the state of rank 0."""
        module_ref = weakref.ref(self)

        def reread() -> Roster:
            ddp = module_ref()
            assert ddp is not None
            newer = ddp._read_roster()
            if [id(param) for param in newer.params] != [id(param) for param in ddp._reducer.roster.params]:
                # Graphs that were compiled before have no taps for those that are new.
                ddp._mark.renew()
            return newer

        def compare() -> None:
            ddp = module_ref()
            assert ddp is not None
            ddp._compare(ddp.channel, ddp._reducer.roster)

        arguments = self._arguments_now()
        ignored = frozenset(self.parameters_to_ignore)
        state: Delivery | None = None
        if sync and channel.size > 1:
            self._compare(channel, roster)
            # On its way while the rest is made.
            state = self._deliver(self._state(roster, with_buffers=arguments.buffer_policy.at_start), channel)
        # Only now: a wrapper that could not be made must not leave hooks on the module.
        self._reducer = Reducer(
            roster, group=self.process_group, channel=channel, options=arguments.reducer_options(), reread=reread
        )
        if not sync:
            self._reducer.compare = compare
        self._verifier: Verifier | None = None
        if arguments.verify_every and channel.size > 1:
            device = self._reducer.courier.status_device(roster.params[0].device)
            self._verifier = Verifier(self.module, every=arguments.verify_every, ignored=ignored, device=device)
            self._reducer.verify = self._verifier.backward_ended
        self._lookout = Lookout(self._reducer, device=self.placement.device)
        self.logbook = Logbook()
        self.joining = Joining()
        self._swap: Swap | None = None
        self._mark = compiler.Mark(self)
        self._inside = compiler.Inside(self._mark)
        self._inside.listen(self.module, owner=self._reducer)
        self._outer: list[DistributedDataParallel | None] = []
        ownership.enter(self._reducer)
        if state is not None:
            state.finish()

    def _compare(self, channel: Channel, roster: Roster) -> None:
        """Raise on all ranks if they differ in what has to be the same on all."""
        options = self._arguments_now().rows(self._buffer_sync.named())
        channel.compare("parameters or options", options + roster.rows(), SPEC_FIELDS)

    def broadcast_state(self, *, source: int = 0, with_buffers: bool) -> None:
        """Give all ranks the parameters (frozen ones too), and buffers, of rank ``source``."""
        self.broadcast_tensors(self._state(self._reducer.roster, with_buffers=with_buffers), source=source)

    def _state(self, roster: Roster, *, with_buffers: bool) -> list[Tensor]:
        return [*roster.params, *(self._buffer_sync.named().values() if with_buffers else ())]

    def broadcast_tensors(self, tensors: list[Tensor], *, source: int = 0, chunk_bytes: int | None = None) -> None:
        """Overwrite ``tensors`` on all ranks with rank ``source``'s (its number in this group)."""
        if self._reducer.channel.size > 1 and tensors:
            self._deliver(tensors, self._reducer.channel, source=source, chunk_bytes=chunk_bytes).finish()

    def _deliver(
        self, tensors: Sequence[Tensor], channel: Channel, *, source: int = 0, chunk_bytes: int | None = None
    ) -> Delivery:
        return Delivery(
            list(map(_torch.local_tensor, tensors)),
            source=source,
            group=self.process_group,
            channel=channel,
            what="parameters and buffers",
            chunk_bytes=chunk_bytes or BROADCAST_CHUNK_BYTES,
        )

    # -- forward -------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if torch.compiler.is_exporting():
                return self.module(*inputs, **kwargs)
            return self._traced_forward(*inputs, **kwargs)
        return self._plain_forward(*inputs, **kwargs)

    def _traced_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the compiler makes a graph of: the module's forward between marks, see :mod:`paceline.compiler`.

        Nothing is read here that changes from step to step: each would be a reason to compile anew.
        """
        compiler.catch(self._mark)
        compiler.enter(self._mark.key)
        if self.placement.device_ids:
            inputs = move_to_device(inputs, self.placement.device)
            kwargs = move_to_device(kwargs, self.placement.device)
        output = self.module(*inputs, **kwargs) if self._swap is None else self._swap.traced(inputs, kwargs)
        if torch.is_grad_enabled() and self.module.training:
            output = self._tied(output)
        # Once more: a graph break may have begun another graph.
        compiler.catch(self._mark)
        compiler.leave(plain_tensors(output), self._mark.key)
        return output

    def _tied(self, output: Any) -> Any:
        """Traced: ``output``, tied to some parameter where this rank uses none, or an input is returned."""
        unused = not needs_grad(output)
        if unused or any(tensor.is_leaf for tensor in plain_tensors(output)):
            for name, param in self.module.named_parameters():
                if param.requires_grad and name not in self.parameters_to_ignore:
                    # A backward of it must be noticed all the same.
                    chosen = lambda tensor: unused or (tensor.requires_grad and tensor.is_leaf)  # noqa: E731
                    return tie_to_graph(output, param, chosen, tie=compiler.tie)
        return output

    # Where the compiler cannot make a graph of it, it enters the module, and not the bookkeeping around it.
    @_torch.skipped_by_compiler
    def _plain_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with record_function("DistributedDataParallel.forward"):
            try:
                inputs, kwargs = self.pre_forward(*inputs, **kwargs)
                output = self.run_forward(*inputs, **kwargs)
                return self.post_forward(output)
            except Exception as error:
                self._note_failure(error)
                raise

    def enter_graph(self) -> None:
        """A compiled graph is about to run in which this wrapper's forward begins."""
        self.pre_forward()
        self._outer.append(DistributedDataParallel._active_ddp_module)
        DistributedDataParallel._active_ddp_module = self

    def leave_graph(self, outputs: Sequence[Tensor], *, own: Sequence[Tensor]) -> None:
        """A compiled graph has run in which this wrapper's forward ended.

        ``own`` are the outputs that come from it, and not from what else is in the graph.
        """
        self._leave_outer()
        if self._end_forward():
            every = self.module.training and self.require_backward_grad_sync
            self._lookout.watch_graph(outputs, own=own if every else (), find_unused=self._looks_for_unused())

    def graph_failed(self, error: BaseException) -> None:
        self._leave_outer()
        if isinstance(error, Exception):
            self._note_failure(error)

    def outdate_graphs(self, reducer: object) -> None:
        if reducer is self._reducer:
            self._mark.renew()

    def _leave_outer(self) -> None:
        if self._outer:
            DistributedDataParallel._active_ddp_module = self._outer.pop()

    def compilation_failed(self, error: BaseException) -> None:
        self._note_failure(error, where="compiling")

    def _note_failure(self, error: BaseException, *, where: str = "forward") -> None:
        self.logbook.last_error = str(error)
        if self._reducer.channel.size > 1:
            self._reducer.channel.report(where, error)

    @_torch.hidden_from_compiler
    def pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What happens before the module runs: buffers, inputs, the word inside ``join``."""
        reducer = self._reducer
        reducer.check_usable()
        will_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if will_sync:
            self.logbook.count_iteration()
            reducer.telemetry.current.forward_start_ns = now_ns()
        if reducer.slots.shared and DistributedDataParallel._active_ddp_module is None:
            ownership.take_over(reducer)
        will_sync_buffers = self.will_sync_buffers()
        promised = will_sync and not self.joining.alone
        source = say_word(self, Word(promised, will_sync_buffers, reducer.channel.rank))
        if self._runs_buffer_hook(BufferHookLocation.PRE_FORWARD):
            self._run_buffer_hook()
        elif will_sync_buffers and not self.has_buffer_hook:
            self.sync_buffers(source=source)
            if self._verifier is not None:
                self._verifier.see_buffers(self._buffer_sync.named())
        if self.placement.device_ids:
            inputs = move_to_device(inputs, self.placement.device)
            kwargs = move_to_device(kwargs, self.placement.device)
        return inputs, kwargs

    def run_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.inside_forward():
            return self._inside.call(self.module)(*inputs, **kwargs)

    @_torch.hidden_from_compiler
    def post_forward(self, output: Any) -> Any:
        """What happens after the module ran: see to it that a backward of its output is noticed."""
        if not self._end_forward():
            return output
        every = self.module.training and self.require_backward_grad_sync
        return self._lookout.watch(output, every=every, find_unused=self._looks_for_unused())

    def _end_forward(self) -> bool:
        """The module has run. Whether a backward that matters to us may follow."""
        if self._runs_buffer_hook(BufferHookLocation.POST_FORWARD):
            self._run_buffer_hook()
        self._reducer.telemetry.current.forward_end_ns = now_ns()
        has_graph = torch.is_grad_enabled()
        self.require_forward_param_sync = has_graph and self.require_backward_grad_sync
        return has_graph and self._reducer.active

    def _looks_for_unused(self) -> bool:
        return self.find_unused_parameters and not self.static_graph and self.require_backward_grad_sync

    @contextlib.contextmanager
    def inside_forward(self) -> Iterator[None]:
        """Mark this wrapper as the one whose forward runs."""
        previous = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            DistributedDataParallel._active_ddp_module = previous

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
        """Let each backward inside count ``weight`` in the average, its number of tokens or samples say.

        Gradients become ``sum(weight * gradient) / sum(weight)`` over all ranks and all backwards since the last
        synchronisation. Use it on every rank or on none. If all weights are zero, gradients are zero.

        >>> with ddp.weighted(num_tokens):  # doctest: +SKIP
        ...     loss.backward()
        """
        factor = as_weight(weight)
        if self.channel.size > 1 and any(
            isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in self.module.modules()
        ):
            # Its backward mixes the ranks' gradients before they reach the parameters, where they are weighed.
            raise StateError(
                "weighted() cannot weigh a backward through SyncBatchNorm, which sums over the ranks by itself. "
                "Multiply the loss, by this rank's weight times the number of ranks over the sum of the weights."
            )
        # One rank alone needs it too: the mean over several backwards is a weighted one.
        self._reducer.activate()
        params = [
            param
            for name, param in self.module.named_parameters()
            if param.requires_grad and name not in self.parameters_to_ignore
        ]
        with self._reducer.weighing.block(factor, params):
            yield

    def stats(self) -> dict[str, Any]:
        """What can be said of the steps so far: see the keys."""
        return {**self._reducer.telemetry.summary(), "buckets": len(self.plan.buckets), "plan": self.plan}

    @property
    def channel(self) -> Channel:
        """The control channel of this wrapper's ranks."""
        return self._reducer.channel

    @property
    def plan(self) -> BucketPlan:
        """The buckets as they are now."""
        return self._reducer.plan

    # -- comm hooks ----------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` communicate each bucket instead of averaging it; replaces an earlier one.

        The hook gets gradients that are not divided, and returns a future of one tensor. See ``paceline.hooks``.
        """
        if not callable(hook):
            self.fail(BadTypeError(f"A communication hook must be callable, not a {type(hook).__name__}."))
        if not hooks.takes_two(hook):
            self.fail(
                BadTypeError(f"A communication hook is called with (state, bucket); {hook_name(hook)} cannot be.")
            )
        self._reducer.check_idle("A comm hook was registered")
        run = hooks.resolve(hook)
        try:
            hooks.check_state(run, state, self.process_group)
        except StateError as error:
            self.fail(error)
        self.logbook.hook_names.append(hook_name(hook))
        self._reducer.use_hook(run, state, overlaps=hooks.overlaps(run), takes_group=hooks.takes_group(run))

    def remove_comm_hook(self) -> None:
        """Average plainly again."""
        self._reducer.use_hook(None, None)

    def fail(self, error: Exception) -> None:
        """Raise ``error``, and remember it for the logging data."""
        self.logbook.last_error = str(error)
        raise error

    # -- buffers -------------------------------------------------------------------------------------

    @property
    def has_buffer_hook(self) -> bool:
        """Whether a hook synchronises buffers instead of a broadcast."""
        return self._buffer_sync.hook is not None

    def will_sync_buffers(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return (
            self.forward_sync_buffers
            and self.require_forward_param_sync
            and self._reducer.channel.size > 1
            and not self._buffer_sync.is_empty()
        )

    def sync_buffers(self, *, source: int = 0) -> None:
        """Give all ranks the buffers of rank ``source`` (its number in this group)."""
        self._reducer.compare_if_due()
        self._buffer_sync.broadcast(
            source=source,
            group=self.process_group,
            channel=self._reducer.channel,
            keep_old=bool(self._reducer.forwards),
        )

    def register_buffer_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` synchronise buffers; it may return futures to wait for in backward."""
        if not callable(hook):
            raise BadTypeError(f"A buffer hook must be callable, not a {type(hook).__name__}.")
        self._buffer_sync.hook = BufferHook(hook, state, location)

    def _runs_buffer_hook(self, location: BufferHookLocation) -> bool:
        return self._buffer_sync.runs_hook(location) and self.will_sync_buffers()

    def _run_buffer_hook(self) -> None:
        wait = self._buffer_sync.run_hook(self.channel)
        if wait is not None:
            self._reducer.on_finish.append(wait)

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

    def set_mixed_precision(self, config: Any) -> None:
        """Run forward and backward in low precision from now on; see :mod:`paceline.precision`."""
        self.mixed_precision = config
        self._swap = Swap(self.module, config, ignored=frozenset(self.parameters_to_ignore))
        self._reducer.around_backward = self._swap
        self._reducer.courier.reduce_dtype = config.reduce_dtype or config.param_dtype
        self._reducer.activate()
        self.mark_mixed_precision()

    def update_process_group(self, group: dist.ProcessGroup) -> None:
        """Go on with another group (fewer or more ranks) without wrapping anew."""
        self._reducer.check_idle("The process group was changed")
        group = choose_group(group, None)
        courier = self._reducer.courier
        if courier.hook is not None:
            hooks.check_state(courier.hook, courier.hook_state, group)
        channel = Channel(group)
        self._compare(channel, self._read_roster(group))
        self.process_group = group
        self._reducer.move_to(group, channel)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not choose_group(None, None):
            raise StateError(
                "A wrapper can be copied or pickled only with the default process group: the copy would not find its "
                "own. Copy its module and wrap that."
            )
        return {name: value for name, value in self.__dict__.items() if name not in MADE_ANEW}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = choose_group(None, None)
        self.logger = None
        self._buffer_sync = BufferSync(self.module, ignored=frozenset(self.parameters_to_ignore))
        rate = self.logbook.sample_rate
        self._start(self._read_roster(), Channel(self.process_group), sync=False)
        self.logbook.sample_rate = rate
        if self.mixed_precision is not None:
            self.set_mixed_precision(self.mixed_precision)


register_as_torch_s_class(DistributedDataParallel)
DDP = DistributedDataParallel
