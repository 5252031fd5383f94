"""How one rank runs a program. The rank's own class says what a wrapper is and how a backward runs."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .nets import LR, LinearNet, UserFaultError
from .program import Backward, Cast, Change, Compile, Copy, Ema, Fault, Freeze, Hook, Load, Op, Program, Step, ZeroGrad

Snapshot = dict[str, tuple[Tensor, Tensor | None]]
"""Each parameter with its gradient, by name, in float64."""


@dataclass
class Trained:
    """A net in training."""

    wrapper: Any
    optimizer: torch.optim.Optimizer
    state: dict[str, Tensor]
    call: Callable[..., Tensor]
    ema: nn.Module | None = None
    # The parameters that ranks have started with, or have met in a synchronised backward since.
    met: list[nn.Parameter] = field(default_factory=list)

    @property
    def module(self) -> LinearNet:
        module = self.wrapper.module
        assert isinstance(module, LinearNet)
        return module


class Replica(ABC):
    """One rank of a program. ``snapshots`` has one entry for the start, and one for each op that has ended."""

    def __init__(self, program: Program, rank: int, *, values_of: int) -> None:
        """``values_of`` is the rank whose initial values this one has until wrapping makes them equal."""
        self.program = program
        self.rank = rank
        self.values_of = values_of
        self.nets: list[Trained] = []
        self.snapshots: list[Snapshot] = []

    @abstractmethod
    def wrap(self, module: nn.Module) -> Any:
        """A wrapper: it has ``module``, ``no_sync()`` and ``weighted()``."""

    @abstractmethod
    def copy_wrapper(self, wrapper: Any) -> Any:
        """A deep copy of a wrapper."""

    @abstractmethod
    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """``loss.backward()``."""

    @abstractmethod
    def hook_after_accumulation(self, param: Tensor, hook: nets.PostHook) -> None:
        """Register a post-accumulate-grad hook."""

    @abstractmethod
    def compiled(self, wrapper: Any, backend: str) -> Callable[..., Tensor]:
        """The wrapper, called through ``torch.compile``."""

    def forgets(self) -> None:  # noqa: B027 (a rank with a wrapper has nothing to do here)
        """A new loss is about to be computed."""

    # -- running -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all of the program, or as much of it as does not raise."""
        for index, spec in enumerate(self.program.nets):
            first = None if spec.shares is None else self.nets[spec.shares].module.layers[0]
            module = LinearNet(spec.layers, spec.width, first=first)
            nets.fill(module, self.program.seed, index, self.values_of)
            for hook in spec.hooks:
                self._hook_on(module, hook)
            self.nets.append(self._trained(self.wrap(module)))
        self.snapshots.append(self._snapshot())
        for op in self.program.ops:
            if self.rank in op.ranks:
                self._do(op)
            self.snapshots.append(self._snapshot())

    def _trained(self, wrapper: Any) -> Trained:
        made = Trained(wrapper, self._optimizer(wrapper), copy.deepcopy(wrapper.module.state_dict()), wrapper)
        made.met = list(wrapper.module.parameters())
        return made

    def _optimizer(self, wrapper: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(wrapper.parameters(), lr=LR, momentum=self.program.options.momentum)

    def _snapshot(self) -> Snapshot:
        return {
            f"net{index}.{name}": (_kept(param), None if param.grad is None else _kept(param.grad))
            for index, net in enumerate(self.nets)
            for kind, module in ((".", net.module), (".ema.", net.ema))
            if module is not None
            for name, param in ((kind + name, param) for name, param in module.named_parameters())
        }

    def _do(self, op: Op) -> None:
        net = self.nets[op.net]
        match op:
            case Backward():
                self._train(op)
            case Step():
                net.optimizer.step()
            case ZeroGrad():
                net.wrapper.zero_grad(set_to_none=op.set_to_none)
            case Freeze():
                frozen = net.module if op.layer is None else net.module.layers[op.layer]
                frozen.requires_grad_(not op.on)
            case Hook():
                self._hook_on(net.module, op)
            case Ema():
                _average_weights(net)
            case Copy():
                self._copy(op)
            case Load():
                self._load(op)
            case Cast():
                net.wrapper.to(getattr(torch, op.to))
            case Change():
                self._change(op)
            case Compile():
                net.call = self.compiled(net.wrapper, op.backend) if op.backend else net.wrapper

    # -- forward and backward ------------------------------------------------------------------------

    def _train(self, op: Backward) -> None:
        if any(weight is not None for weight in op.weight):
            # The documentation asks for this at the start of a step that weighs.
            self.nets[op.net].wrapper.zero_grad()
        fault = op.fault if op.fault is not None and self.rank in op.fault.ranks else None
        try:
            self._accumulate(op, fault)
        except UserFaultError:
            # The documentation asks for this after a backward that raised: its gradients are unspecified.
            for net in self.nets:
                net.wrapper.zero_grad()
            if fault is not None and fault.retry:
                self._accumulate(op, None)

    def _accumulate(self, op: Backward, fault: Fault | None) -> None:
        last = op.repeat[self.rank] - 1
        for micro in range(last):
            self._once(op, micro, "around", fault)
        if op.closure:
            self.nets[op.net].optimizer.step(lambda: self._once(op, last, op.no_sync, fault))
        else:
            self._once(op, last, op.no_sync, fault)

    def _once(self, op: Backward, micro: int, no_sync: str, fault: Fault | None) -> Tensor:
        involved = [self.nets[index] for index in {op.net, op.net if op.through is None else op.through}]
        weight = op.weight[self.rank]
        with contextlib.ExitStack() as stack:
            if weight is not None:
                stack.enter_context(self.nets[op.net].wrapper.weighted(weight))
            if no_sync == "around":
                _enter_no_sync(stack, involved)
            loss = self._loss(op, micro, fault)
            if no_sync == "backward":
                _enter_no_sync(stack, involved)
            if loss.requires_grad:
                self.backward(loss, retain_graph=op.twice)
                if op.twice:
                    self.backward(loss, retain_graph=False)
        return loss.detach()

    def _loss(self, op: Backward, micro: int, fault: Fault | None) -> Tensor:
        self.forgets()
        net = self.nets[op.net]
        x = nets.numbers(self.program.seed, op.data, self.rank, micro, shape=(3, net.module.width))
        # Reentrant checkpoints give no gradients to parameters whose inputs need none.
        y = self._forward(
            net, x.requires_grad_(op.checkpoint == "reentrant"), op.way, op.use[self.rank], op.checkpoint, fault
        )
        if op.through is not None:
            second = self.nets[op.through]
            use = op.through_use[self.rank]
            y = self._forward(second, _fitted(y, second.module.width), op.through_way, use, op.checkpoint, None)
            if op.again:
                y = self._forward(net, _fitted(y, net.module.width), op.way, op.use[self.rank], op.checkpoint, None)
        if fault is not None and fault.phase == "loss":
            y = nets.raising(y)
        loss = y.square().mean()
        if op.penalty:
            params = [param for param in net.module.parameters() if param.requires_grad]
            if params and loss.requires_grad:
                grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
                loss = loss + sum(grad.square().sum() for grad in grads if grad is not None)
        return loss

    def _forward(
        self, net: Trained, x: Tensor, way: str, use: tuple[int, ...] | None, checkpoint: str, fault: Fault | None
    ) -> Tensor:
        module = net.module
        x = x.to(next(module.parameters()).dtype)
        inner = fault if fault is not None and fault.phase != "loss" else None
        if way == "wrapper":
            return net.call(x, use, checkpoint, inner)
        if way == "module":
            return module(x, use, checkpoint, inner)
        used = range(len(module.layers)) if use is None else [each for each in use if each < len(module.layers)]
        if inner is not None and inner.phase == "backward":
            x = nets.raising(x)
        elif inner is not None:
            raise UserFaultError("raised between the layers, on purpose")
        for layer in used:
            x = torch.tanh(module.layers[layer](x))
        return x

    # -- everything else -----------------------------------------------------------------------------

    def _hook_on(self, module: nn.Module, hook: Hook) -> None:
        layer = module.layers[hook.layer]
        assert isinstance(layer, nn.Linear)
        if hook.kind == "forward":
            layer.register_forward_hook(nets.scale_output)
        elif hook.kind == "full_backward":
            layer.register_full_backward_hook(nets.scale_grad_input)
        for param in layer.parameters():
            if hook.kind == "tensor" and param.requires_grad:
                param.register_hook(nets.scale)
            elif hook.kind in nets.POST_HOOKS and param.requires_grad:
                self.hook_after_accumulation(param, nets.POST_HOOKS[hook.kind])

    def _copy(self, op: Copy) -> None:
        old = self.nets[op.net]
        if op.what == "wrapper":
            new = self.copy_wrapper(old.wrapper)
        else:
            new = self.wrap(copy.deepcopy(old.module) if op.what == "module" else old.module)
        made = self._trained(new)
        made.ema = old.ema
        self.nets[op.net] = made

    def _load(self, op: Load) -> None:
        net = self.nets[op.net]
        state = copy.deepcopy(net.state)
        net.state = copy.deepcopy(net.module.state_dict())
        if op.way == "wrapper":
            prefixed = {f"module.{name}": value for name, value in state.items()}
            net.wrapper.load_state_dict(prefixed, strict=False, assign=op.assign)
        else:
            net.module.load_state_dict(state, strict=False, assign=op.assign)
        if op.assign:
            # The parameters are other objects now. They have the values of a state that all ranks share.
            net.met = [*net.met, *net.module.parameters()]
            net.optimizer = self._optimizer(net.wrapper)

    def _change(self, op: Change) -> None:
        net = self.nets[op.net]
        width, dtype = net.module.width, next(net.module.parameters()).dtype
        owner = self.rank if op.differs else 0
        if op.what == "add":
            layer = nn.Linear(width, width, dtype=dtype)
            nets.fill(layer, self.program.seed, op.data, owner)
            net.module.layers.append(layer)
        else:
            values = nets.numbers(self.program.seed, op.data, owner, shape=(width, width)) * 0.7
            new = nn.Parameter(values.to(dtype))
            if op.what == "replace":
                net.module.layers[-1].weight = new
            else:
                self.swap(net.module.layers[-1].weight, new)
        net.optimizer = self._optimizer(net.wrapper)

    def swap(self, weight: Tensor, new: nn.Parameter) -> None:
        """Swap what is inside of these two."""
        torch.utils.swap_tensors(weight, new)
        for net in self.nets:
            # It is the same object, and a new parameter.
            net.met = [param for param in net.met if param is not weight]


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True)


def _fitted(x: Tensor, width: int) -> Tensor:
    """``x`` with as many columns as the next net takes."""
    return torch.cat([x] * width, dim=1)[:, :width]


def _enter_no_sync(stack: contextlib.ExitStack, involved: list[Trained]) -> None:
    for net in involved:
        stack.enter_context(net.wrapper.no_sync())


def _average_weights(net: Trained) -> None:
    if net.ema is None:
        net.ema = copy.deepcopy(net.module).requires_grad_(False)
        net.ema.zero_grad()
        return
    with torch.no_grad():
        current = dict(net.module.named_parameters())
        for name, param in net.ema.named_parameters():
            param.lerp_(current[name].to(param.dtype), 0.1)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that programs of this kind rightly give."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
