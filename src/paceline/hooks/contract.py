"""What a comm hook is: ``hook(state, bucket) -> Future[Tensor]``, and what it may rely on.

The hook gets a bucket whose ``buffer()`` holds this rank's gradients, flat and not divided, and returns a
future of the averaged gradients: one tensor with as many elements, of any floating dtype.

[Note: order of collectives]
Collectives are matched between ranks by the order in which they start. A hook that starts all of them
before it returns keeps the order of the buckets. One that starts some in a callback of a future (torch's
PowerSGD and quantization do) starts them from a thread of the backend, whenever that gets there: with two
buckets under way, the ranks start them in different orders and gloo ends the process. So only hooks known
to be of the first kind may have several buckets under way: ``overlaps`` tells, ``overlapping`` declares.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.errors import BadTypeError, StateError


class Bucket(Protocol):
    """What a hook receives; ``torch.distributed.GradBucket`` has the same methods."""

    def index(self) -> int:
        """Position in the order of launch, from 0."""

    def buffer(self) -> Tensor:
        """The gradients of the bucket, flat; not divided by the number of ranks."""

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one a parameter, with the parameter's shape."""

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of the gradients."""

    def is_last(self) -> bool:
        """Whether it is the last bucket of the step to be launched."""

    def set_buffer(self, buffer: Tensor) -> None:
        """Use another tensor of the same size, of any dtype, as the buffer."""


Hook = Callable[[Any, Bucket], Future[Tensor]]
AnyHook = TypeVar("AnyHook", bound=Callable[..., Any])

# By identity, not by an attribute set on the function: it may be anybody's.
_overlapping: set[Callable[..., Any]] = set()

# torch's hooks of that kind, by name: importing their package imports numpy.
_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_TORCH_OVERLAPPING = {
    "default_hooks.allreduce_hook",
    "default_hooks.fp16_compress_hook",
    "default_hooks.bf16_compress_hook",
    "debugging_hooks.noop_hook",
    "post_localSGD_hook.post_localSGD_hook",
}
# Files of the hooks, torch's and ours, that have a group as their state, or hand it to one that has.
_TAKE_GROUP = {"default_hooks", "optimizer_overlap_hooks", "ddp_zero_hook", "allreduce", "compress", "stand_ins"}


def overlapping(hook: AnyHook) -> AnyHook:
    """Declare that ``hook`` starts all its collectives before it returns; see [Note: order of collectives].

    >>> @overlapping
    ... def local_only(state, bucket):
    ...     future = Future()
    ...     future.set_result(bucket.buffer())
    ...     return future
    >>> overlaps(local_only)
    True
    """
    _overlapping.add(hook)
    return hook


def overlaps(hook: Callable[..., Any]) -> bool:
    """Whether several buckets may be under way with ``hook``; unknown hooks get one at a time."""
    hook = _innermost(hook)
    if torch_hook_name(hook) in _TORCH_OVERLAPPING:
        return True
    try:
        return hook in _overlapping
    except TypeError:  # a callable that cannot be hashed was never declared
        return False


def takes_two(hook: Callable[..., Any]) -> bool:
    """Whether ``hook(state, bucket)`` can be a call of it; taken for granted of what has no signature."""
    try:
        # Not of what a decorator says it wraps: that may take other arguments.
        signature = inspect.signature(hook, follow_wrapped=False)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def takes_group(hook: Callable[..., Any]) -> bool:
    """Whether None as the state of ``hook`` stands for a group: all ranks. In a wrapper of some, it is to be theirs."""
    return _file_of(hook) in _TAKE_GROUP


def check_state(hook: Callable[..., Any], state: object, group: dist.ProcessGroup) -> None:
    """Refuse a state that means all ranks (its ``process_group`` is None) in a wrapper of some of them."""
    means_all = _file_of(hook) and getattr(state, "process_group", group) is None
    if means_all and group.size() < dist.get_world_size():
        raise StateError(
            f"The state of this comm hook, a {type(state).__name__}, has process_group=None, which is all "
            f"{dist.get_world_size()} ranks of the job, but the wrapper averages over a group of {group.size()}. Make "
            "it with process_group=ddp.process_group (or torch.distributed.group.WORLD, if all are meant)."
        )


def _file_of(hook: Callable[..., Any]) -> str:
    """The file that has ``hook``, if it is one of torch's or ours, else ``""``. Of one around another, the other's."""
    hook = _innermost(hook)
    module = getattr(hook, "__module__", None)
    if not isinstance(module, str) or not module.startswith((_TORCH_HOOKS, "paceline.hooks.")):
        return ""
    held = inspect.getclosurevars(hook).nonlocals.get("hook") if inspect.isfunction(hook) else None
    return _file_of(held) if callable(held) else module.rpartition(".")[2]


def _innermost(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` without partial arguments and compression around it."""
    while True:
        # Not getattr(): there are objects that have whatever one asks for, a Mock say.
        held = getattr(hook, "__dict__", {}).get("wrapped_hook")
        inner = hook.func if isinstance(hook, functools.partial) else held
        if inner is None:
            return hook
        hook = inner


def torch_hook_name(hook: Callable[..., Any]) -> str:
    """``"default_hooks.allreduce_hook"`` and the like for the hooks that torch brings, else ``""``."""
    module, name = (getattr(hook, attribute, None) or "" for attribute in ("__module__", "__qualname__"))
    return f"{module.removeprefix(_TORCH_HOOKS)}.{name}" if module.startswith(_TORCH_HOOKS) else ""


def group_of(state: Any) -> dist.ProcessGroup:
    """The process group that a hook's state stands for: the group itself, or None for all ranks."""
    group = dist.group.WORLD if state is None else state
    if group is None:
        raise StateError("there is no process group: call paceline.init() before training with a comm hook")
    if not isinstance(group, dist.ProcessGroup):
        raise BadTypeError(
            f"the state of this comm hook must be a process group or None, got {type(state).__name__}: "
            "register_comm_hook takes the state first, then the hook"
        )
    return group
