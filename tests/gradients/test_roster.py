"""Which parameters take part, and whether that has changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline._torch import IGNORE_ATTRIBUTE
from paceline.errors import StateError
from paceline.gradients.plan import ParameterSpec
from paceline.gradients.roster import SPEC_FIELDS, Roster, ignored_names, makes_sparse_gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(3, 2)
        self.second = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))


def _roster(module: nn.Module, **kwargs: frozenset[str]) -> Roster:
    return Roster(module, **{"ignored": frozenset(), **kwargs})


def _names(roster: Roster) -> list[str]:
    return [spec.name for spec in roster.specs]


def test_names_and_order_are_those_of_named_parameters() -> None:
    net = Net()
    roster = _roster(net)
    assert _names(roster) == [name for name, _ in net.named_parameters()]
    assert all(ours is theirs for ours, theirs in zip(roster.params, net.parameters(), strict=True))


def test_a_spec_says_what_the_parameter_is() -> None:
    conv = nn.Conv2d(3, 8, 2, bias=False).to(memory_format=torch.channels_last).double()
    conv.weight.requires_grad_(False)
    (spec,) = _roster(conv).specs
    assert spec.stride != (12, 4, 2, 1)
    stride = tuple(conv.weight.stride())
    assert spec == ParameterSpec("weight", (8, 3, 2, 2), stride, "float64", 8, "cpu", requires_grad=False)
    assert (spec.numel, spec.size_bytes) == (96, 768)


def test_a_shared_parameter_appears_once_under_its_first_name() -> None:
    net = Net()
    net.tied = nn.Linear(3, 2)
    net.tied.weight = net.first.weight
    assert "first.weight" in _names(_roster(net))
    assert "tied.weight" not in _names(_roster(net))
    assert "tied.bias" in _names(_roster(net))


def test_ignored_parameters_are_left_out() -> None:
    roster = _roster(Net(), ignored=frozenset({"scale", "second.0.weight"}))
    assert _names(roster) == ["first.weight", "first.bias", "second.1.weight", "second.1.bias"]


def test_the_ignored_names_are_read_from_torchs_attribute() -> None:
    net = Net()
    assert ignored_names(net) == frozenset()
    setattr(net, IGNORE_ATTRIBUTE, ["scale", "buffer"])
    assert ignored_names(net) == {"scale", "buffer"}


def test_delayed_parameters_are_marked() -> None:
    roster = _roster(Net(), delayed=frozenset({"first.bias"}))
    assert [spec.name for spec in roster.specs if spec.delayed] == ["first.bias"]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_marked(kind: type[nn.Module]) -> None:
    module = nn.Sequential(kind(4, 2, sparse=True), kind(4, 2), nn.Linear(2, 2))
    assert [spec.sparse for spec in _roster(module).specs] == [True, False, False, False]
    assert [makes_sparse_gradients(child) for child in module] == [True, False, False]


def test_a_lazy_parameter_is_refused_by_name() -> None:
    with pytest.raises(StateError, match=r"'1\.weight'.*lazy.*before wrapping"):
        _roster(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))


def test_a_computed_parameter_is_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    module._parameters["weight"] = module.weight * 2
    with pytest.raises(StateError, match=r"'weight' is computed from other tensors.*_to_ignore_for_model"):
        _roster(module)
    _roster(module, ignored=frozenset(["weight"]))


def test_rows_have_the_fields_that_are_announced() -> None:
    rows = _roster(Net()).rows()
    assert all(len(row) == len(SPEC_FIELDS) for row in rows)
    assert rows[1] == ("first.weight", (2, 3), (3, 1), "float32", "cpu", True, False, False, "")


def test_training_is_the_modules() -> None:
    net = Net()
    roster = _roster(net)
    assert roster.training()
    net.eval()
    assert not roster.training()


# -- changes -------------------------------------------------------------------------------------------


def _swap_for_another_name(net: Net) -> None:
    net.other = net.scale
    del net.scale


CHANGES: dict[str, tuple[Callable[[Net], object], str]] = {
    "freeze": (lambda net: net.first.weight.requires_grad_(False), "'first.weight' was frozen"),
    "unfreeze": (lambda net: net.first.bias.requires_grad_(True), "'first.bias' was unfrozen"),
    "add": (lambda net: setattr(net, "extra", nn.Parameter(torch.ones(1))), "'extra' was added"),
    "add in child": (lambda net: setattr(net.first, "more", nn.Parameter(torch.ones(1))), "'first.more' was added"),
    "add a module": (
        lambda net: setattr(net, "third", nn.Linear(2, 2)),
        "'third.bias' was added; 'third.weight' was added",
    ),
    "remove": (lambda net: delattr(net.first, "weight"), "'first.weight' was removed"),
    "set to None": (lambda net: setattr(net, "scale", None), "'scale' was removed"),
    "replace": (
        lambda net: setattr(net.first, "weight", nn.Parameter(torch.zeros(2, 3))),
        "'first.weight' was replaced",
    ),
    "replace a module": (
        lambda net: net.second.__setitem__(0, nn.Linear(2, 2, bias=False)),
        "'second.0.weight' was replaced",
    ),
    "rename": (_swap_for_another_name, "'other' was added; 'scale' was removed"),
    "cast a part": (
        lambda net: net.first.double(),
        "'first.bias' was cast to float64; 'first.weight' was cast to float64",
    ),
    "cast another part": (lambda net: net.second[1].double(), "'second.1.bias' was cast to float64; 'second.1."),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_noticed_and_put_in_words(change: Callable[[Net], object], words: str) -> None:
    net = Net()
    net.first.bias.requires_grad_(False)
    roster = _roster(net)
    assert not roster.changed()
    change(net)
    assert roster.changed()
    newer = _roster(net)
    assert roster.difference(newer).startswith(words)
    assert not newer.changed()


def test_training_is_no_change() -> None:
    net = Net()
    roster = _roster(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.second(net.first(net.scale.expand(4, 3))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net.load_state_dict(net.state_dict())
    net.eval()
    net.requires_grad_(True)
    net.scale = net.scale
    assert not roster.changed()
    assert roster.difference(_roster(net)) == "nothing that matters"
