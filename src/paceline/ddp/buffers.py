"""The buffers of a module, and keeping them equal on all ranks around forward."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline import _torch
from paceline.ddp.arguments import Switches
from paceline.ddp.broadcast import FlatMessage
from paceline.errors import StateError
from paceline.gradients.roster import ModuleTree
from paceline.reduction.reducer import Reducer


class BufferHookLocation(enum.Enum):
    """When a buffer hook runs."""

    PRE_FORWARD = enum.auto()
    POST_FORWARD = enum.auto()


@dataclass(frozen=True)
class BufferHook:
    """A function of the user that synchronises the buffers instead of the broadcast."""

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any
    location: BufferHookLocation


class HeldBuffer(NamedTuple):
    """A buffer, its (first) full name, and every dictionary that holds it, with the key there."""

    name: str
    buffer: Tensor
    holders: list[tuple[dict[str, Tensor | None], str]]


_layout = attrgetter("shape", "dtype", "device")
_values = methodcaller("values")


class Buffers:
    """The buffers of ``module`` that take part. It looks at the module each time, as buffers get reassigned."""

    def __init__(self, module: nn.Module, *, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._visit()

    def _visit(self) -> None:
        """Find every buffer that takes part."""
        self._tree = ModuleTree(self._module)
        self._holders = [_torch.buffers_of(owner) for _, owner in self._tree.owners]
        self._keys, self._held = self._what_is_held()
        found: dict[int, HeldBuffer] = {}
        for (prefix, _), holder in zip(self._tree.owners, self._holders, strict=True):
            for key, buffer in holder.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None or name in self._ignored:
                    continue
                if id(buffer) not in found:
                    found[id(buffer)] = HeldBuffer(name, buffer, [])
                found[id(buffer)].holders.append((holder, key))
        self._found = list(found.values())
        self._local = [_torch.local_tensor(held.buffer) for held in self._found]
        self._layouts: list[Any] = []
        self._messages: list[FlatMessage] = []

    def _what_is_held(self) -> tuple[list[str], list[Tensor | None]]:
        # These run at the speed of C. That matters, since they run before every forward.
        return list(chain.from_iterable(self._holders)), list(chain.from_iterable(map(_values, self._holders)))

    def tree(self) -> ModuleTree:
        """The modules as of now."""
        self.found()
        return self._tree

    def found(self) -> list[HeldBuffer]:
        """Each buffer that takes part, as of now."""
        if self._tree.changed():
            self._visit()
        else:
            keys, held = self._what_is_held()
            if keys != self._keys or not all(map(is_, held, self._held)):
                self._visit()
        return self._found

    def is_empty(self) -> bool:
        """Whether there was no buffer when somebody last looked, and there still is none."""
        return not self._found and not self.found()

    def named(self) -> dict[str, Tensor]:
        return {held.name: held.buffer for held in self.found()}

    def messages(self) -> list[FlatMessage]:
        """The buffers as messages, one for each device. They are kept, as making them costs more than sending."""
        self.found()
        layouts = list(map(_layout, self._local))
        if layouts != self._layouts:
            self._layouts = layouts
            devices = dict.fromkeys(buffer.device for buffer in self._local)
            self._messages = [FlatMessage([b for b in self._local if b.device == device]) for device in devices]
        return self._messages

    def replace(self, message: FlatMessage) -> None:
        """Put new tensors with the values of ``message`` where its tensors are held."""
        values = dict(zip(map(id, message.tensors), message.views, strict=True))
        for _, buffer, holders in self._found:
            local = _torch.local_tensor(buffer)
            if id(local) in values:
                with torch.inference_mode(False):
                    renewed = torch.empty_like(local).copy_(values[id(local)])
                    if local is not buffer:
                        renewed = _torch.wrap_local(renewed, buffer)
                for holder, key in holders:
                    holder[key] = renewed


class BufferSync:
    """Keeps ``buffers`` equal on the ranks of ``reducer``: by a broadcast before forward, or by the user's hook."""

    def __init__(self, buffers: Buffers, reducer: Reducer, switches: Switches) -> None:
        self._buffers, self._reducer, self._switches = buffers, reducer, switches
        self.hook: BufferHook | None = None
        self._on_their_way: list[tuple[FlatMessage, Callable[[], None]]] = []

    def is_due(self) -> bool:
        """Whether the next forward synchronises buffers."""
        return (
            self._switches.forward_sync_buffers
            and self._switches.require_forward_param_sync
            and self._reducer.channel.size > 1
            and not self._buffers.is_empty()
        )

    def note_forward(self, *, syncs: bool) -> None:
        """A forward has ended. Unless it was one that synchronises, the next one does not broadcast buffers."""
        self._switches.require_forward_param_sync = syncs

    def runs_hook(self, location: BufferHookLocation) -> bool:
        """Whether the next forward calls the user's hook at ``location``."""
        return self.hook is not None and self.hook.location is location and self.is_due()

    def run_hook(self) -> None:
        """Let the user's hook synchronise the buffers. The futures that it returns are waited for in backward."""
        assert self.hook is not None
        futures, channel = self.hook.hook(self.hook.state, self._buffers.named()), self._reducer.channel
        if futures is None:
            return

        def wait() -> None:
            for future in futures:
                channel.wait_future(future, "a buffer hook")

        self._reducer.on_finish.append(wait)

    def broadcast(self, *, source: int = 0) -> None:
        """Give all ranks the buffers of rank ``source`` (its number in this group).

        An earlier forward may have saved the buffers for its backward. While there is such a forward, the buffers are
        replaced by new tensors instead of being overwritten. The source does not wait: it has what it needs.
        """
        if _torch.is_transforming():
            self._check_held()
        with _torch.outside_transforms():
            self._broadcast(source)

    def _check_held(self) -> None:
        """Refuse what ``functional_call`` has put in the place of a buffer, if it is a value of a transform."""
        for name, buffer in self._buffers.named().items():
            if _torch.is_transformed(buffer):
                raise StateError(
                    f"This forward would broadcast the buffer {name!r}, but functional_call has put a value in its "
                    "place that belongs to a transform of torch.func (vmap, grad, ...). Call the module itself, as "
                    "ddp.module(...), or set ddp.forward_sync_buffers = False."
                )

    def _broadcast(self, source: int) -> None:
        self._reducer.compare_if_due()
        self._wait()
        channel = self._reducer.channel
        is_source = channel.rank == source
        for message in self._buffers.messages():
            message.take_memory()
            if is_source:
                message.pack()
            finish = channel.start_broadcast(message.bytes, "buffers", source=source)
            if is_source:
                self._on_their_way.append((message, finish))
                continue
            finish()
            if self._reducer.forwards:
                self._buffers.replace(message)
            else:
                message.unpack()
            message.release_memory()

    def _wait(self) -> None:
        """Let the broadcasts that this rank has sent come to their end."""
        while self._on_their_way:
            message, finish = self._on_their_way.pop()
            finish()
            message.release_memory()
