"""The table of hooks: ours come first, those of others wait for the average, and handles go on working."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from paceline.reduction.gradient_hooks import HookKey, HookTable, table_of


class Key(HookKey):
    """The key of a hook of ours; ``averaging`` says whether the backward that runs is to be averaged."""

    averaging = True

    def averages(self, param: Tensor) -> bool:
        return self.averaging


@pytest.fixture
def param() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def test_hooks_of_others_wait_and_are_called_once(param: nn.Parameter) -> None:
    heard: list[str] = []
    param.register_post_accumulate_grad_hook(lambda _: heard.append("before"))
    table, key = table_of(param), Key()
    table[key] = lambda _: heard.append("ours")
    param.register_post_accumulate_grad_hook(lambda _: heard.append("after"))
    param.sum().backward()
    assert heard == ["ours"]
    table.call_others(param)
    assert heard == ["ours", "before", "after"]


def test_hooks_of_others_do_not_wait_if_nothing_is_averaged(param: nn.Parameter) -> None:
    heard: list[str] = []
    table, key = table_of(param), Key()
    key.averaging = False
    param.register_post_accumulate_grad_hook(lambda _: heard.append("theirs"))
    table[key] = lambda _: heard.append("ours")
    param.sum().backward()
    # Ours begin the backward, by which the others know whether to wait. So ours come first, whenever they are put in.
    assert heard == ["ours", "theirs"]
    del table[key]
    param.sum().backward()
    assert heard == ["ours", "theirs", "theirs"]


@pytest.mark.parametrize("registered", ["before", "after"])
def test_a_handle_takes_its_hook_away(param: nn.Parameter, registered: str) -> None:
    heard: list[str] = []
    if registered == "after":
        table_of(param)
    handle = param.register_post_accumulate_grad_hook(lambda _: heard.append("theirs"))
    table = table_of(param)
    gc.collect()
    handle.remove()
    param.sum().backward()
    table.call_others(param)
    assert heard == []


def test_replacing_a_hook_of_ours_keeps_its_place(param: nn.Parameter) -> None:
    heard: list[str] = []
    table, first, second = table_of(param), Key(), Key()
    for key, name in ((first, "first"), (second, "second"), (first, "first again")):
        table[key] = lambda _, name=name: heard.append(name)
    param.sum().backward()
    assert heard == ["first again", "second"]


def test_a_parameter_has_one_table_which_goes_with_it(param: nn.Parameter) -> None:
    table = weakref.ref(table_of(param))
    assert table_of(param) is table()
    assert isinstance(table(), HookTable)
    assert copy.deepcopy(param)._post_accumulate_grad_hooks is None
    del param
    gc.collect()


def test_hooks_of_a_frozen_parameter_are_there_when_it_is_unfrozen(param: nn.Parameter) -> None:
    heard: list[str] = []
    param.requires_grad_(False)
    table_of(param)[Key()] = lambda _: heard.append("ours")
    param.requires_grad_(True)
    param.sum().backward()
    assert heard == ["ours"]
