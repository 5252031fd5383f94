"""What the constructor of a wrapper refuses, and how the other ranks hear of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from paceline.control import Channel
from paceline.errors import DisagreementError, StateError
from paceline.gradients.roster import Roster


@contextlib.contextmanager
def failure_is_reported(channel: Channel) -> Iterator[None]:
    """Report what the constructor raises: the other ranks may be about to compare notes with this one."""
    try:
        yield
    except DisagreementError:
        # All ranks raise it together.
        raise
    except BaseException as error:
        channel.report("the constructor of DistributedDataParallel", error)
        raise


def check_trainable(module: nn.Module, roster: Roster) -> None:
    if not any(spec.requires_grad for spec in roster.specs):
        raise StateError(
            "DistributedDataParallel is not needed when a module has no parameter that requires a gradient: "
            f"{type(module).__name__} has {len(roster.specs)} parameters and none is trainable. Use the "
            "module as it is."
        )
