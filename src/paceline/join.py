"""Uneven inputs: what a rank does that has run out of inputs while others have not.

[Note: one word before each forward]
Inside ``join()`` every rank that still has inputs says one word before its forward, and every rank that has not
listens: whether buffers will be broadcast, whether backward will synchronise, and who is still there. The ranks
that have joined then do their part of exactly those collectives, with nothing to add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from paceline.control import Channel

if TYPE_CHECKING:
    from paceline.module import DistributedDataParallel


class Word(NamedTuple):
    """The maximum over the ranks of what each says."""

    sync_gradients: bool
    sync_buffers: bool
    rank: int
    """The highest rank that still has inputs: its buffers are the ones to follow."""


SILENCE = Word(sync_gradients=False, sync_buffers=False, rank=-1)


def exchange_word(word: Word, *, channel: Channel, device: torch.device) -> Word:
    gradients, buffers, rank = _highest(
        [int(word.sync_gradients), int(word.sync_buffers), word.rank], channel=channel, device=device
    )
    return Word(bool(gradients), bool(buffers), rank)


def highest_rank(condition: bool, *, rank: int, channel: Channel, device: torch.device) -> int:
    """The highest rank for which ``condition`` holds; -1 if there is none."""
    return _highest([rank if condition else -1], channel=channel, device=device)[0]


def _highest(numbers: list[int], *, channel: Channel, device: torch.device) -> list[int]:
    said = torch.tensor(numbers, device=device)
    work = dist.all_reduce(said, op=dist.ReduceOp.MAX, group=channel.group, async_op=True)
    assert work is not None
    channel.wait(work, "join()")
    return said.tolist()


class DDPJoinHook(JoinHook):
    """Shadows the collectives of one wrapper for a rank that has joined."""

    def __init__(self, ddp: DistributedDataParallel, *, divide_by_initial_world_size: bool) -> None:
        super().__init__()
        self.ddp = ddp
        ddp.begin_join(divide_by_initial_world_size=divide_by_initial_world_size)

    def main_hook(self) -> None:
        """Do this rank's part of one iteration of the ranks that still have inputs."""
        self.ddp.shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: give everybody the model of a rank that trained to the end."""
        self.ddp.sync_final_model(is_last_joiner=is_last_joiner)


def hook_from_arguments(ddp: DistributedDataParallel, kwargs: dict[str, Any]) -> DDPJoinHook:
    return DDPJoinHook(ddp, divide_by_initial_world_size=bool(kwargs.get("divide_by_initial_world_size", True)))
