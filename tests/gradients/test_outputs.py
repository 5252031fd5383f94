"""Finding tensors in outputs, and parameters in the graph behind them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from paceline.gradients.outputs import find_tensors, first_param_node, tie_to_graph, unreachable_params

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Data:
    left: Any
    right: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class SlottedData:
    left: Any
    right: Any


class Plain:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self._right = left, right


class Slotted:
    __slots__ = ("left", "never_set")

    def __init__(self, left: Any) -> None:
        self.left = left


class SlottedChild(Slotted):
    __slots__ = "right"

    def __init__(self, left: Any, right: Any) -> None:
        super().__init__(left)
        self.right = right


class LazyMapping(Mapping[int, Any]):
    """Makes its values when asked for them, as lazily stacked containers do."""

    def __init__(self, *tensors: Any) -> None:
        self._tensors = tensors

    def __getitem__(self, key: int) -> Any:
        return [self._tensors[key]]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._tensors)))

    def __len__(self) -> int:
        return len(self._tensors)


A, B = torch.zeros(1), torch.ones(2)


class Output(OrderedDict[str, Any]):
    """As some libraries return: a dictionary whose items are attributes too, and with others beside them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = "kept"

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


CONTAINERS = [
    [A, B],
    (A, B),
    Pair(A, B),
    {"n": 1, "a": A, "b": B},
    OrderedDict(a=A, b={"z": (B,)}),
    defaultdict(list, a=A, b=B),
    Output(a=A, b=B),
    Data(A, B),
    SlottedData(A, B),
    Plain(A, B),
    SimpleNamespace(a=A, deep=SimpleNamespace(b=[B])),
    UserDict(a=A, b=B),
    [3, {"x": (A,)}, Pair(None, Data(B))],
    {"ids": (1,), "deep": [[A], Output(b=[B])]},
]
FOUND_ONLY = [
    LazyMapping(A, B),
    Plain(Plain(None, A), {"k": Slotted(B)}),
    (A, None, 1, 2.0, "text", b"bytes", torch.float32, torch.device("cpu"), 3j, True, B),
]


@pytest.mark.parametrize("value", CONTAINERS + FOUND_ONLY, ids=lambda value: type(value).__name__)
def test_tensors_are_found_in_order(value: Any) -> None:
    found = list(find_tensors(value))
    assert len(found) == 2
    assert found[0] is A
    assert found[1] is B


def test_a_tensor_and_a_parameter_are_found_themselves() -> None:
    param = nn.Parameter(A)
    assert next(find_tensors(A)) is A
    assert next(find_tensors(param)) is param


@pytest.mark.parametrize("value", [{A, B}, frozenset([A, B]), SlottedChild(A, B)], ids=lambda v: type(v).__name__)
def test_tensors_are_found_where_there_is_no_order(value: Any) -> None:
    assert sorted(map(id, find_tensors(value))) == sorted([id(A), id(B)])


def test_tensors_are_found_in_a_packed_sequence_and_a_distribution() -> None:
    packed = pack_sequence([torch.ones(3, 2, requires_grad=True), torch.ones(1, 2)])
    assert any(tensor is packed.data for tensor in find_tensors(packed))
    distribution = torch.distributions.Normal(torch.zeros(2, requires_grad=True), torch.ones(2))
    assert any(tensor is distribution.loc for tensor in find_tensors([distribution]))


def test_containers_that_are_made_on_demand_are_not_taken_for_others() -> None:
    # A list that was looked at and freed may leave its id to the next one.
    tensors = [torch.full((1,), float(n)) for n in range(200)]
    value = LazyMapping(*(LazyMapping(tensor) for tensor in tensors))
    assert {id(tensor) for tensor in find_tensors(value)} == {id(tensor) for tensor in tensors}


def test_a_cycle_ends() -> None:
    plain = Plain(A, None)
    plain._right = [plain, {"again": plain}]
    assert len(list(find_tensors(plain))) == 1
    items: list[Any] = [B]
    items.append(items)
    assert len(list(find_tensors(items))) == 1


@pytest.mark.parametrize("value", [None, 1, "text", [], {}, (), object(), nn.Linear(2, 2), Data, len, lambda: A])
def test_there_is_nothing_in_what_holds_no_outputs(value: Any) -> None:
    assert list(find_tensors(value)) == []


def test_a_deeply_nested_list_does_not_exhaust_the_stack() -> None:
    value: Any = A
    for _ in range(20_000):
        value = [value]
    assert next(find_tensors(value)) is A
    # Freed step by step: a deep chain of lists is deep to free as well.
    while isinstance(value, list):
        value = value.pop()


# -- the graph behind ----------------------------------------------------------------------------------


def _params(n: int) -> list[Tensor]:
    return [nn.Parameter(torch.full((2,), float(i + 1))) for i in range(n)]


def test_what_the_outputs_do_not_lead_to_is_unreachable() -> None:
    a, b, c, d = params = _params(4)
    frozen = b.detach()
    plain = [torch.ones(1), torch.ones(1, requires_grad=True)]
    for outputs, missing in [
        ([(a * 2 + c).relu().sum()], {1, 3}),
        ([a.sum(), (b * 2).detach(), c.exp()], {1, 3}),
        ([a], {1, 2, 3}),
        ([(a.view(1, 2) * frozen).sum()], {1, 2, 3}),
        ([], {0, 1, 2, 3}),
        (plain, {0, 1, 2, 3}),
        ([a * b, c * d], set()),
    ]:
        assert unreachable_params(outputs, params) == missing


def test_a_graph_that_is_wide_and_deep_is_walked_once() -> None:
    a, b = _params(2)
    x: Tensor = a
    for _ in range(3000):
        x = x + x  # 2**3000 paths
    assert unreachable_params([x], [a, b]) == {1}


def _is_one_of(*params: Tensor) -> Callable[[Tensor], bool]:
    return lambda tensor: any(tensor is param for param in params)


def test_the_first_node_is_that_of_a_parameter() -> None:
    a, b, other = _params(3)
    node = first_param_node((other * 2 + (b * 3).exp()).sum(), _is_one_of(a, b))
    assert node.variable is b  # type: ignore[attr-defined]
    for output in ((other * 2).sum(), torch.ones(1), torch.ones(1, requires_grad=True)):
        assert first_param_node(output, _is_one_of(a)) is None


def test_the_walk_stops_at_the_first_parameter() -> None:
    a, b = _params(2)
    asked: list[Tensor] = []

    def is_param(tensor: Tensor) -> bool:
        asked.append(tensor)
        return True

    assert first_param_node(a * b, is_param) is not None
    assert len(asked) == 1


# -- ties ----------------------------------------------------------------------------------------------


def _anchor() -> Tensor:
    return torch.zeros((), requires_grad=True)


def _any(tensor: Tensor) -> bool:
    return True


def test_a_tensor_without_a_graph_gets_one_with_the_anchor_as_its_leaf() -> None:
    anchor, value = _anchor(), torch.ones(3)
    tied = tie_to_graph(value, anchor, _any)
    assert not value.requires_grad
    assert torch.equal(tied, value)
    node = first_param_node(tied, _is_one_of(anchor))
    assert node.variable is anchor  # type: ignore[attr-defined]
    # It may be changed in place, and has memory of its own.
    tied += 1
    assert value.tolist() == [1.0, 1.0, 1.0]
    ran: list[object] = []
    tied.grad_fn.register_hook(lambda *_: ran.append(tied))
    tied.sum().backward()
    assert ran
    assert anchor.grad is None


def test_gradients_pass_a_tie_unchanged() -> None:
    x = torch.ones(3, requires_grad=True)
    tie_to_graph(x * 2, _anchor(), _any).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


# Whole numbers have no gradient.
TIED = [*CONTAINERS, [torch.tensor(3), {"ids": torch.tensor([1]), "x": A}, B]]


@pytest.mark.parametrize("value", TIED, ids=lambda value: type(value).__name__)
def test_every_floating_point_tensor_is_tied_in_a_copy_of_its_container(value: Any) -> None:
    before = list(find_tensors(value))
    tied = tie_to_graph(value, _anchor(), _any)
    assert type(tied) is type(value)
    assert tied is not value
    after = list(find_tensors(tied))
    assert [tensor.requires_grad for tensor in after] == [tensor.is_floating_point() for tensor in before]
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))
    # The user may have kept what forward returned: that stays as it was.
    assert all(now is then for now, then in zip(find_tensors(value), before, strict=True))
    assert not any(tensor.requires_grad for tensor in before)


@pytest.mark.parametrize("value", TIED, ids=lambda value: type(value).__name__)
def test_only_what_was_chosen_is_tied(value: Any) -> None:
    after = list(find_tensors(tie_to_graph(value, _anchor(), lambda tensor: tensor is B)))
    assert any(tensor is A for tensor in after)
    assert not any(tensor is B for tensor in after)
    assert sum(tensor.requires_grad for tensor in after) == 1


def test_a_copied_dictionary_keeps_its_attributes_and_its_factory() -> None:
    tied = tie_to_graph(Output(a=A), _anchor(), _any)
    assert tied.note == "kept"
    assert tied.a is tied["a"]
    assert tied.a.requires_grad
    assert tie_to_graph(defaultdict(list, a=A), _anchor(), _any).default_factory is list


def test_a_complex_tensor_can_be_tied() -> None:
    assert tie_to_graph(torch.ones(2, dtype=torch.complex64), _anchor(), _any).requires_grad


def test_an_object_that_leads_back_to_itself_is_copied_once() -> None:
    value = SimpleNamespace(a=A)
    value.me = [value]
    tied = tie_to_graph(value, _anchor(), _any)
    assert tied.me[0] is tied
    assert tied.a.requires_grad
    assert value.me[0] is value


@pytest.mark.parametrize(
    "value",
    [SimpleNamespace(a=1, b=[]), nn.Linear(1, 1), int, None, "t", 1.5, Data, torch.tensor(1), torch.tensor(True)],
    ids=repr,
)
def test_everything_else_stays_the_very_object(value: Any) -> None:
    assert tie_to_graph(value, _anchor(), _any) is value
    assert tie_to_graph([value], _anchor(), _any)[0] is value
