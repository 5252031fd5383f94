"""Every private torch name that Paceline uses, in one place, each with its reason.

Nothing else imports a private torch module (tests/test_layers.py holds this), so a new torch release is
checked by reading this file.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d

# torch.autograd has no public "call me when this backward is over"; FSDP2 and others use this one too.
_engine = torch.autograd.Variable._execution_engine


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now (the innermost one) has ended."""
    _engine.queue_callback(callback)


def current_node() -> Node | None:
    """The node that autograd evaluates in this thread, if any.

    In a callback of :func:`queue_callback` it is not None exactly when that backward ran inside another
    one (reentrant checkpointing): then it is the outer backward's node. No public equivalent.
    """
    return cast("Node | None", torch._C._current_autograd_node())


def will_execute(node: Node) -> bool:
    """Whether the running backward will reach ``node``: tells ``backward()`` from ``autograd.grad()``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch refuses the question for leaves inside autograd.grad(): nothing is accumulated there.
        return False


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``target.copy_(source)`` for each pair in one call: a third of the cost of a Python loop."""
    torch._foreach_copy_(list(targets), list(sources))


def flatten_dense(tensors: Sequence[Tensor]) -> Tensor:
    """Copies of tensors of one dtype, end to end, in one call; ``torch.cat`` wants each flattened first."""
    if len(tensors) == 1:
        # torch would hand out a view of it.
        return tensors[0].reshape(-1).clone()
    return torch._utils._flatten_dense_tensors(list(tensors))


def unflatten_dense(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The reverse: views of ``flat`` shaped as ``like``."""
    return torch._utils._unflatten_dense_tensors(flat, list(like))


def storage_users(tensor: Tensor) -> int:
    """How many tensors (and storages) share this tensor's memory. No public equivalent."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def group_store(group: ProcessGroup) -> Store:
    """The key-value store the group was made with: our control channel must not open a port of its own."""
    return c10d._get_process_group_store(group)


def default_group() -> ProcessGroup:
    """The default group as an object; ``dist.group.WORLD`` is its public name and is None before init."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group "
            "(or paceline.init())."
        )
    return group


def is_not_a_member(group: object) -> bool:
    """``new_group`` hands ranks outside of it a marker instead of a group."""
    return group is None or group == dist.GroupMember.NON_GROUP_MEMBER


def group_is_alive(group: ProcessGroup) -> bool:
    """Whether the group is still registered (not destroyed). ``is_initialized`` knows the default one only."""
    return group in c10d._world.pg_map


def group_timeout_s(group: ProcessGroup) -> float:
    """The group's own time-out; torch shows it only on the backend's options."""
    try:
        backend = c10d._world.pg_map[group][0].split(",")[0].split(":")[-1]
        device = torch.device("cpu") if backend in ("gloo", "mpi") else torch.accelerator.current_accelerator()
        options = group._get_backend(device or torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    except (AttributeError, KeyError, RuntimeError):
        return float(c10d.default_pg_timeout.total_seconds())


def is_joining(joinable: Any) -> bool:
    """Whether torch's ``Join`` is in force for it; ``Join`` says so only in this attribute."""
    return bool(joinable._join_config.enable)


def leave_join(joinable: Any) -> None:
    """``Join`` leaves itself in force after its end, at the price of a collective in every later forward."""
    joinable._join_config = type(joinable._join_config).construct_disabled_join_config()


def overlapped_optimizer(optimizer_class: type, params: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's overlapped optimizer, which registers itself on a DDP as a comm hook (``_register_fused_optim``)."""
    from torch.distributed.algorithms._optimizer_overlap.optimizer_overlap import _as_overlapped_optim

    return _as_overlapped_optim(optimizer_class, params, *args, **kwargs)


def optimizers_in_backward() -> int:
    """How many parameters torch's ``_apply_optimizer_in_backward`` holds; 0 if it was never used."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return 0 if module is None else len(module.param_to_optim_hook_handle_map)


def take_optimizers_in_backward(param: Tensor) -> bool:
    """Keep torch from stepping ``param`` on its local gradient; True if it has optimizers that now wait for us."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if module is None or not hasattr(param, "_in_backward_optimizers"):
        return False
    for handle in module.param_to_optim_hook_handle_map.get(param, []):
        handle.remove()
    return True


def optimizers_of(param: Tensor) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that ``_apply_optimizer_in_backward`` put on the parameter."""
    return param._in_backward_optimizers  # type: ignore[attr-defined]


def pytree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """``torch.utils.pytree`` is public only for its optree flavour; the tree's spec object is private."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def pytree_unflatten(leaves: list[Any], spec: Any) -> Any:
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def accumulate_grad_node(param: Tensor) -> Node:
    """The node that adds to ``param.grad`` (public since torch 2.4 as ``get_gradient_edge``)."""
    return torch.autograd.graph.get_gradient_edge(param).node


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def skipped_by_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function as it is, and compiles what it calls.

    ``torch.compiler.disable(recursive=False)`` does the same, but imports the whole compiler at once: more than
    a second for everybody who imports us.
    """
    _skip(function.__code__)
    return function


def hidden_from_compiler(function: AnyFunction) -> AnyFunction:
    """torch.compile runs this function, and all it calls, as it is; ``torch.compiler.disable``, but on first use."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    _skip(cast(Any, run).__code__)
    return cast(AnyFunction, run)


def _skip(code: CodeType) -> None:
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(code, strategy)
