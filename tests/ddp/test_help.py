"""What ``help(paceline.DDP)`` shows: every argument, and nothing that users should not call."""

from __future__ import annotations

import inspect

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as StockDDP

import paceline
from paceline.ddp.compat import TorchNames

# What is ours and public. All else that has no underscore is torch's, or a module's.
OURS = {
    "channel",
    "plan",
    "register_buffer_hook",
    "remove_comm_hook",
    "stats",
    "update_process_group",
    "weighted",
}


@pytest.mark.parametrize("name", list(inspect.signature(paceline.DDP).parameters))
def test_each_argument_is_described(name):
    told = inspect.getdoc(paceline.DDP).partition("Arguments:")[2]
    (line,) = [line for line in told.splitlines() if line.startswith(f"    {name}: ")]
    assert len(line.partition(": ")[2]) > 10


def test_public_names_are_torch_s_or_are_meant_for_users():
    # torch's class sets many of its attributes in its constructor, and so does ours, or it has properties for them.
    torchs = {name for name in vars(TorchNames) if isinstance(vars(TorchNames)[name], property)}
    torchs |= {"require_backward_grad_sync", *dir(StockDDP), *dir(nn.Module)}
    assert {name for name in dir(paceline.DDP) if not name.startswith("_")} - torchs == OURS
    for name in OURS:
        assert inspect.getdoc(getattr(paceline.DDP, name)), name
