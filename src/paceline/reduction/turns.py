"""The order in which several wrappers send their buckets, if one backward passes through all of them.

[Note: several wrappers in one backward]
Collectives are matched by their order, so the buckets of two wrappers have to leave in one order on every rank. Buckets
leave when they are complete, though, and ranks may use different parameters: a bucket of the first wrapper may wait on
one rank when the second wrapper begins, and may have left on another. So a wrapper that begins has those that began
before it send all their buckets but the last, complete or not. What comes for them afterwards is late
([Note: late gradients] in backward.py), and will be in the next step again. When the backward is over, all wrappers
send what is left but the last bucket. Then they end one after the other, in the order in which they began.

This holds for wrappers whose backwards run on one thread. Autograd has a thread for each accelerator, so two wrappers
on two devices of one process need groups of their own.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch.distributed as dist

from paceline.errors import StateError
from paceline.reduction.weighing import Weighing


class Sender(Protocol):
    weighing: Weighing

    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def is_sending(self) -> bool:
        """Whether a backward runs that averages gradients."""

    def send_all_but_last(self) -> None:
        """Send all buckets but the last, complete or not."""


_senders: list[weakref.ref[Sender]] = []
"""Those whose backwards have begun, in this order. Some may have ended since."""


def begin(sender: Sender) -> None:
    """Let ``sender``, whose backward begins now, send after those that began before."""
    _senders[:] = [ref for ref in _senders if (each := ref()) is not None and each is not sender and each.is_sending]
    _senders.append(weakref.ref(sender))


def after_others(sender: Sender, *, begins: bool) -> None:
    """Have the other senders of the group send what ``sender`` must not overtake, in the order in which they began."""
    for ref in _senders:
        other = ref()
        if other is None or other is sender or not other.is_sending or other.group is not sender.group:
            continue
        if begins and (sender.weighing.apart or other.weighing.apart):
            # A rank without inputs goes through the wrappers one after the other, and cannot send in this order.
            raise StateError(
                "Inside join(), one backward went through two wrappers of the same process group. Wrap both modules "
                "together in one wrapper, or run a backward for each of them."
            )
        other.send_all_but_last()
