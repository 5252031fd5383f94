"""``paceline.assert_replicas_equal``: an immediate comparison of what all ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import _torch
from paceline.control import Channel
from paceline.control.digest import digest
from paceline.control.replicas import NO_OPINION, Held, compare
from paceline.ddp.arguments import choose_group
from paceline.ddp.module import DistributedDataParallel
from paceline.ddp.verify import BUFFER, OPTIMIZER, PARAMETER, optimizer_digests
from paceline.errors import ReplicaMismatchError, StateError


def assert_replicas_equal(model: nn.Module, *, optimizer: Optimizer | None = None) -> None:
    """Raise ``ReplicaMismatchError`` on all ranks unless ``model`` is the same to the bit on all of them.

    This is a collective over the wrapper's group, or over the default group for a module that is not wrapped. It
    compares parameters and buffers, and the state and options of ``optimizer`` if one is given. ``DDP(verify_every=N)``
    does so regularly.

    >>> import torch, paceline
    >>> world = paceline.init()
    >>> model = paceline.DDP(torch.nn.Linear(4, 2))
    >>> paceline.assert_replicas_equal(model)
    >>> paceline.shutdown()
    """
    channel, module, ignored = _parts_of(model)
    params = {name: param for name, param in module.named_parameters() if name not in ignored}
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
    rows: dict[Held, Tensor] = {Held(PARAMETER, name): digest(param) for name, param in params.items()}
    rows |= {Held(BUFFER, name): digest(buffer) for name, buffer in buffers.items()}
    if optimizer is not None:
        states = optimizer_digests(params, [optimizer])
        none = torch.tensor(NO_OPINION, device="cpu")
        rows |= {Held(OPTIMIZER, name): states.get(name, none) for name in params}
    found = compare(channel, list(rows), torch.stack([row.cpu() for row in rows.values()])) if rows else None
    if found is not None:
        raise ReplicaMismatchError(f"Replicas differ. The first difference: {found}.")


def _parts_of(model: nn.Module) -> tuple[Channel, nn.Module, frozenset[str]]:
    if isinstance(model, DistributedDataParallel):
        return model.channel, model.module, frozenset(model.parameters_to_ignore)
    if any(map(_torch.is_dtensor, model.parameters())):
        raise StateError(
            "This module has DTensor parameters, of which ranks hold different parts: only ranks of a wrapper's group "
            "can be compared. Give the wrapper instead of its module."
        )
    return Channel(choose_group(None, None)), model, frozenset()
