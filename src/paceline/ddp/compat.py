"""The names that code written for torch's class uses, each of which leads to ours.

docs/from-torch.md lists them all, with what each does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from paceline import _torch, hooks
from paceline.ddp.broadcast import CHUNK_BYTES
from paceline.ddp.buffers import BufferHookLocation
from paceline.ddp.forward import Forward
from paceline.ddp.join import SILENCE, DDPJoinHook, JoinWord, highest_rank
from paceline.ddp.logging_data import ENVIRONMENT, logging_data
from paceline.ddp.precision import MixedPrecision, cast_floats
from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.gradients.outputs import find_tensors, move_to_device
from paceline.gradients.roster import ignored_names, makes_sparse_gradients
from paceline.reduction.reducer import Reducer
from paceline.reduction.usable import check_finished
from paceline.settings import environment

# torch has it only where RPC is built in.
_RRef: Any = getattr(rpc, "RRef", None)


def _switch(name: str) -> property:
    """A value of ``ddp.switches`` as an attribute of the wrapper, to read and to set."""

    def read(self: Any) -> Any:
        return getattr(self.switches, name)

    def write(self: Any, value: Any) -> None:
        setattr(self.switches, name, value)

    return property(read, write)


def _leads_to(path: str) -> Callable[..., Any]:
    """A method of torch's class that is the method ``path`` of one of our parts."""
    find = attrgetter(path)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return find(self)(*args, **kwargs)

    return method


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """A method of torch's class that has nothing to do in this one; docs/from-torch.md says why."""


class TorchReducer:
    """``ddp.reducer``: the methods of torch's C++ reducer that tests and tools call."""

    def __init__(self, reducer: Reducer) -> None:
        self._ours = reducer

    # Lightning calls it after the first backward of a static graph. Here the averages are there by then.
    _delay_all_reduce = _nothing
    _remove_autograd_hooks = _leads_to("_ours.stop_listening")
    _set_static_graph = _leads_to("_ours.set_static_graph")
    prepare_for_backward = _nothing
    prepare_for_forward = _nothing

    def _check_reducer_finalized(self) -> None:
        check_finished(self._ours)

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each parameter in the last synchronised backward."""
        return torch.tensor(self._ours.ledger.counts, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        return self._ours.ledger.graph_is_static

    def _rebuild_buckets(self) -> bool:
        """Do nothing: buckets are rebuilt by themselves at the start of the second synchronised backward."""
        return False

    def _run_allreduce_hook(self, bucket: Any) -> Any:
        """Sum a bucket over the ranks without dividing it. Some hooks are written on top of this one."""
        work = dist.all_reduce(bucket.buffer(), group=self._ours.exchange.group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def _get_zeros_like_grad_buckets(self) -> list[Tensor]:
        """A flat tensor of zeros for each bucket, as large as the bucket."""
        return [
            torch.zeros(spec.numel, dtype=getattr(torch, spec.dtype), device=spec.device)
            for spec in self._ours.plan.buckets
        ]


class _ActiveModule:
    """The wrapper whose forward runs, as an attribute of the class."""

    def __get__(self, instance: object, owner: type[TorchNames]) -> nn.Module | None:
        return owner._get_active_ddp_module()


class TorchNames:
    """Underscored methods and attributes of torch's DistributedDataParallel."""

    # -- state that torch keeps as attributes --------------------------------------------------------

    find_unused_parameters = _switch("find_unused_parameters")
    static_graph = _switch("static_graph")
    forward_sync_buffers = _switch("forward_sync_buffers")
    require_forward_param_sync = _switch("require_forward_param_sync")

    _active_ddp_module = _ActiveModule()
    _distributed_rank = property(lambda self: dist.get_rank(self.process_group))
    _has_rebuilt_buckets = property(lambda self: self._reducer.planner.has_rebuilt)
    _authoritative_rank = property(lambda self: self.joining.authoritative_rank)
    broadcast_buffers = property(lambda self: self.switches.forward_sync_buffers)
    broadcast_bucket_size = property(lambda self: CHUNK_BYTES)
    bucket_bytes_cap = property(lambda self: self.arguments.caps.main_bytes)
    bucket_bytes_cap_list = property(lambda self: self.arguments.caps.as_list)
    bucket_bytes_cap_default = property(lambda self: self.arguments.caps.is_default)
    device = property(lambda self: self.placement.device)
    device_type = property(lambda self: self.placement.device.type)
    device_ids = property(lambda self: self.placement.device_ids)
    output_device = property(lambda self: self.placement.output_device)
    is_multi_device_module = property(lambda self: self.placement.is_multi_device)
    modules_buffers = property(lambda self: list(self.module_buffers.named().values()))
    named_module_buffers = property(lambda self: self.module_buffers.named())
    reducer = property(lambda self: TorchReducer(self._reducer))

    @property
    def _comm_hooks(self: Any) -> list[tuple[Any, Any]]:
        exchange = self._reducer.exchange
        return [] if exchange.hook is None else [(exchange.hook, exchange.hook_state)]

    def _keep_for_torch_names(self: Any, dim: int, device_mesh: Any) -> None:
        """Set the attributes that programs read, and sometimes change, although the wrapper does not need them."""
        self.dim = dim
        self.device_mesh = device_mesh
        self.gradient_as_bucket_view = self.arguments.gradient_as_bucket_view
        self.skip_all_reduce_unused_params = self.arguments.skip_all_reduce_unused_params
        self.batched_grad_copy = self.arguments.batched_grad_copy
        self.mixed_precision = None
        self.logger = None

    # -- methods that do nothing here, or that a part of ours has under another name -----------------

    _assign_modules_buffers = _nothing
    _clear_grad_buffer = _nothing
    _match_unused_params_allreduce = _nothing
    _module_wait_for_copy_hook = _nothing
    _passing_sync_batchnorm_handle = _nothing
    _register_delay_all_reduce_hook = _nothing
    _root_copy_hook = _nothing
    _set_ddp_sink_clone = _nothing
    _set_sparse_metadata = _nothing

    _inside_ddp_forward = _leads_to("_forward.inside")
    # When a backward begins, optimizers that run in backward are taken over even without this call.
    _lazy_init = _leads_to("_reducer.planner.layout.take_optimizers")
    _match_all_reduce_for_bwd_pass = _leads_to("_reducer.shadow_backward")
    _post_forward = _leads_to("_forward.after")
    _pre_forward = _leads_to("_forward.before")
    _register_accum_grad_hook = _leads_to("_reducer.listen")
    _remove_autograd_hooks = _leads_to("_reducer.stop_listening")
    _run_ddp_forward = _leads_to("_forward.run")
    _setup_in_backward_optimizers = _lazy_init
    _sync_buffers = _leads_to("buffer_sync.broadcast")
    will_sync_module_buffers = _leads_to("buffer_sync.is_due")

    # -- parameters ----------------------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Leave these (fully qualified names) alone when ``module`` is wrapped."""
        if isinstance(params_and_buffers_to_ignore, str):
            # Each letter of a string would be taken for a name, and nothing would be ignored.
            raise BadTypeError(f"Give the names as a list: [{params_and_buffers_to_ignore!r}].")
        names = list(params_and_buffers_to_ignore)
        setattr(module, _torch.IGNORE_ATTRIBUTE, names)
        # A graph does not know names. Our DDPOptimizer, and torch's, recognise the tensors to ignore by this mark.
        _torch.mark_ignored(module, names)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of ``module`` that a wrapper of it would reduce."""
        ignored = ignored_names(module)
        inner = getattr(module, "module", None)
        if isinstance(module, TorchNames) and isinstance(inner, nn.Module):
            ignored = frozenset(f"module.{name}" for name in ignored_names(inner))
        for name, param in module.named_parameters():
            if name not in ignored:
                yield (name, param) if named_params else param

    def _get_parameters(self: Any, m: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
        yield from m.parameters(recurse=recurse)

    def _build_params_for_reducer(self: Any) -> tuple[list[Tensor], list[bool]]:
        """The trainable parameters, and for each whether its gradient is sparse."""
        roster = self._read_roster()
        pairs = [(p, spec) for p, spec in zip(roster.params, roster.specs, strict=True) if spec.requires_grad]
        return [param for param, _ in pairs], [spec.sparse for _, spec in pairs]

    def _build_debug_param_to_name_mapping(self: Any, parameters: list[Tensor]) -> dict[int, str]:
        """Map the index of each parameter in ``parameters`` to its name."""
        named = {name: p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore}
        index_of = {id(param): n for n, param in enumerate(parameters)}
        mapping = {}
        for name, param in named.items():
            if param.requires_grad:
                if id(param) not in index_of:
                    raise BadArgumentError(f"Param with name {name} is not in the list of parameters.")
                mapping[index_of[id(param)]] = name
        if len(mapping) != len(parameters):
            raise BadArgumentError(
                f"Expected param to name mapping to cover all {len(parameters)} parameters, but the module has names "
                f"for {len(mapping)}."
            )
        return mapping

    # -- starting ------------------------------------------------------------------------------------

    def _check_default_group(self: Any) -> None:
        """Refuse a wrapper of another group than the default one, which cannot be pickled."""
        if self.process_group is not dist.group.WORLD:
            raise StateError(
                "A wrapper can be copied or pickled only with the default process group: the copy would not find its "
                "own. Copy its module and wrap that."
            )

    def _ddp_init_helper(
        self: Any, parameters: Any, expect_sparse_gradient: Any, param_to_name_mapping: Any, static_graph: bool
    ) -> None:
        """Plan anew from the module as it is now. The lists that are given are not read."""
        self._reducer.adopt(self._read_roster())
        if static_graph and not self.static_graph:
            self._set_static_graph()

    # -- graph and hooks -----------------------------------------------------------------------------

    def _check_reducer_finalized(self: Any) -> None:
        check_finished(self._reducer)

    def _fire_reducer_autograd_hook(self: Any, idx: int, *unused: Any) -> None:
        """Inside a backward, say that the gradient of the ``idx``-th trainable parameter is ready."""
        self._reducer.announce(self._reducer.trainable()[idx])

    def _delayed_all_reduce_hook(self: Any, grad: Tensor) -> Tensor:
        """Return the gradient: delayed buckets leave by themselves, after all others."""
        return grad

    def _set_static_graph(self: Any) -> None:
        """Promise, before the first backward, that every backward uses the same parameters."""
        try:
            self._reducer.set_static_graph()
        except StateError as error:
            self._fail(error)
        self.static_graph = True

    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        builtin: dict[Any, Callable[..., Any]] = {
            dist.BuiltinCommHookType.ALLREDUCE: hooks.allreduce,
            dist.BuiltinCommHookType.FP16_COMPRESS: hooks.fp16_compress,
        }
        if comm_hook_type not in builtin:
            raise BadArgumentError(f"{comm_hook_type!r} is not a built-in comm hook; use one of {list(builtin)}.")
        self.register_comm_hook(self.process_group, builtin[comm_hook_type])
        self.logbook.hook_names[-1] = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self: Any,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = BufferHookLocation.POST_FORWARD,
    ) -> None:
        # A member of torch's own enumeration has the same name.
        self.register_buffer_hook(state, hook, BufferHookLocation[comm_hook_location.name])

    def _register_fused_optim(self: Any, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step each parameter as soon as its gradient is reduced."""
        params = [*map(_torch.local_tensor, self.parameters() if optim_params is None else optim_params)]
        _torch.overlapped_optimizer(optim, params, *args, **kwargs).register_ddp(self)

    def _check_comm_hook(self: Any, hook: Any) -> None:
        if not callable(hook):
            self._fail(BadTypeError("A communication hook must be callable."))

    def _update_process_group(self: Any, new_process_group: Any) -> None:
        self.update_process_group(new_process_group)

    # -- forward -------------------------------------------------------------------------------------

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        return None if Forward.active is None else Forward.active.wrapper()

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self: Any, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        """Move inputs and kwargs to one device. Each is returned in a tuple, which is empty if there are neither."""
        if not inputs and not kwargs:
            return (), ()
        device = torch.device(self.device_type, device_id) if self.device_type != "cpu" else "cpu"
        return (move_to_device(inputs, device),), (move_to_device(kwargs, device),)

    def gather(self: Any, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    # -- buffers -------------------------------------------------------------------------------------

    def _sync_module_buffers(self: Any, authoritative_rank: int) -> None:
        self.buffer_sync.broadcast(source=authoritative_rank)

    def _check_sync_bufs_pre_fwd(self: Any) -> bool:
        sync = self.buffer_sync
        return bool(sync.runs_hook(BufferHookLocation.PRE_FORWARD) or (sync.hook is None and sync.is_due()))

    def _check_sync_bufs_post_fwd(self: Any) -> bool:
        return bool(self.buffer_sync.runs_hook(BufferHookLocation.POST_FORWARD))

    def _check_and_sync_module_buffers(self: Any) -> None:
        if self._check_sync_bufs_pre_fwd():
            self.buffer_sync.broadcast(source=self.joining.authoritative_rank)

    def _default_broadcast_coalesced(
        self: Any, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Overwrite ``bufs``, or all buffers if it is not given, with those of the authoritative rank."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        self._broadcast_tensors(tensors, source=authoritative_rank, chunk_bytes=bucket_size)

    def _distributed_broadcast_coalesced(
        self: Any, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self._broadcast_tensors(list(tensors), source=authoritative_rank, chunk_bytes=buffer_size)

    # -- join ----------------------------------------------------------------------------------------

    def _find_common_rank(self: Any, input_rank: int, rank_cond: bool) -> int:
        return highest_rank(rank_cond, rank=input_rank, channel=self.channel)

    def _sync_final_model(self: Any, is_last_joiner: bool) -> None:
        self.joining.end(self, is_last_joiner=is_last_joiner)

    def _check_global_requires_backward_grad_sync(self: Any, is_joined_rank: bool) -> bool:
        """Say the word, or hear it on a rank that has joined ([Note: one word before each exchange] in join.py)."""
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        word = SILENCE if is_joined_rank else JoinWord(syncs, self.buffer_sync.is_due(), self.channel.rank)
        return bool(self.joining.exchange(word).sync_gradients)

    # -- logging -------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        return logging_data(
            self.module,
            self._reducer,
            arguments=self._arguments_now(),
            placement=self.placement,
            logbook=self.logbook,
            has_joined=self.joining.has_run,
        )

    def _set_ddp_runtime_logging_sample_rate(self: Any, sample_rate: int) -> None:
        if sample_rate < 1:
            self._fail(BadArgumentError(f"The sample rate must be at least 1, not {sample_rate}."))
        self.logbook.sample_rate = int(sample_rate)

    def _log_and_throw(self: Any, err_type: type[Exception], err_msg: str) -> None:
        self._fail(err_type(err_msg))

    # -- mixed precision -----------------------------------------------------------------------------

    def _mark_mixed_precision(self: Any) -> None:
        """Show each parameter's two dtypes under the attributes that torch's class leaves on it."""
        _setup_mixed_precision_params(self.mixed_precision, self.module)


# Module-level names of torch.nn.parallel.distributed.
_BufferCommHookLocation = BufferHookLocation
_DDPJoinHook = DDPJoinHook
_MixedPrecision = MixedPrecision
_find_tensors = find_tensors


def _tree_flatten_with_rref(output: Any) -> tuple[list[Any], Any, bool]:
    """Return the leaves of ``output``, or of its value if it is an RRef, their tree, and whether it is an RRef."""
    is_rref = _RRef is not None and isinstance(output, _RRef)
    leaves, spec = _torch.pytree_flatten(output.local_value() if is_rref else output)
    return leaves, spec, is_rref


def _tree_unflatten_with_rref(output: list[Any], treespec: Any, output_is_rref: bool) -> Any:
    tree = _torch.pytree_unflatten(output, treespec)
    return _RRef(tree) if output_is_rref and _RRef is not None else tree


def _setup_mixed_precision_params(mixed_precision_config: Any, root_module: nn.Module) -> None:
    """Show each parameter's two dtypes as attributes of it. No storage is allocated for them."""
    dtype, ignored = mixed_precision_config.param_dtype, ignored_names(root_module)
    for name, param in root_module.named_parameters():
        if name not in ignored and param.is_floating_point():
            low = torch.empty(0, dtype=dtype or param.dtype, device=param.device)
            _torch.set_both_precisions(param, param.data, low)


def _cast_buffers(mixed_precision_config: Any, root_module: nn.Module) -> None:
    dtype = mixed_precision_config.buffer_dtype
    for module in root_module.modules():
        for key, buffer in _torch.buffers_of(module).items():
            if buffer is not None and dtype is not None:
                _torch.buffers_of(module)[key] = cast_floats(buffer, dtype)


def _dump_DDP_relevant_env_vars() -> str:
    return "\n".join(f"env:{name}={environment(name) or 'N/A'}" for name in ENVIRONMENT)


produces_sparse_gradient = makes_sparse_gradients


def register_as_torch_s_class(ours: type) -> None:
    """Let ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` hold for our class.

    torch.distributed.checkpoint asks it, and so do trainers, to know whether there is a ``module.`` prefix to strip or
    whether gradients are synchronised. The answer changes only for our own instances.
    """
    nn.parallel.DistributedDataParallel.register(ours)
