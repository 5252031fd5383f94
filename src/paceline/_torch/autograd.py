"""The autograd engine, tensors and optimizers: what torch has no public name for."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import profiler as _profiler
from torch.autograd.graph import Node

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


GradientHooks = dict[object, Callable[[Tensor], object]]


def gradient_hooks(leaf: Tensor) -> GradientHooks | None:
    """What autograd calls when it has accumulated ``leaf.grad``; None if there was never such a hook.

    The hooks of ``register_post_accumulate_grad_hook`` are only in this attribute. Adding to it does what that function
    does, with checks and a handle, in five times the time. For a module with a thousand parameters that is a tenth of
    the time that it takes to wrap it. It also works while the parameter is frozen, and the hooks are still there when
    it is unfrozen.
    """
    return leaf._post_accumulate_grad_hooks


def set_gradient_hooks(leaf: Tensor, hooks: GradientHooks) -> None:
    """Let autograd call ``hooks``. It cannot be a plain dict, because handles of hooks hold a weak reference to it."""
    leaf._post_accumulate_grad_hooks = hooks


def watch_swaps(swapped: Callable[[Tensor, Tensor], None]) -> None:
    """Call ``swapped`` with any two tensors that have changed places, from now on.

    All that swaps comes to this function: ``torch.utils.swap_tensors``, and the casts and ``load_state_dict`` of a
    module if ``torch.__future__.set_swap_module_params_on_conversion`` is set. Autograd's hooks go with the contents,
    while the objects that users hold stay, and torch has no hook for it.
    """
    swap = torch._C._swap_tensor_impl

    @functools.wraps(swap)
    def swap_and_tell(first: Tensor, second: Tensor) -> None:
        swap(first, second)
        swapped(first, second)

    torch._C._swap_tensor_impl = swap_and_tell  # type: ignore[assignment]


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
    """Views of ``flat``, end to end, shaped as ``like``, in one call."""
    return torch._utils._unflatten_dense_tensors(flat, list(like))


def storage_users(tensor: Tensor) -> int:
    """How many tensors (and storages) share this tensor's memory. No public equivalent."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


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
    """Flatten a tree. ``torch.utils.pytree`` is public only for its optree flavour, and the spec object is private."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def pytree_unflatten(leaves: list[Any], spec: Any) -> Any:
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, spec)


def accumulate_grad_node(param: Tensor) -> Node:
    """The node that adds to ``param.grad`` (public since torch 2.4 as ``get_gradient_edge``)."""
    return torch.autograd.graph.get_gradient_edge(param).node


def is_profiling() -> bool:
    """Whether a profiler is running. This is the flag that it sets in Python, which costs nothing to read."""
    return _profiler._is_profiler_enabled


def start_profiler_range(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event as backends record theirs, with the shapes of ``tensors``; call what is returned to end it.

    ``torch.profiler.record_function`` knows no shapes, and must end on the thread it began on.
    """
    recorded = torch._C._profiler._RecordFunctionFast(name, list(tensors), {})
    recorded.__enter__()
    return functools.partial(recorded.__exit__, None, None, None)


def run_as_soon_as_ready(node: Node) -> None:
    """Let the engine run ``node`` before all others that are ready, as it does with those that accumulate."""
    node._set_sequence_nr(2**63 - 1)  # type: ignore[attr-defined]


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether ``register_hook`` was used on it; the hooks are only in this attribute."""
    return bool(tensor._backward_hooks)


def below_transforms(tensor: Tensor) -> Tensor:
    """The tensor that ``backward()`` sees in the place of ``tensor``; outside of transforms it is ``tensor`` itself.

    Each transform of ``torch.func`` wraps the tensors of the transform around it, and the ``grad_fn`` of such a wrapper
    belongs to its own level only.
    """
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_transforming() -> bool:
    """Whether the caller runs inside a transform of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_transformed(tensor: Tensor) -> bool:
    """Whether a transform of ``torch.func`` has wrapped ``tensor``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Run the body of the ``with`` as if there were no transform of ``torch.func``.

    A transform refuses to write to tensors that were made outside of it, such as the buffers of a module.
    """
    if not is_transforming():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def is_functionalizing() -> bool:
    """Whether a ``torch.func.functionalize`` runs, which has no rule for autograd functions written in Python."""
    if not is_transforming():
        return False
    functorch = torch._C._functorch
    functionalize = functorch.TransformType.Functionalize
    return any(level.key() == functionalize for level in functorch.get_interpreter_stack())


def dtype_number(dtype: torch.dtype) -> int:
    """A number that stands for a dtype, the same on all ranks."""
    return sorted(str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)).index(str(dtype))
