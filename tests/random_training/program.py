"""What a training program is: plain data, the same on all ranks, which prints as the Python that makes it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

RANKS = (0, 1)

Way = Literal["wrapper", "module", "layers"]
"""How the forward goes: through the wrapper, through ``ddp.module``, or through its layers one by one."""
NoSync = Literal["", "around", "backward"]
"""``no_sync`` around nothing, around forward and backward, or around backward only."""
Checkpoint = Literal["", "reentrant", "recomputed"]
HookKind = Literal["tensor", "forward", "full_backward", "post_look", "post_scale", "post_step"]
"""``post_...`` are post-accumulate-grad hooks; ``post_step`` steps the parameter and drops its gradient."""


@dataclass(frozen=True)
class _Shown:
    """Prints itself without the fields that have their default value."""

    def __str__(self) -> str:
        told = [f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(told)})"


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(each, _Shown) for each in value):
        return "(" + "".join(f"{each}, " for each in value) + ")"
    return str(value) if isinstance(value, _Shown) else repr(value)


@dataclass(frozen=True)
class Hook(_Shown):
    """A user's hook on one layer. As an op it comes after wrapping, in ``Net.hooks`` before."""

    net: int
    layer: int
    kind: HookKind
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Net(_Shown):
    """A model of ``layers`` linear layers and its wrapper; ``shares`` is the model whose first layer it uses, too."""

    layers: int = 2
    width: int = 2
    shares: int | None = None
    hooks: tuple[Hook, ...] = ()


@dataclass(frozen=True)
class Fault(_Shown):
    """An exception that the program catches: on these ranks, before or behind the layer at ``place``."""

    phase: Literal["forward", "backward", "loss"]
    place: int
    ranks: tuple[int, ...] = RANKS
    # Whether the rank tries again at once, without the fault.
    retry: bool = False


@dataclass(frozen=True)
class Backward(_Shown):
    """Forwards and backwards: the last one synchronises, unless ``no_sync``; those before it accumulate."""

    net: int
    # Which numbers go in. It is not the place in the program, so that a program that is cut keeps its numbers.
    data: int
    way: Way = "wrapper"
    # The loss is behind this net, which gets the output of the first.
    through: int | None = None
    through_way: Way = "wrapper"
    through_use: tuple[tuple[int, ...] | None, ...] = (None, None)
    # What comes out of the second net goes through the first one again, as in a cycle of two translators.
    again: bool = False
    no_sync: NoSync = ""
    checkpoint: Checkpoint = ""
    # For each rank: the layers in use (None: all), how many backwards, the weight (None: without `weighted`).
    use: tuple[tuple[int, ...] | None, ...] = (None, None)
    repeat: tuple[int, ...] = (1, 1)
    weight: tuple[float | None, ...] = (None, None)
    # A second backward of the same graph, which was retained.
    twice: bool = False
    # Adds the squared gradients, taken with create_graph=True, to the loss.
    penalty: bool = False
    fault: Fault | None = None
    # The last forward and backward are the closure of the optimizer's step.
    closure: bool = False
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Step(_Shown):
    """The optimizer's step of one net."""

    net: int
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class ZeroGrad(_Shown):
    """``zero_grad`` of one net."""

    net: int
    set_to_none: bool = True
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Freeze(_Shown):
    """``requires_grad_(not on)`` for a layer, or for all of a net."""

    net: int
    layer: int | None = None
    on: bool = True
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Ema(_Shown):
    """Makes a moving average (``deepcopy(ddp.module)``), and brings it up to date the next time."""

    net: int
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Copy(_Shown):
    """Goes on with a deep copy of the wrapper, or with a new wrapper around the module or a copy of it."""

    net: int
    what: Literal["wrapper", "module", "rewrap"]
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Load(_Shown):
    """Loads the state that the net had at the last ``Load``, or at the start."""

    net: int
    assign: bool = False
    way: Way = "wrapper"
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Cast(_Shown):
    """``.double()`` or ``.float()`` of the wrapper."""

    net: int
    to: Literal["float64", "float32"]
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Change(_Shown):
    """A parameter that is new after wrapping: of a layer that is added, in the place of a layer's weight, or inside it.

    ``swap`` is what torch does to parameters instead of replacing them, if it is told to.
    """

    net: int
    what: Literal["add", "replace", "swap"]
    data: int
    # Whether each rank has its own values, which nobody has made equal.
    differs: bool = False
    ranks: tuple[int, ...] = RANKS


@dataclass(frozen=True)
class Compile(_Shown):
    """Calls the wrapper through ``torch.compile`` from now on, or no longer."""

    net: int
    backend: Literal["", "eager", "aot_eager"]
    ranks: tuple[int, ...] = RANKS


Op = Backward | Step | ZeroGrad | Freeze | Hook | Ema | Copy | Load | Cast | Change | Compile


@dataclass(frozen=True)
class Options(_Shown):
    """What the wrappers and the optimizers are made with."""

    small_buckets: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    verify_every: int = 0
    momentum: float = 0.0


@dataclass(frozen=True)
class Program(_Shown):
    """All of it."""

    seed: int
    backend: Literal["gloo", "cpu:shm"] = "gloo"
    options: Options = Options()
    nets: tuple[Net, ...] = (Net(),)
    ops: tuple[Op, ...] = ()

    @property
    def compiles(self) -> bool:
        return any(isinstance(op, Compile) for op in self.ops)

    @property
    def is_symmetric(self) -> bool:
        """Whether all ranks do the same, with different numbers."""
        return not any(_by_rank(op) for op in self.ops)

    def listing(self) -> str:
        """The program as Python that makes it, one op a line."""
        ops = "".join(f"        {op},\n" for op in self.ops)
        nets = _shown(self.nets)
        head = f"Program(\n    seed={self.seed}, backend={self.backend!r},\n    options={self.options}, nets={nets},\n"
        return f"{head}    ops=(\n{ops}    ),\n)"


def _by_rank(op: Op) -> bool:
    if op.ranks != RANKS:
        return True
    if not isinstance(op, Backward):
        return isinstance(op, Change) and op.differs
    each = (op.use, op.through_use, op.repeat, op.weight)
    return any(len(set(values)) > 1 for values in each) or (op.fault is not None and op.fault.ranks != RANKS)


def parse(listing: str) -> Program:
    """The program of a listing. It is evaluated, as it comes from the person at the keyboard."""
    names = (
        Program,
        Options,
        Net,
        Hook,
        Fault,
        Backward,
        Step,
        ZeroGrad,
        Freeze,
        Ema,
        Copy,
        Load,
        Cast,
        Change,
        Compile,
    )
    program = eval(listing, {"__builtins__": {}}, {each.__name__: each for each in names})
    assert isinstance(program, Program)
    return program
