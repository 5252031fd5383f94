"""Uneven inputs: what a rank does that has run out of inputs while others have not.

[Note: one word before each exchange]
Inside ``join()`` every rank that still has inputs says one word before its forward and one before a backward that
synchronises, and every rank that has not listens: whether buffers will be broadcast, whether gradients will be
reduced, and who is still there. The ranks that have joined then do their part of exactly those collectives, with
nothing to add. Forwards and backwards may come in any number and order.

torch's ``Join`` with several joinables calls the hooks of all of them once an iteration. A second word in one would
make the others do their part twice, so there the word before forward promises the backward as well, exactly one.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook

from paceline import _torch
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
    channel.progress.start("all-reduce", "the word of join()", said)
    work = dist.all_reduce(said, op=dist.ReduceOp.MAX, group=channel.group, async_op=True)
    assert work is not None
    channel.wait(work, "join()")
    return said.tolist()


@dataclass
class Joining:
    """What a wrapper knows of the ``join()`` it is in, or was last in."""

    divide_by_initial_world_size: bool = True
    alone: bool = False
    """There are no other joinables, so backwards have a word of their own."""
    has_run: bool = False
    """Some iteration of this wrapper ran inside ``join()``."""
    has_shadowed: bool = False
    """This rank has followed others' backwards, so its gradients are not its own."""
    authoritative_rank: int = 0
    """Whose model was the final one."""


def say_word(ddp: DistributedDataParallel, word: Word) -> int:
    """Before an exchange, inside ``join()`` or not: the rank whose buffers are the ones to follow."""
    inside = _torch.is_joining(ddp)
    Join.notify_join_context(ddp)
    weighing = ddp._reducer.weighing
    weighing.by_participants = inside and not ddp.joining.divide_by_initial_world_size
    weighing.apart = inside
    if not inside:
        return 0
    ddp.joining.has_run = True
    return exchange_word(word, channel=ddp._reducer.channel, device=ddp.join_device).rank


def say_word_of_backward(ddp: DistributedDataParallel) -> None:
    """A backward that synchronises begins: have the ranks that have joined follow it."""
    if ddp.joining.alone and _torch.is_joining(ddp):
        say_word(ddp, Word(sync_gradients=True, sync_buffers=False, rank=ddp._reducer.channel.rank))


class DDPJoinHook(JoinHook):
    """Shadows the collectives of one wrapper for a rank that has joined."""

    def __init__(
        self, ddp: DistributedDataParallel, *, divide_by_initial_world_size: bool, alone: bool = False
    ) -> None:
        super().__init__()
        self.ddp = ddp
        ddp.joining.divide_by_initial_world_size = divide_by_initial_world_size
        ddp.joining.alone = alone
        if alone:
            ref = weakref.ref(ddp)

            def before_sync() -> None:
                wrapper = ref()
                if wrapper is not None:
                    say_word_of_backward(wrapper)

            ddp._reducer.before_sync = before_sync

    def main_hook(self) -> None:
        """[Note: one word before each exchange]: do this rank's part of what the others do next."""
        ddp, joining, reducer = self.ddp, self.ddp.joining, self.ddp._reducer
        joining.has_run = True
        word = exchange_word(SILENCE, channel=reducer.channel, device=ddp.join_device)
        reducer.weighing.by_participants = not joining.divide_by_initial_world_size
        if word.sync_buffers and not ddp.has_buffer_hook:
            ddp.sync_buffers(source=word.rank)
        if word.sync_gradients:
            reducer.shadow_backward()
            joining.has_shadowed = True

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: give everybody the model of the highest rank that trained to the end."""
        sync_final_model(self.ddp, is_last_joiner=is_last_joiner)


def sync_final_model(ddp: DistributedDataParallel, *, is_last_joiner: bool) -> None:
    """Give all ranks the model of the highest rank that joined last."""
    joining, reducer = ddp.joining, ddp._reducer
    source = highest_rank(is_last_joiner, rank=reducer.channel.rank, channel=reducer.channel, device=ddp.join_device)
    joining.authoritative_rank = source
    ddp.broadcast_state(source=source, with_buffers=ddp.forward_sync_buffers)
    reducer.weighing.by_participants = reducer.weighing.apart = False
    if joining.has_shadowed:
        # The others' gradients served the optimizers inside join(); they are not this rank's to add to.
        joining.has_shadowed = False
        for slot in reducer.trainable():
            slot.param.grad = None
    reducer.before_sync = None
    _torch.leave_join(ddp)
