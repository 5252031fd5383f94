"""``paceline.load_state_dict``: names with and without what wrappers put into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import BadArgumentError, BadTypeError
from tests.on_ranks import on_ranks


class Inner(nn.Module):
    """Has a part that is called as wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.norm = nn.BatchNorm1d(2)


def _made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = make()
    with torch.no_grad():
        for param in module.parameters():
            param.normal_()
    return module


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "wrapped": paceline.DDP,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "compiled wrapper": lambda module: torch.compile(paceline.DDP(module), backend="eager"),
    "wrapper of compiled": lambda module: paceline.DDP(torch.compile(module, backend="eager")),
}
MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(2, 2),
    Inner,
    lambda: nn.Sequential(Inner(), nn.Linear(2, 1)),
    # Every name of the bare module begins with a wrapper's word.
    lambda: nn.ModuleDict({"module": nn.Linear(2, 2)}),
    lambda: nn.ModuleDict({"module": Inner()}),
]


@on_ranks(world_size=2)
def test_every_way_to_save_loads_in_every_way(rank, world_size):
    for number, make in enumerate(MODULES):
        for saved_as in WRAPS.values():
            source = _made(make, seed=number)
            state = {name: value.clone() for name, value in saved_as(source).state_dict().items()}
            for loaded_as in WRAPS.values():
                target = _made(make, seed=100)
                report = paceline.load_state_dict(loaded_as(target), state)
                assert not report
                assert str(report) == "everything fits"
                for name, value in source.state_dict().items():
                    assert torch.equal(target.state_dict()[name], value), name


def test_parts_that_were_compiled_or_wrapped() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    source, target = _made(model, 1), _made(model, 2)
    state = {name.replace("1.", "1._orig_mod.module."): value for name, value in source.state_dict().items()}
    paceline.load_state_dict(target, {f"module.{name}": value for name, value in state.items()})
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())
    target[0] = torch.compile(target[0], backend="eager")
    paceline.load_state_dict(target, {name: value + 1 for name, value in state.items()})
    assert torch.equal(target[0].weight, source[0].weight + 1)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight": torch.ones(3, 2)}, r"missing in the state: bias"),
    ({"weight": torch.ones(3, 2), "bias": torch.ones(3), "head.x": torch.ones(1)}, r"not in the module: head\.x"),
    (
        {"module.weight": torch.ones(4, 2), "module.bias": torch.ones(3)},
        r"of another shape: weight \(4, 2\) in the state, \(3, 2\) in the module\. Nothing was loaded",
    ),
    ({"weight": 1.0, "bias": torch.ones(3)}, r"of another shape: weight \(a float in the state\)"),
    ({"module.weight": torch.ones(3, 2), "weight": torch.ones(3, 2), "bias": torch.ones(3)}, r"module: module\.weight"),
    ({"model": {"weight": torch.ones(3, 2)}, "epoch": 3}, r"a whole checkpoint: give the part.*state\['model'\]"),
    ({f"x{n}": torch.ones(1) for n in range(20)}, r"x0, .*x7 and 12 more"),
    ({}, r"missing in the state: weight, bias"),
]


@pytest.mark.parametrize(("state", "words"), BAD)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(state: dict[str, Any], words: str) -> None:
    module = _made(lambda: nn.Linear(2, 3), 0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(BadArgumentError, match=words):
        paceline.load_state_dict(module, state)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


def test_what_fits_can_be_loaded() -> None:
    module = _made(lambda: nn.Linear(2, 3), 0)
    bias = module.bias.clone()
    state = {"module.weight": torch.ones(3, 2), "module.bias": torch.ones(4), "module.x": torch.ones(1)}
    report = paceline.load_state_dict(module, state, strict=False)
    assert report
    assert (report.missing, report.unexpected) == ((), ("module.x",))
    assert report.reshaped == ("bias (4,) in the state, (3,) in the module",)
    assert torch.equal(module.weight, torch.ones(3, 2))
    assert torch.equal(module.bias, bias)


def test_bad_types() -> None:
    with pytest.raises(BadTypeError, match="takes a module and the dictionary"):
        paceline.load_state_dict({}, nn.Linear(1, 1))  # type: ignore[arg-type]
