"""``DistributedDataParallel``: a module whose backward averages gradients across ranks. Thin: it connects."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
from torch.profiler import record_function

from paceline import _torch, compiler, hooks, ownership
from paceline.buffers import BufferHook, BufferHookLocation, BufferSync, broadcast_in_place
from paceline.compat import TorchNames, TorchReducer, register_as_torch_s_class
from paceline.control import OPTION, Channel
from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.exchange import hook_name
from paceline.join import DDPJoinHook, Joining, Word, say_word
from paceline.options import (
    BROADCAST_CHUNK_BYTES,
    BufferPolicy,
    Caps,
    Delay,
    Placement,
    check_mixed_precision,
    check_verify_every,
    choose_group,
)
from paceline.outputs import (
    find_tensors,
    first_param_node,
    move_to_device,
    needs_grad,
    tie_to_graph,
    unreachable_params,
)
from paceline.plan import MB, BucketPlan
from paceline.precision import Swap
from paceline.reducer import Reducer
from paceline.roster import SPEC_FIELDS, Roster, ignored_names
from paceline.step import ForwardToken, ReducerOptions
from paceline.telemetry import now_ns
from paceline.verify import Verifier


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
            self._check_and_keep_arguments(
                module=module,
                device_ids=device_ids,
                output_device=output_device,
                dim=dim,
                buffer_policy=BufferPolicy.from_arguments(broadcast_buffers, forward_sync_buffers),
                caps=Caps.from_arguments(bucket_cap_mb, bucket_cap_mb_list),
                find_unused_parameters=find_unused_parameters,
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                delay=Delay.from_arguments(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
                mixed_precision=mixed_precision,
                device_mesh=device_mesh,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                batched_grad_copy=batched_grad_copy,
                verify_every=verify_every,
            )
            roster = self._read_roster()
            self._check_roster(roster)
        except BaseException as error:
            # The other ranks may be about to compare notes with this one.
            channel.report("the constructor of DistributedDataParallel", error)
            raise
        self._start(roster, channel, verify=init_sync)
        if init_sync:
            self.broadcast_state(with_buffers=self.buffer_policy.at_start)
        if mixed_precision is not None:
            self.set_mixed_precision(mixed_precision)

    def _check_and_keep_arguments(self, **arguments: Any) -> None:
        """Check what can be checked on this rank alone, and keep it under torch's attribute names."""
        module = arguments["module"]
        check_mixed_precision(arguments["mixed_precision"])
        if arguments["check_reduction"]:
            warnings.warn(
                "The `check_reduction` argument of `DistributedDataParallel` is deprecated and does nothing.",
                FutureWarning,
                stacklevel=4,
            )
        if arguments["static_graph"] and arguments["find_unused_parameters"]:
            warnings.warn(
                "find_unused_parameters=True is not needed with static_graph=True, which finds unused parameters by "
                "itself.",
                UserWarning,
                stacklevel=4,
            )
        self.parameters_to_ignore = set(ignored_names(module))
        self.module = module
        self.dim = arguments["dim"]
        self.device_mesh = arguments["device_mesh"]
        self.find_unused_parameters = bool(arguments["find_unused_parameters"])
        self.gradient_as_bucket_view = bool(arguments["gradient_as_bucket_view"])
        self.static_graph = bool(arguments["static_graph"])
        self.skip_all_reduce_unused_params = bool(arguments["skip_all_reduce_unused_params"])
        self.batched_grad_copy = bool(arguments["batched_grad_copy"])
        self.verify_every = check_verify_every(arguments["verify_every"])
        self.mixed_precision = None
        self._precision_row = repr(arguments["mixed_precision"]).rpartition("(")[2]
        self.caps: Caps = arguments["caps"]
        self.delay: Delay = arguments["delay"]
        self.buffer_policy: BufferPolicy = arguments["buffer_policy"]
        self.forward_sync_buffers = self.buffer_policy.before_forward
        self._device_arguments = (arguments["device_ids"], arguments["output_device"])
        self.require_forward_param_sync = True
        self.logger = None

    def _read_roster(self) -> Roster:
        return Roster(self.module, ignored=frozenset(self.parameters_to_ignore), delayed=self.delay.names)

    def _check_roster(self, roster: Roster) -> None:
        if not any(spec.requires_grad for spec in roster.specs):
            raise StateError(
                "DistributedDataParallel is not needed when a module has no parameter that requires a gradient: "
                f"{type(self.module).__name__} has {len(roster.specs)} parameters and none is trainable. Use the "
                "module as it is."
            )
        self.placement = Placement.from_arguments(roster.params, *self._device_arguments)

    def _start(self, roster: Roster, channel: Channel, *, verify: bool) -> None:
        """Agree with the other ranks, then make what runs the steps."""
        module_ref = weakref.ref(self)

        def reread() -> Roster:
            ddp = module_ref()
            assert ddp is not None
            newer = ddp._read_roster()
            if [id(param) for param in newer.params] != [id(param) for param in ddp._reducer.roster.params]:
                # Graphs that were compiled for the old ones report to those.
                ddp._mark.renew()
            return newer

        options = ReducerOptions(
            caps_bytes=None if self.caps.is_default else self.caps.caps_bytes,
            static_graph=self.static_graph,
            skip_unused=self.skip_all_reduce_unused_params,
            rebuild=self.static_graph or not self.find_unused_parameters,
            stable_storage=self.gradient_as_bucket_view,
            copy_in_batches=self.batched_grad_copy,
        )
        self._buffer_sync = BufferSync(self.module, ignored=frozenset(self.parameters_to_ignore))
        if verify:
            channel.compare("parameters or options", self._option_rows() + roster.rows(), SPEC_FIELDS)
        # Only now: a wrapper that could not be made must not leave hooks on the module.
        self._reducer = Reducer(roster, group=self.process_group, channel=channel, options=options, reread=reread)
        self._verifier: Verifier | None = None
        if self.verify_every and channel.size > 1:
            ignored = frozenset(self.parameters_to_ignore)
            device = self._reducer.courier.status_device(roster.params[0].device)
            self._verifier = Verifier(self.module, every=self.verify_every, ignored=ignored, device=device)
            self._reducer.verify = self._verifier.backward_ended
        self._hook_names: list[str] = []
        self._iterations = 0
        self._sample_rate = 100
        self._sampled_iteration = 0
        self._last_error = ""
        self.joining = Joining()
        self._swap: Swap | None = None
        # Made on first use: a tensor kept for every wrapper would be one too many for most.
        self._anchor: Tensor | None = None
        self._mark = compiler.Mark(self)
        self._inside = compiler.Inside(self._mark)
        self._inside.listen(self.module, owner=self._reducer)
        self._outer: list[DistributedDataParallel | None] = []
        ownership.enter(self._reducer)

    def _option_rows(self) -> list[list[Any]]:
        """The options that change what is communicated, for ranks to compare."""
        options = {
            "bucket_cap_mb": [cap / MB for cap in self.caps.caps_bytes],
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.forward_sync_buffers,
            "broadcast_buffers": self.buffer_policy.at_start,
            "mixed_precision": self._precision_row,
            "verify_every": self.verify_every,
            "buffers": [[name, list(b.shape), str(b.dtype)] for name, b in self._buffer_sync.named().items()],
        }
        return [[OPTION + name, value] for name, value in options.items()]

    def broadcast_state(self, *, source: int = 0, with_buffers: bool) -> None:
        """Give all ranks the parameters (frozen ones too), and buffers, of rank ``source``."""
        tensors: list[Tensor] = list(self._reducer.roster.params)
        if with_buffers:
            tensors += self._buffer_sync.named().values()
        self.broadcast_tensors(tensors, source=source)

    def broadcast_tensors(self, tensors: list[Tensor], *, source: int = 0, chunk_bytes: int | None = None) -> None:
        """Overwrite ``tensors`` on all ranks with rank ``source``'s (its number in this group)."""
        if self._reducer.channel.size > 1 and tensors:
            broadcast_in_place(
                tensors,
                source=source,
                group=self.process_group,
                channel=self._reducer.channel,
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
        if torch.is_grad_enabled() and self.module.training and not needs_grad(output):
            # No parameter is used on this rank, yet a backward of the output must be noticed.
            for name, param in self.module.named_parameters():
                if param.requires_grad and name not in self.parameters_to_ignore:
                    output = tie_to_graph(output, param, lambda tensor: True, tie=compiler.tie)
                    break
        compiler.leave(self._mark.key)
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

    def leave_graph(self, outputs: Sequence[Tensor]) -> None:
        """A compiled graph has run in which this wrapper's forward ended."""
        self._leave_outer()
        if self._runs_buffer_hook(BufferHookLocation.POST_FORWARD):
            self._run_buffer_hook()
        self._reducer.telemetry.current.forward_end_ns = now_ns()
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled() and self._reducer.active:
            self._notice([(tensor, probe) for tensor, probe in self._probe(outputs) if probe is not None])

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
        self._last_error = str(error)
        if self._reducer.channel.size > 1:
            self._reducer.channel.report(where, error)

    @_torch.hidden_from_compiler
    def pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """What happens before the module runs: buffers, inputs, the word inside ``join``."""
        reducer = self._reducer
        reducer.check_usable()
        will_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if will_sync:
            self._count_iteration()
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
        if self._runs_buffer_hook(BufferHookLocation.POST_FORWARD):
            self._run_buffer_hook()
        reducer = self._reducer
        reducer.telemetry.current.forward_end_ns = now_ns()
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if not torch.is_grad_enabled() or not reducer.active:
            return output
        probes = self._probe(output)
        if self.module.training and self.require_backward_grad_sync:
            leads = [probe for _, probe in probes if probe is not None]
            if len(leads) < len(probes) or not leads:
                # Some output, or all of them, leads to no parameter: unused on this rank, or hidden in a reentrant
                # checkpoint. A backward of it must be noticed all the same.
                stray = {id(tensor) for tensor, probe in probes if probe is None}
                anchor = self._anchor_tensor()
                output = tie_to_graph(output, anchor, lambda tensor: not leads or id(tensor) in stray)
                probes = self._probe(output)
        self._notice(probes)
        return output

    def _notice(self, probes: list[tuple[Tensor, Node | None]]) -> None:
        """See to it that a backward of these outputs is noticed, and what it will not reach."""
        reducer = self._reducer
        token = ForwardToken()
        for tensor, probe in probes:
            if tensor.grad_fn is not None and probe is not None:
                reducer.forwards.add(token)
                tensor.grad_fn.register_prehook(_backward_notice(weakref.ref(reducer), token, probe))
        if self.find_unused_parameters and not self.static_graph and self.require_backward_grad_sync:
            with record_function("search_unused_parameters"):
                reducer.expect_unused(unreachable_params([tensor for tensor, _ in probes], reducer.roster.params))

    def _probe(self, output: Any) -> list[tuple[Tensor, Node | None]]:
        """The tensors of ``output`` that a backward can start from, each with a leaf by which to know it."""
        is_leaf = self._reducer.slots.has
        anchor = self._anchor
        return [
            (tensor, first_param_node(tensor, lambda leaf: leaf is anchor or is_leaf(leaf)))
            for tensor in find_tensors(output)
            if tensor.requires_grad
        ]

    def _anchor_tensor(self) -> Tensor:
        if self._anchor is None:
            self._anchor = torch.zeros((), device=self.placement.device, requires_grad=True)
        return self._anchor

    @contextlib.contextmanager
    def inside_forward(self) -> Iterator[None]:
        """Mark this wrapper as the one whose forward runs."""
        previous = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            DistributedDataParallel._active_ddp_module = previous

    def _count_iteration(self) -> None:
        n = self._iterations
        self._iterations += 1
        if n < 10 or n % self._sample_rate == 0:
            self._sampled_iteration = n
        times = self._reducer.telemetry.current
        times.forward_start_ns = now_ns()

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
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise BadTypeError(f"A weight must be a number, not {weight!r}.")
        if not 0 <= weight < float("inf"):
            raise BadArgumentError(f"A weight must be a finite number of at least 0, not {weight!r}.")
        reducer = self._reducer
        if reducer.weighing.weight is not None:
            raise StateError("weighted() blocks cannot be nested: a backward has one weight. Multiply the weights.")
        # One rank alone needs it too: the mean over several backwards is a weighted one.
        reducer.activate()
        factor = float(weight)
        with contextlib.ExitStack() as stack:
            for name, param in self.module.named_parameters():
                if param.requires_grad and name not in self.parameters_to_ignore:
                    stack.callback(param.register_hook(lambda grad: grad * factor).remove)
            reducer.weighing.weight = factor
            try:
                yield
            finally:
                reducer.weighing.weight = None

    def stats(self) -> dict[str, Any]:
        """What can be said of the steps so far: see the keys."""
        telemetry = self._reducer.telemetry
        return {
            "steps": telemetry.steps,
            "buckets": len(self._reducer.plan.buckets),
            "bytes_per_step": telemetry.sent_bytes,
            "exposed_s": telemetry.last.exposed_ns / 1e9,
            "exposed_total_s": telemetry.exposed_total_ns / 1e9,
            "plan": self._reducer.plan,
        }

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
        self._reducer.check_idle("A comm hook was registered")
        self._hook_names.append(hook_name(hook))
        run = hooks.resolve(hook)
        self._reducer.use_hook(run, state, overlaps=hooks.overlaps(run))

    def remove_comm_hook(self) -> None:
        """Average plainly again."""
        self._reducer.use_hook(None, None, overlaps=True)

    def fail(self, error: Exception) -> None:
        """Raise ``error``, and remember it for the logging data."""
        self._last_error = str(error)
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
        hook = self._buffer_sync.hook
        return hook is not None and hook.location is location and self.will_sync_buffers()

    def _run_buffer_hook(self) -> None:
        hook = self._buffer_sync.hook
        assert hook is not None
        futures = hook.hook(hook.state, self._buffer_sync.named())
        if futures is not None:
            channel = self._reducer.channel

            def wait() -> None:
                for future in futures:
                    channel.wait_future(future, "a buffer hook")

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
        channel = Channel(group)
        channel.compare("parameters or options", self._option_rows() + self._read_roster().rows(), SPEC_FIELDS)
        self.process_group = group
        self._reducer.move_to(group, channel)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        """(inputs, kwargs) for one device, each in a tuple of one; empty if there is nothing at all."""
        if not inputs and not kwargs:
            return (), ()
        device = torch.device(self.placement.device.type, device_id) if self.placement.device.type != "cpu" else "cpu"
        return (move_to_device(inputs, device),), (move_to_device(kwargs, device),)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    @property
    def reducer(self) -> TorchReducer:
        """The names that code written for torch calls on ``ddp.reducer``."""
        return TorchReducer(self._reducer)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not choose_group(None, None):
            raise StateError(
                "A wrapper can be copied or pickled only with the default process group: the copy would not find its "
                "own. Copy its module and wrap that."
            )
        state = self.__dict__.copy()
        for name in (
            "process_group",
            "_reducer",
            "_buffer_sync",
            "_swap",
            "_anchor",
            "_mark",
            "_inside",
            "_verifier",
            "logger",
        ):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = choose_group(None, None)
        self.logger = None
        mixed_precision, rate = self.mixed_precision, self._sample_rate
        self._start(self._read_roster(), Channel(self.process_group), verify=False)
        self._sample_rate = rate
        if mixed_precision is not None:
            self.set_mixed_precision(mixed_precision)


def _backward_notice(ref: weakref.ref[Reducer], token: ForwardToken, probe: Node) -> Callable[[Any], None]:
    """A hook for an output's node, which keeps ``token`` alive: a backward that would reach ``probe`` has begun."""

    @_torch.unseen_by_compiler
    def noticed(grads: Any) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.output_needed(token, probe)

    return noticed


register_as_torch_s_class(DistributedDataParallel)
DDP = DistributedDataParallel
