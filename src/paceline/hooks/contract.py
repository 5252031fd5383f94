"""What a comm hook is: ``hook(state, bucket) -> Future[Tensor]``, and what it may rely on.

The hook gets a bucket whose ``buffer()`` holds this rank's gradients, flat and not divided. It returns a future of the
averaged gradients: one tensor with as many elements, of any floating dtype.

[Note: order of collectives]
Collectives are matched between ranks by the order in which they start. A hook that starts all of them before it returns
keeps the order of the buckets. A hook that starts some in a callback of a future, as torch's PowerSGD and quantization
do, starts them from a thread of the backend at an arbitrary time. With two buckets under way, the ranks would start
them in different orders, and gloo would end the process. So only hooks that are known to be of the first kind may have
several buckets under way: ``overlapping`` declares such a hook, and ``overlaps`` asks.
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
from paceline.hooks import torch_hooks
from paceline.hooks.torch_hooks import comes_from, is_torch_hook
from paceline.reduction.exchange import hook_name


class HookBucket(Protocol):
    """The bucket that a hook receives; ``torch.distributed.GradBucket`` has the same methods."""

    def index(self) -> int:
        """Position in the order of launch, from 0."""

    def buffer(self) -> Tensor:
        """The gradients of the bucket, flat; not divided by the number of ranks."""

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter, with the parameter's shape."""

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of the gradients."""

    def is_last(self) -> bool:
        """Whether it is the last bucket of the step to be launched."""

    def set_buffer(self, buffer: Tensor) -> None:
        """Use another tensor of the same size and of any dtype as the buffer."""


Hook = Callable[[Any, HookBucket], Future[Tensor]]
AnyHook = TypeVar("AnyHook", bound=Callable[..., Any])

# Hooks are known by identity. No attribute is set on the function, since it may belong to anybody.
_overlapping: set[Callable[..., Any]] = set()
_own: dict[Callable[..., Any], bool] = {}
"""Our own hooks, and whether their state is a process group."""


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


def own_hook(*, takes_group: bool) -> Callable[[AnyHook], AnyHook]:
    """Declare one of our own hooks. It overlaps. With ``takes_group`` its state is a process group, or None for all."""

    def declare(hook: AnyHook) -> AnyHook:
        _own[hook] = takes_group
        return overlapping(hook)

    return declare


def overlaps(hook: Callable[..., Any]) -> bool:
    """Whether several buckets may be under way with ``hook``. An unknown hook gets one at a time."""
    hook = _innermost(hook)
    if any(is_torch_hook(hook, *name) for name in torch_hooks.OVERLAPPING):
        return True
    try:
        return hook in _overlapping
    except TypeError:  # a callable that cannot be hashed was never declared
        return False


def check_hook(hook: Any) -> None:
    """Refuse what cannot be called as ``hook(state, bucket)``. What has no signature is taken on trust."""
    if not callable(hook):
        raise BadTypeError(f"A communication hook must be callable, not a {type(hook).__name__}.")
    try:
        # A decorator's own signature counts: the function that it wraps may take other arguments.
        signature = inspect.signature(hook, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise BadTypeError(
            f"A communication hook is called with (state, bucket); {hook_name(hook)} cannot be."
        ) from None


def takes_group(hook: Callable[..., Any]) -> bool:
    """Whether the state of ``hook`` is a group. None then means the ranks of the wrapper that has the hook."""
    hook = _core(hook)
    return _is_own(hook, takes_group=True) or comes_from(hook, torch_hooks.TAKING_GROUP)


def check_state(hook: Callable[..., Any], state: object, group: dist.ProcessGroup) -> None:
    """Refuse a state whose ``process_group`` is None, which means all ranks, in a wrapper of only some of them."""
    core = _core(hook)
    is_known = _is_own(core) or comes_from(core, torch_hooks.MODULES)
    means_all = is_known and getattr(state, "process_group", group) is None
    if means_all and group.size() < dist.get_world_size():
        raise StateError(
            f"The state of this comm hook, a {type(state).__name__}, has process_group=None, which is all "
            f"{dist.get_world_size()} ranks of the job, but the wrapper averages over a group of {group.size()}. Make "
            "it with process_group=ddp.process_group (or torch.distributed.group.WORLD, if all are meant)."
        )


def _is_own(hook: Callable[..., Any], *, takes_group: bool = False) -> bool:
    try:
        return hook in _own and (_own[hook] or not takes_group)
    except TypeError:  # it cannot be hashed
        return False


def _core(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook that does the communication, inside any number of torch's wrappers and ours."""
    hook = _innermost(hook)
    if not inspect.isfunction(hook) or not comes_from(hook, torch_hooks.MODULES):
        return hook
    held = inspect.getclosurevars(hook).nonlocals.get("hook")
    return _core(held) if callable(held) else hook


def _innermost(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook`` without partial arguments and compression around it."""
    while True:
        # getattr() would not do: some objects, such as a Mock, have any attribute that one asks for.
        held = getattr(hook, "__dict__", {}).get("wrapped_hook")
        inner = hook.func if isinstance(hook, functools.partial) else held
        if inner is None:
            return hook
        hook = inner


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
