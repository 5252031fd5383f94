"""What autograd calls when it has accumulated a parameter's gradient: our hooks, and those of others.

[Note: hooks of others]
A user's post-accumulate-grad hook wants the gradient that the optimizer would get; some hooks step an optimizer
themselves. During a synchronised backward there is no such gradient yet: ``param.grad`` is this rank's own, or it has
been taken into the bucket. So the hooks of others wait. When the averages have been handed out, each hook is called
once, on every rank, if any rank has used the parameter. In a backward that does not synchronise they are called at
once, as ever.

To that end each parameter that we listen to has a `HookTable` in the place of torch's dictionary of hooks. It puts a
`Postponed` around each hook of others as it is registered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from operator import contains

from torch import Tensor

from paceline import _torch

Hook = Callable[[Tensor], object]


class HookKey:
    """What a hook of ours is registered under, so that it can be told from the hooks of others."""

    def averages(self, param: Tensor) -> bool:
        """Whether the gradient of ``param`` will be averaged at the end of the backward that runs."""
        return False

    def share(self) -> None:
        """Hear that another wrapper has a hook on the same parameter."""

    def own(self, param_id: int) -> None:
        """Hear that the wrapper of this key reduces the parameter with this id from now on."""


class Postponed:
    """A hook of others that waits for the average, if there will be one."""

    __slots__ = ("_hook", "_is_registered", "_table")

    def __init__(self, hook: Hook, table: HookTable, is_registered: Callable[[], bool] | None) -> None:
        self._hook, self._table, self._is_registered = hook, table, is_registered

    @_torch.unseen_by_compiler
    def __call__(self, param: Tensor) -> None:
        if not any(isinstance(key, HookKey) and key.averages(param) for key in list(self._table)):
            self.call(param)

    def call(self, param: Tensor) -> None:
        if self.is_registered():
            self._hook(param)

    def is_registered(self) -> bool:
        """Whether no handle has taken the hook away."""
        return self._is_registered is None or self._is_registered()


class HookTable(OrderedDict[object, Hook]):
    """The hooks of one parameter, which autograd calls in the order of registration, but ours before those of others.

    Ours begin the backward, so that the others know what to wait for.
    """

    owner: HookKey | None = None
    """The key of the wrapper that reduces the parameter, or that will when it is trained again.

    If several wrappers hold the parameter, this is the one in use.
    """
    some_are_of_others = False
    """Whether a hook of others has ever been put into any table. Most programs have none, and need no further look."""

    def __setitem__(self, key: object, hook: Hook) -> None:
        self.put(key, hook)

    def put(self, key: object, hook: Hook, *, is_registered: Callable[[], bool] | None = None) -> None:
        others = [] if key in self else [item for item in self.items() if isinstance(item[1], Postponed)]
        if not isinstance(key, HookKey):
            HookTable.some_are_of_others = True
            hook, others = Postponed(hook, self, is_registered), []
        # Autograd goes by the order of insertion, which ``move_to_end`` does not change.
        for name, _ in others:
            del self[name]
        super().__setitem__(key, hook)
        for name, other in others:
            super().__setitem__(name, other)

    def take_out(self, key: HookKey, param_id: int) -> None:
        """Remove the hook of a wrapper, and let another wrapper own the parameter, which has this id."""
        self.pop(key, None)
        if self.owner is key:
            self.owner = next((other for other in self if isinstance(other, HookKey)), None)
            if self.owner is not None:
                self.owner.own(param_id)

    def call_others(self, param: Tensor) -> None:
        """Call the hooks of others, which have waited."""
        for hook in list(self.values()):
            if isinstance(hook, Postponed):
                hook.call(param)


def add_hook(leaf: Tensor, key: HookKey, hook: Hook) -> HookTable:
    """Register a hook of ours under ``key``, in the place of an earlier one if there is one; return the table."""
    if _torch.gradient_hooks(leaf) is None:
        # Nearly all parameters come this way, and there may be thousands.
        table = HookTable()
        OrderedDict.__setitem__(table, key, hook)
        _torch.set_gradient_hooks(leaf, table)
        table.owner = key
        return table
    table = table_of(leaf)
    table[key] = hook
    table.owner = table.owner or key
    ours = [other for other in table if isinstance(other, HookKey)]
    for other in ours if len(ours) > 1 else ():
        other.share()
    return table


def table_of(leaf: Tensor) -> HookTable:
    """The hooks of ``leaf``, in a table of ours."""
    hooks = _torch.gradient_hooks(leaf)
    if isinstance(hooks, HookTable):
        return hooks
    table = HookTable()
    if hooks:
        for key, hook in hooks.items():
            # A handle from before removes its hook from torch's dictionary, not from this table. So that one is asked.
            table.put(key, hook, is_registered=partial(contains, hooks, key))
    _torch.set_gradient_hooks(leaf, table)
    return table


def keep_tables(first: Tensor, second: Tensor) -> None:
    """Let each of two tensors that have been swapped have the hooks that it had before.

    Autograd takes them from inside of the tensor, which has been swapped. The attribute still has those of before.
    """
    tables = [_torch.gradient_hooks(leaf) for leaf in (first, second)]
    if any(isinstance(table, HookTable) for table in tables):
        for leaf, table in zip((first, second), tables, strict=True):
            # None would leave autograd with what it has.
            _torch.set_gradient_hooks(leaf, OrderedDict() if table is None else table)


@_torch.unseen_by_compiler
def call_others(leaves: Iterable[Tensor]) -> None:
    """Call the hooks of others on these parameters, whose gradients are averages now."""
    for leaf in leaves:
        table_of(leaf).call_others(leaf)


def hears_alone(param: Tensor) -> bool:
    """Whether hooks of ours, and no hooks of others, see the accumulated gradient of ``param``."""
    hooks = _torch.gradient_hooks(param)
    return bool(hooks) and all(
        isinstance(key, HookKey) or (isinstance(hook, Postponed) and not hook.is_registered())
        for key, hook in (hooks or {}).items()
    )
