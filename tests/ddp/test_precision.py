"""Low-precision parameters while a module runs: when they are in place, and that the full ones come back."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.ddp.precision import MixedPrecision, Swap, cast_floats

LOW = torch.bfloat16


class Net(nn.Module):
    """A root with a parameter of its own, layers, a norm with buffers, and a switch for checkpointing."""

    def __init__(self, *, recompute: bool | None = None, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.full((4,), 1.25))
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
        self.recompute, self.reentrant = recompute, reentrant
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.second[0].weight.dtype)
        x = self.first(x) * self.scale
        if self.recompute:
            return checkpoint(self.second, x, use_reentrant=self.reentrant)
        return self.second(x)


# A swap lives only as long as somebody holds it; in the class that is the wrapper, here it is the test.
_held: list[Swap] = []


@pytest.fixture(autouse=True)
def _holds_swaps() -> Iterator[None]:
    yield
    _held.clear()


def _swap(module: nn.Module, *, ignored: frozenset[str] = frozenset(), **dtypes: torch.dtype) -> Swap:
    swap = Swap(module, MixedPrecision(**(dtypes or {"param_dtype": LOW})), ignored=ignored)
    _held.append(swap)
    return swap


@contextmanager
def _parameters_stay(module: nn.Module) -> Iterator[None]:
    """The very parameters are in place again, in full precision and with their values."""
    before = dict(module.named_parameters(remove_duplicate=False))
    values = {name: param.detach().clone() for name, param in before.items()}
    yield
    after = dict(module.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    for name, param in after.items():
        assert param is before[name], name
        assert isinstance(param, nn.Parameter)
        assert param.dtype == values[name].dtype
        assert torch.equal(param, values[name]), name


def _inputs() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


def test_gradients_are_those_of_a_module_in_low_precision() -> None:
    net = Net()
    low = copy.deepcopy(net).to(LOW)
    _swap(net)
    with _parameters_stay(net):
        output = net(_inputs())
    assert output.dtype == LOW
    assert net.seen == [LOW]
    output.float().sum().backward()
    low(_inputs().to(LOW)).float().sum().backward()
    for ours, theirs in zip(net.parameters(), low.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, theirs.grad.float())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    plain, recomputed = Net(), Net(recompute=True, reentrant=reentrant)
    for net in (plain, recomputed):
        _swap(net)
        with _parameters_stay(net):
            output = net(_inputs().requires_grad_())
            output.float().pow(2).sum().backward()
    for (name, ours), theirs in zip(recomputed.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


class OwnWeight(nn.Module):
    """Recomputes a method that reads the module's own parameter: no module is called in the recomputation."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._part, x, use_reentrant=self.reentrant)

    def _part(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).tanh()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_method_finds_low_precision_parameters_again(reentrant: bool) -> None:
    net = OwnWeight(reentrant=reentrant)
    swap = _swap(net)
    with _parameters_stay(net):
        output = net(_inputs().requires_grad_()).float().sum()
        # The reducer enters it for the length of a backward.
        with swap:
            output.backward()
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_tied_weights_are_cast_once_and_sum_their_gradients(reentrant: bool) -> None:
    gradients = []
    for recompute in (False, True):
        net = Net(recompute=recompute, reentrant=reentrant)
        net.second[2].weight = net.first.weight
        _swap(net)
        seen: list[Tensor] = []
        net.second.register_forward_pre_hook(
            lambda module, args, net=net, seen=seen: seen.extend([module[2].weight, net.first.weight])
        )
        with _parameters_stay(net):
            output = net(_inputs().requires_grad_())
            assert seen[0] is seen[1]
            assert seen[0].dtype == LOW
            output.float().sum().backward()
        assert net.first.weight.grad is not None
        gradients.append(net.first.weight.grad)
    assert torch.allclose(*gradients, rtol=1e-2)


def test_only_floating_point_inputs_of_the_root_are_cast() -> None:
    seen: list[Any] = []

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Any, *, mask: Any, more: Any) -> Tensor:
            seen.extend([x.dtype, mask.dtype, more["deep"][0].dtype, more["text"]])
            return self.inner(x)

    root = Root()
    _swap(root)
    root(torch.ones(1, 2), mask=torch.ones(2, dtype=torch.bool), more={"deep": [torch.ones(1)], "text": "t"})
    assert seen == [LOW, torch.bool, LOW, "t"]


def test_a_part_that_is_called_alone_is_swapped_too() -> None:
    net = Net()
    _swap(net)
    with _parameters_stay(net):
        assert net.first(_inputs().to(LOW)).dtype == LOW


def test_parameters_that_are_not_floating_point_or_ignored_stay() -> None:
    net = Net()
    net.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    _swap(net, ignored=frozenset({"scale"}))
    inside: dict[str, Tensor] = {}
    net.second.register_forward_pre_hook(
        lambda module, args: inside.update(scale=net.scale, table=net.table, weight=net.first.weight)
    )
    with _parameters_stay(net), pytest.raises(RuntimeError):
        net(_inputs())  # the full-precision scale makes the activations full too, and the layer refuses them
    assert inside["scale"] is net.scale
    assert inside["table"] is net.table
    assert inside["weight"].dtype == LOW


def test_no_param_dtype_swaps_nothing() -> None:
    net = Net()
    _swap(net, reduce_dtype=LOW)
    assert net(_inputs()).dtype == torch.float32
    assert net.seen == [torch.float32]


def test_a_module_may_call_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.layer(x)
            return self(x, depth - 1) if depth else x

    net = Recursive()
    _swap(net)
    with _parameters_stay(net):
        net(_inputs()).float().sum().backward()
    assert net.layer.weight.grad is not None


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
def test_modules_that_reach_for_weights_in_their_own_way(kind: Callable[[int, int], nn.Module]) -> None:
    net = kind(4, 2)
    _swap(net)
    x = torch.randn(3, 2, 4)
    for _ in range(2):
        with _parameters_stay(net):
            output = net(x) if isinstance(net, nn.LSTM) else net(x, x, x)
        assert output[0].dtype == LOW
        output[0].float().sum().backward()
        assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in net.parameters())
        net.zero_grad()


# -- buffers -------------------------------------------------------------------------------------------


def test_buffers_are_cast_once_and_for_all() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    net.register_buffer("kept", torch.ones(2))
    net.register_buffer("nothing", None)
    _swap(net, buffer_dtype=LOW, ignored=frozenset({"kept"}))
    buffers = dict(net.named_buffers())
    assert buffers["0.running_mean"].dtype == LOW
    assert buffers["0.running_var"].dtype == LOW
    assert buffers["0.num_batches_tracked"].dtype == torch.long
    assert buffers["kept"].dtype == torch.float32
    assert net[1].weight.dtype == torch.float32


def test_buffers_are_left_alone_without_a_buffer_dtype() -> None:
    net = Net()
    net.register_buffer("table", torch.ones(2))
    table = net.table
    _swap(net)
    net(_inputs())
    assert net.table is table
    assert table.dtype == torch.float32


# -- exceptions ----------------------------------------------------------------------------------------


class BoomError(Exception):
    pass


def _raise(*args: object) -> None:
    raise BoomError


def _in_forward(part: nn.Module) -> Callable[[], None]:
    part.forward = _raise
    return lambda: part.__dict__.pop("forward")


# What lets a part of the network raise, and returns a function that mends it.
PLACES: dict[str, Callable[[Net], Callable[[], None]]] = {
    "forward": lambda net: _in_forward(net.second[1]),
    "forward of the root": _in_forward,
    "pre-hook": lambda net: net.second[0].register_forward_pre_hook(_raise).remove,
    "first pre-hook": lambda net: net.second[0].register_forward_pre_hook(_raise, prepend=True).remove,
    "first pre-hook of the root": lambda net: net.register_forward_pre_hook(_raise, prepend=True).remove,
    "forward hook": lambda net: net.second[0].register_forward_hook(_raise).remove,
    "first forward hook": lambda net: net.second[0].register_forward_hook(_raise, prepend=True).remove,
}


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_restores_the_parameters_and_the_next_forward_is_low_again(place: str) -> None:
    net = Net()
    _swap(net)
    for _ in range(2):
        mend = PLACES[place](net)
        with _parameters_stay(net), pytest.raises(BoomError):
            net(_inputs())
        mend()
    net.seen.clear()
    with _parameters_stay(net):
        assert net(_inputs()).dtype == LOW
    assert net.seen == [LOW]


def test_an_exception_that_the_root_catches_leaves_the_rest_of_its_forward_low() -> None:
    class Careful(Net):
        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(BoomError):
                self.second(self.first(x))
            return super().forward(x)

    net = Careful()
    raising_calls = [True]

    def raise_once(module: nn.Module, args: Any) -> None:
        if raising_calls:
            raising_calls.pop()
            raise BoomError

    net.second[1].register_forward_pre_hook(raise_once)
    _swap(net)
    with _parameters_stay(net):
        assert net(_inputs()).dtype == LOW
    assert net.seen == [LOW]


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_exception_in_a_recomputation_restores_the_parameters(reentrant: bool) -> None:
    net = Net(recompute=True, reentrant=reentrant)
    _swap(net)
    calls: list[int] = []

    def raise_in_recomputation(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise BoomError

    net.second[1].register_forward_pre_hook(raise_in_recomputation)
    with _parameters_stay(net):
        output = net(_inputs().requires_grad_())
        with pytest.raises(BoomError):
            output.float().sum().backward()
    with _parameters_stay(net):
        net(_inputs().requires_grad_()).float().sum().backward()
    assert net.seen == [LOW, LOW]


def test_a_backward_that_raises_restores_the_parameters() -> None:
    net = Net()
    swap = _swap(net)
    with _parameters_stay(net), pytest.raises(BoomError), swap:
        raise BoomError
    with _parameters_stay(net):
        assert net(_inputs()).dtype == LOW
    assert net.seen == [LOW]


def test_a_forward_inside_a_backward_leaves_the_parameters_low_until_it_ends() -> None:
    net = Net()
    swap = _swap(net)
    with _parameters_stay(net), swap:
        net(_inputs())
        assert net.first.weight.dtype == LOW


# -- how long casts and hooks live ---------------------------------------------------------------------


def _hooks_on(module: nn.Module) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules())


def test_a_swap_that_is_dropped_takes_its_hooks_along_and_leaves_those_of_others() -> None:
    net, calls = Net(), []
    net.register_forward_hook(lambda module, args, output: calls.append(output.dtype))
    _swap(net)
    assert _hooks_on(net) > 1
    assert net(_inputs()).dtype == LOW
    _held.clear()
    assert _hooks_on(net) == 1
    assert net(_inputs()).dtype == torch.float32
    assert calls == [LOW, torch.float32]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_of_a_swapped_module_is_inert(copied: Callable[[Net], Net]) -> None:
    net = Net()
    _swap(net)
    twin = copied(net)
    assert twin(_inputs()).dtype == torch.float32
    assert twin.seen == [torch.float32]
    with _parameters_stay(net):
        assert net(_inputs()).dtype == LOW
    # A wrapper of the copy makes a swap of its own.
    _swap(twin)
    with _parameters_stay(twin):
        assert twin(_inputs()).dtype == LOW


def test_casts_are_gone_after_a_forward_and_after_a_backward() -> None:
    net = Net()
    swap = _swap(net)
    casts: list[weakref.ref[Tensor]] = []
    net.second.register_forward_pre_hook(lambda module, args: casts.append(weakref.ref(net.first.weight)))
    with torch.no_grad():
        net(_inputs())
    assert casts.pop()() is None
    output = net(_inputs()).float().sum()
    with swap:
        casts.append(weakref.ref(net.first.weight))
        output.backward()
    del output
    assert [cast() for cast in casts] == [None, None]


def test_a_backward_finds_casts_of_the_parameters_as_they_are_then() -> None:
    net = Net()
    swap = _swap(net)
    net(_inputs())
    with torch.no_grad():
        net.first.weight.fill_(3.0)
    with torch.no_grad(), swap:
        assert net.first.weight.dtype == LOW
        assert net.first.weight.requires_grad
        assert torch.equal(net.first.weight, torch.full((4, 4), 3.0, dtype=LOW))


# -- casting -------------------------------------------------------------------------------------------


def test_a_tree_keeps_its_form() -> None:
    ids = torch.tensor([1])
    tree = {"a": [torch.ones(1), ids], "b": (torch.ones(1, dtype=torch.float64), "text", None)}
    cast = cast_floats(tree, LOW)
    assert cast["a"][0].dtype == LOW
    assert cast["a"][1] is ids
    assert cast["b"][0].dtype == LOW
    assert cast["b"][1:] == ("text", None)
    assert isinstance(cast["b"], tuple)
    assert tree["a"][0].dtype == torch.float32
