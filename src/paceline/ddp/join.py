"""Uneven inputs: what a rank does when it has run out of inputs and others have not.

[Note: one word before each exchange]
Inside ``join()`` every rank that still has inputs says one word before its forward, and one before a backward that
synchronises. Every rank that has joined listens. The word tells whether buffers will be broadcast, whether gradients
will be reduced, and which rank is still there. The ranks that have joined then do their part of exactly those
collectives, with nothing to add. Forwards and backwards may come in any number and order.

torch's ``Join`` with several joinables calls the hooks of all of them once in each iteration. A second word would make
the others do their part twice, so there the word before forward also promises exactly one backward.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from paceline import _torch
from paceline.control import Channel
from paceline.ddp.arguments import Switches
from paceline.ddp.buffers import BufferSync
from paceline.reduction.reducer import Reducer


class JoinWord(NamedTuple):
    """What a rank says. What all ranks hear is the maximum of it over the ranks."""

    sync_gradients: bool
    sync_buffers: bool
    rank: int
    """The highest rank that still has inputs: its buffers are the ones to follow."""


SILENCE = JoinWord(sync_gradients=False, sync_buffers=False, rank=-1)


def highest_rank(condition: bool, *, rank: int, channel: Channel) -> int:
    """The highest rank for which ``condition`` holds; -1 if there is none."""
    return _highest([rank if condition else -1], channel=channel)[0]


def _highest(numbers: list[int], *, channel: Channel) -> list[int]:
    said = torch.tensor(numbers, device="cpu")
    channel.start_all_reduce(said, "the word of join()", op=dist.ReduceOp.MAX)()
    return said.tolist()


class JoinableWrapper(Protocol):
    """What uneven inputs need from a wrapper, beyond its being a ``Joinable``."""

    joining: Joining

    def _broadcast_state(self, *, source: int, with_buffers: bool) -> None:
        """Give all ranks the parameters, and buffers, of rank ``source``."""


class Joining:
    """What a wrapper does inside ``join()``, and what it knows of the ``join()`` that it was last in."""

    def __init__(self, wrapper: Joinable, reducer: Reducer, buffers: BufferSync, switches: Switches) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._reducer, self._buffers, self._switches = reducer, buffers, switches
        self.divide_by_initial_world_size = True
        self.alone = False
        """Whether there are no other joinables. Then backwards have a word of their own."""
        self.has_run = False
        """Whether an iteration of this wrapper ran inside ``join()``."""
        self.has_shadowed = False
        """Whether this rank has followed backwards of others. Then its gradients are not its own."""
        self.authoritative_rank = 0
        """The rank whose model was the final one."""

    def begin(self, *, divide_by_initial_world_size: bool, alone: bool) -> None:
        """A ``join()`` begins."""
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self.alone = alone
        if alone:
            ref = weakref.ref(self)

            def before_sync() -> None:
                joining = ref()
                if joining is not None:
                    joining._say_word_of_backward()

            self._reducer.before_sync = before_sync

    def say_word(self, *, sync_gradients: bool, sync_buffers: bool) -> int:
        """Say the word before an exchange, if inside ``join()``. Return the rank whose buffers are to be followed."""
        wrapper = self._wrapper()
        assert wrapper is not None
        inside = _torch.is_joining(wrapper)
        Join.notify_join_context(wrapper)
        weighing = self._reducer.weighing
        weighing.by_participants = inside and not self.divide_by_initial_world_size
        weighing.apart = inside
        if not inside:
            return 0
        self.has_run = True
        return self.exchange(JoinWord(sync_gradients, sync_buffers, self._reducer.channel.rank)).rank

    def _say_word_of_backward(self) -> None:
        """A backward that synchronises begins: have the ranks that have joined follow it."""
        if self.alone and _torch.is_joining(self._wrapper()):
            self.say_word(sync_gradients=True, sync_buffers=False)

    def exchange(self, word: JoinWord) -> JoinWord:
        """Say ``word``, and hear what all ranks have said."""
        numbers = [int(word.sync_gradients), int(word.sync_buffers), word.rank]
        gradients, buffers, rank = _highest(numbers, channel=self._reducer.channel)
        return JoinWord(bool(gradients), bool(buffers), rank)

    def follow(self) -> None:
        """Do this rank's part of what the others do next ([Note: one word before each exchange])."""
        self.has_run = True
        word = self.exchange(SILENCE)
        self._reducer.weighing.by_participants = not self.divide_by_initial_world_size
        if word.sync_buffers and self._buffers.hook is None:
            self._buffers.broadcast(source=word.rank)
        if word.sync_gradients:
            self._reducer.shadow_backward()
            self.has_shadowed = True

    def end(self, wrapper: JoinableWrapper, *, is_last_joiner: bool) -> None:
        """All have joined: give all ranks the model of the highest rank that joined last."""
        reducer, channel = self._reducer, self._reducer.channel
        source = highest_rank(is_last_joiner, rank=channel.rank, channel=channel)
        self.authoritative_rank = source
        wrapper._broadcast_state(source=source, with_buffers=self._switches.forward_sync_buffers)
        reducer.weighing.by_participants = reducer.weighing.apart = False
        if self.has_shadowed:
            # The others' gradients served the optimizers inside join(). They are not this rank's to add to.
            self.has_shadowed = False
            for slot in reducer.trainable():
                slot.param.grad = None
        reducer.before_sync = None
        _torch.leave_join(wrapper)


class DDPJoinHook(JoinHook):
    """Shadows the collectives of one wrapper for a rank that has joined."""

    def __init__(self, ddp: JoinableWrapper, *, divide_by_initial_world_size: bool, alone: bool = False) -> None:
        super().__init__()
        self.ddp = ddp
        ddp.joining.begin(divide_by_initial_world_size=divide_by_initial_world_size, alone=alone)

    def main_hook(self) -> None:
        self.ddp.joining.follow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.ddp.joining.end(self.ddp, is_last_joiner=is_last_joiner)
