"""Whether a wrapper can be used: nothing has failed for good, and no backward is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import _torch
from paceline.errors import StateError
from paceline.gradients.ledger import UNFINISHED
from paceline.reduction.phase import Phase

if TYPE_CHECKING:
    from paceline.reduction.reducer import Reducer


def check_usable(reducer: Reducer) -> None:
    """Raise if an earlier failure, here or on another rank, keeps the next step from being right."""
    remedy = "Start the job again, or build a new process group and wrapper."
    if not _torch.group_is_alive(reducer.exchange.group):
        raise StateError(f"The process group of this wrapper has been destroyed. {remedy}")
    if reducer.phase is Phase.BROKEN:
        since = "and its process group has been out of step with the other ranks since"
        raise StateError(f"This wrapper failed earlier ({reducer.last_error}), {since}. {remedy}")
    if reducer.phase is Phase.INTERRUPTED:
        under_way = reducer.backward.countdown.next_bucket if reducer.backward is not None else 0
        if under_way:
            raise StateError(
                f"The previous backward on rank {reducer.channel.rank} raised while {under_way} buckets were being "
                f"reduced, which the other ranks cannot undo. {remedy}"
            )
        reducer.phase = Phase.IDLE
    reducer.channel.check_news()
    if reducer.channel.given_up():
        reducer.phase = Phase.BROKEN
        raise StateError(
            f"An earlier step raised on this rank ({reducer.channel.rank}) and the other ranks have given up because "
            f"of it. {remedy}"
        )
    reducer.channel.retract()


def check_finished(reducer: Reducer) -> None:
    """Raise if a backward has begun and not ended."""
    if reducer.phase in (Phase.BACKWARD, Phase.INTERRUPTED):
        missing = reducer.backward.countdown.awaited() if reducer.backward is not None else []
        told = ", ".join(missing) or "(none: it raised at the end)"
        raise StateError(
            f"{UNFINISHED} On rank {reducer.channel.rank} a backward has begun and not ended; gradients still to "
            f"come: {told}."
        )
