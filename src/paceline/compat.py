"""The names that code written for torch's class calls, each forwarding to ours.

Little more than forwarding happens here. docs/from-torch.md lists what each does and where it lives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from paceline import _torch, hooks
from paceline.buffers import BufferHookLocation
from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.join import SILENCE, DDPJoinHook, Word, exchange_word, highest_rank, sync_final_model
from paceline.logging_data import logging_data
from paceline.outputs import find_tensors, move_to_device
from paceline.precision import MixedPrecision, cast_floats
from paceline.roster import IGNORE_ATTRIBUTE, ignored_names, makes_sparse_gradients
from paceline.torch_reducer import TorchReducer, check_finalized

# Only where RPC is built in.
_RRef: Any = getattr(rpc, "RRef", None)

if TYPE_CHECKING:
    from paceline.module import DistributedDataParallel


class TorchNames:
    """Underscored methods and attributes of torch's DistributedDataParallel."""

    # -- state that torch keeps as attributes --------------------------------------------------------

    @property
    def _distributed_rank(self: Any) -> int:
        return dist.get_rank(self.process_group)

    @property
    def _has_rebuilt_buckets(self: Any) -> bool:
        return bool(self._reducer.planner.has_rebuilt)

    @property
    def _comm_hooks(self: Any) -> list[tuple[Any, Any]]:
        courier = self._reducer.courier
        return [] if courier.hook is None else [(courier.hook, courier.hook_state)]

    @property
    def broadcast_buffers(self: Any) -> bool:
        return bool(self.forward_sync_buffers)

    @property
    def broadcast_bucket_size(self: Any) -> int:
        from paceline.options import BROADCAST_CHUNK_BYTES

        return BROADCAST_CHUNK_BYTES

    @property
    def bucket_bytes_cap(self: Any) -> int:
        return int(self.arguments.caps.main_bytes)

    @property
    def bucket_bytes_cap_list(self: Any) -> list[int]:
        return list(self.arguments.caps.caps_bytes) if self.arguments.caps.from_list else []

    @property
    def bucket_bytes_cap_default(self: Any) -> bool:
        return bool(self.arguments.caps.is_default)

    @property
    def device(self: Any) -> torch.device:
        return self.placement.device

    @property
    def device_type(self: Any) -> str:
        return str(self.placement.device.type)

    @property
    def device_ids(self: Any) -> list[int] | None:
        return self.placement.device_ids

    @property
    def output_device(self: Any) -> Any:
        return self.placement.output_device

    @property
    def is_multi_device_module(self: Any) -> bool:
        return bool(self.placement.is_multi_device)

    @property
    def modules_buffers(self: Any) -> list[Tensor]:
        return list(self._buffer_sync.named().values())

    @property
    def named_module_buffers(self: Any) -> dict[str, Tensor]:
        return dict(self._buffer_sync.named())

    @property
    def reducer(self: Any) -> TorchReducer:
        return TorchReducer(self._reducer)

    # -- parameters ----------------------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Leave these (fully qualified names) alone when ``module`` is wrapped."""
        if isinstance(params_and_buffers_to_ignore, str):
            # A string would be the names of its letters, and nothing would be ignored.
            raise BadTypeError(f"Give the names as a list: [{params_and_buffers_to_ignore!r}].")
        names = list(params_and_buffers_to_ignore)
        setattr(module, IGNORE_ATTRIBUTE, names)

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
        """The trainable parameters and whether each one's gradient is sparse."""
        roster = self._read_roster()
        pairs = [(p, spec) for p, spec in zip(roster.params, roster.specs, strict=True) if spec.requires_grad]
        return [param for param, _ in pairs], [spec.sparse for _, spec in pairs]

    def _build_debug_param_to_name_mapping(self: Any, parameters: list[Tensor]) -> dict[int, str]:
        """Index in ``parameters`` -> name."""
        named = {name: p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore}
        place = {id(param): n for n, param in enumerate(parameters)}
        mapping = {}
        for name, param in named.items():
            if param.requires_grad:
                if id(param) not in place:
                    raise BadArgumentError(f"Param with name {name} is not in the list of parameters.")
                mapping[place[id(param)]] = name
        if len(mapping) != len(parameters):
            raise BadArgumentError(
                f"Expected param to name mapping to cover all {len(parameters)} parameters, but the module has names "
                f"for {len(mapping)}."
            )
        return mapping

    def _assign_modules_buffers(self: Any) -> None:
        """Buffers are read from the module each time; there is no list to renew."""

    # -- starting ------------------------------------------------------------------------------------

    def _check_default_group(self: Any) -> None:
        """Refuse a wrapper of another group than the default one, which cannot be pickled."""
        if self.process_group is not dist.group.WORLD:
            raise StateError(
                "Only a wrapper of the default process group can be pickled or copied: another group cannot be found "
                "again afterwards. Save ddp.module.state_dict(), or wrap the copied module anew with process_group=..."
            )

    def _ddp_init_helper(
        self: Any, parameters: Any, expect_sparse_gradient: Any, param_to_name_mapping: Any, static_graph: bool
    ) -> None:
        """Plan anew from the module as it is now; the lists are read from the module, not from the arguments."""
        self._reducer.adopt(self._read_roster())
        if static_graph and not self.static_graph:
            self._set_static_graph()

    def _lazy_init(self: Any) -> None:
        self._setup_in_backward_optimizers()

    def _setup_in_backward_optimizers(self: Any) -> None:
        """Take over optimizers that run in backward; happens by itself when a backward begins."""
        self._reducer.planner.layout.take_optimizers()

    def _passing_sync_batchnorm_handle(self: Any, module: nn.Module) -> None:
        """paceline.SyncBatchNorm finds its group by itself and runs on any device: nothing to pass or to check."""

    # -- graph and hooks -----------------------------------------------------------------------------

    def _register_accum_grad_hook(self: Any) -> None:
        """Listen to the parameters' gradients (again, after ``_remove_autograd_hooks``)."""
        self._reducer.listen()

    def _fire_reducer_autograd_hook(self: Any, idx: int, *unused: Any) -> None:
        """Say that the gradient of the ``idx``-th trainable parameter is ready; inside a backward."""
        self._reducer.announce(self._reducer.trainable()[idx])

    def _register_delay_all_reduce_hook(
        self: Any, bucket_cap_mb: Any, param_to_hook_all_reduce: Any, device_ids: Any
    ) -> None:
        """Delayed parameters are the last buckets of the plan, which the constructor has made already."""

    def _delayed_all_reduce_hook(self: Any, grad: Tensor) -> Tensor:
        """Delayed buckets leave by themselves, after all others; the gradient passes through."""
        return grad

    def _clear_grad_buffer(self: Any) -> None:
        """Delayed gradients have no buffer of their own: they live in a bucket, and ``zero_grad()`` clears them."""

    def _set_static_graph(self: Any) -> None:
        """Promise that every backward uses the same parameters; before the first one."""
        try:
            self._reducer.set_static_graph()
        except StateError as error:
            self.fail(error)
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
        # By name: torch's own enumeration is welcome.
        self.register_buffer_hook(state, hook, BufferHookLocation[comm_hook_location.name])

    def _register_fused_optim(self: Any, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step each parameter as soon as its gradient is reduced."""
        params = [*map(_torch.local_tensor, self.parameters() if optim_params is None else optim_params)]
        _torch.overlapped_optimizer(optim, params, *args, **kwargs).register_ddp(self)

    def _check_comm_hook(self: Any, hook: Any) -> None:
        if not callable(hook):
            self.fail(BadTypeError("A communication hook must be callable."))

    def _remove_autograd_hooks(self: Any) -> None:
        self._reducer.stop_listening()

    def _check_reducer_finalized(self: Any) -> None:
        check_finalized(self._reducer)

    def _set_ddp_sink_clone(self: Any, val: bool) -> None:
        """Outputs are never cloned here; there is nothing to switch off."""

    def _set_sparse_metadata(self: Any, global_unique_ids: Any) -> None:
        """Sparse gradients find their rows by themselves; the hint is not needed."""

    def _update_process_group(self: Any, new_process_group: Any) -> None:
        self.update_process_group(new_process_group)

    # -- forward -------------------------------------------------------------------------------------

    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.pre_forward(*inputs, **kwargs)

    def _run_ddp_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.run_forward(*inputs, **kwargs)

    def _post_forward(self: Any, output: Any) -> Any:
        return self.post_forward(output)

    def _inside_ddp_forward(self: Any) -> contextlib.AbstractContextManager[None]:
        return self.inside_forward()

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        from paceline.module import DistributedDataParallel

        return DistributedDataParallel._active_ddp_module

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self: Any, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        """(inputs, kwargs) for one device, each in a tuple of one; empty if there is nothing at all."""
        if not inputs and not kwargs:
            return (), ()
        device = torch.device(self.device_type, device_id) if self.device_type != "cpu" else "cpu"
        return (move_to_device(inputs, device),), (move_to_device(kwargs, device),)

    def gather(self: Any, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    # -- buffers -------------------------------------------------------------------------------------

    def will_sync_module_buffers(self: Any) -> bool:
        return bool(self.will_sync_buffers())

    def _sync_buffers(self: Any) -> None:
        self.sync_buffers()

    def _sync_module_buffers(self: Any, authoritative_rank: int) -> None:
        self.sync_buffers(source=authoritative_rank)

    def _check_sync_bufs_pre_fwd(self: Any) -> bool:
        hook = self._buffer_sync.hook
        return bool(self.will_sync_buffers() and (hook is None or hook.location is BufferHookLocation.PRE_FORWARD))

    def _check_sync_bufs_post_fwd(self: Any) -> bool:
        hook = self._buffer_sync.hook
        return bool(self.will_sync_buffers() and hook is not None and hook.location is BufferHookLocation.POST_FORWARD)

    def _check_and_sync_module_buffers(self: Any) -> None:
        if self._check_sync_bufs_pre_fwd():
            self.sync_buffers(source=self.joining.authoritative_rank)

    def _default_broadcast_coalesced(
        self: Any, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Overwrite ``bufs`` (all buffers if not given) with the authoritative rank's."""
        tensors = self.modules_buffers if bufs is None else list(bufs)
        self.broadcast_tensors(tensors, source=authoritative_rank, chunk_bytes=bucket_size)

    def _distributed_broadcast_coalesced(
        self: Any, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self.broadcast_tensors(list(tensors), source=authoritative_rank, chunk_bytes=buffer_size)

    # -- join ----------------------------------------------------------------------------------------

    def _find_common_rank(self: Any, input_rank: int, rank_cond: bool) -> int:
        return highest_rank(rank_cond, rank=input_rank, channel=self._reducer.channel, device=self.placement.device)

    @property
    def _authoritative_rank(self: Any) -> int:
        return int(self.joining.authoritative_rank)

    def _sync_final_model(self: Any, is_last_joiner: bool) -> None:
        sync_final_model(self, is_last_joiner=is_last_joiner)

    def _check_global_requires_backward_grad_sync(self: Any, is_joined_rank: bool) -> bool:
        """[Note: one word before each exchange]: say it, or hear it on a rank that has joined."""
        rank = self._reducer.channel.rank
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        word = SILENCE if is_joined_rank else Word(syncs, self.will_sync_buffers(), rank)
        heard = exchange_word(word, channel=self._reducer.channel, device=self.join_device)
        return heard.sync_gradients

    def _match_all_reduce_for_bwd_pass(self: Any) -> None:
        self._reducer.shadow_backward()

    def _match_unused_params_allreduce(self: Any) -> None:
        """What was used travels with the last bucket: ``_match_all_reduce_for_bwd_pass`` has matched it already."""

    # -- logging -------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        return logging_data(self)

    def _set_ddp_runtime_logging_sample_rate(self: Any, sample_rate: int) -> None:
        if sample_rate < 1:
            self.fail(BadArgumentError(f"The sample rate must be at least 1, not {sample_rate}."))
        self.logbook.sample_rate = int(sample_rate)

    def _log_and_throw(self: Any, err_type: type[Exception], err_msg: str) -> None:
        self.fail(err_type(err_msg))

    # -- mixed precision -----------------------------------------------------------------------------

    def mark_mixed_precision(self: Any) -> None:
        """Show each parameter's two dtypes under the attributes that torch's class leaves on it."""
        _setup_mixed_precision_params(self.mixed_precision, self.module)

    def _root_copy_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        """Casts are made when a module's call is entered, as part of the graph (precision.py), not copied ahead."""

    def _module_wait_for_copy_hook(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """For the same reason there is no copy to wait for."""


# Module-level names of torch.nn.parallel.distributed.
_BufferCommHookLocation = BufferHookLocation
_DDPJoinHook = DDPJoinHook
_MixedPrecision = MixedPrecision
_find_tensors = find_tensors


def _tree_flatten_with_rref(output: Any) -> tuple[list[Any], Any, bool]:
    """The leaves of ``output`` (of what it refers to, if it is an RRef), their tree, and whether it is one."""
    is_rref = _RRef is not None and isinstance(output, _RRef)
    leaves, spec = _torch.pytree_flatten(output.local_value() if is_rref else output)
    return leaves, spec, is_rref


def _tree_unflatten_with_rref(output: list[Any], treespec: Any, output_is_rref: bool) -> Any:
    tree = _torch.pytree_unflatten(output, treespec)
    return _RRef(tree) if output_is_rref and _RRef is not None else tree


def _setup_mixed_precision_params(mixed_precision_config: Any, root_module: nn.Module) -> None:
    """Leave each parameter's two dtypes on it as attributes; no storage is allocated for them."""
    dtype, ignored = mixed_precision_config.param_dtype, ignored_names(root_module)
    for name, param in root_module.named_parameters():
        if name not in ignored and param.is_floating_point():
            param._fp_param = param.data  # type: ignore[attr-defined]
            param._mp_param = torch.empty(0, dtype=dtype or param.dtype, device=param.device)  # type: ignore[attr-defined]


def _cast_buffers(mixed_precision_config: Any, root_module: nn.Module) -> None:
    dtype = mixed_precision_config.buffer_dtype
    for module in root_module.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and dtype is not None:
                module._buffers[key] = cast_floats(buffer, dtype)


def _dump_DDP_relevant_env_vars() -> str:
    from paceline.logging_data import ENVIRONMENT
    from paceline.options import environment

    return "\n".join(f"env:{name}={environment(name) or 'N/A'}" for name in ENVIRONMENT)


produces_sparse_gradient = makes_sparse_gradients


def register_as_torch_s_class(ours: type) -> None:
    """Let ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` hold for our class.

    Code that asks it wants to know whether there is a ``module.`` prefix to strip, or gradients are synchronised:
    torch.distributed.checkpoint does, and so do trainers. Only what is asked of our own instances changes.
    """
    nn.parallel.DistributedDataParallel.register(ours)
