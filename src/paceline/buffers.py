"""Making tensors alike on all ranks: parameters when a module is wrapped, buffers around forward."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import _torch
from paceline.control import Channel
from paceline.roster import ModuleTree


class BufferHookLocation(enum.Enum):
    """When a buffer comm hook runs."""

    PRE_FORWARD = enum.auto()
    POST_FORWARD = enum.auto()


@dataclass(frozen=True)
class BufferHook:
    """A function of the user that synchronises the buffers instead of the broadcast."""

    hook: Callable[[Any, dict[str, Tensor]], Any]
    state: Any
    location: BufferHookLocation


class Broadcast:
    """Tensors of any dtype on their way from one rank, packed into one flat message."""

    def __init__(self, tensors: Sequence[Tensor], *, source: int, group: dist.ProcessGroup, channel: Channel) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        # Widest elements first: each part then starts at a multiple of its element size.
        self._kinds = sorted(by_dtype.values(), key=lambda kind: -kind[0].element_size())
        self._channel = channel
        self._is_source = dist.get_rank(group) == source
        if self._is_source:
            with torch.no_grad():
                flats = [_torch.flatten_dense(kind) for kind in self._kinds]
            self._message = flats[0] if len(flats) == 1 else torch.cat([flat.view(torch.uint8) for flat in flats])
        else:
            first = self._kinds[0][0]
            mixed = len(self._kinds) > 1
            numel = sum(self._sizes_bytes()) if mixed else sum(tensor.numel() for tensor in self._kinds[0])
            dtype = torch.uint8 if mixed else first.dtype
            self._message = torch.empty(numel, dtype=dtype, device=first.device)
        channel.progress.start("broadcast", "parameters or buffers", self._message)
        work = dist.broadcast(self._message, group_src=source, group=group, async_op=True)
        assert work is not None
        self._work = work

    def _sizes_bytes(self) -> list[int]:
        return [sum(tensor.numel() * tensor.element_size() for tensor in kind) for kind in self._kinds]

    def wait(self, what: str) -> None:
        self._channel.wait(self._work, f"the broadcast of {what}")

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """(tensor, what the source holds for it), empty at the source itself."""
        if self._is_source:
            return []
        flats = [self._message] if len(self._kinds) == 1 else self._message.split(self._sizes_bytes())
        pairs: list[tuple[Tensor, Tensor]] = []
        for kind, flat in zip(self._kinds, flats, strict=True):
            pairs += zip(kind, _torch.unflatten_dense(flat.view(kind[0].dtype), kind), strict=True)
        return pairs

    def write(self) -> None:
        """Write the source's values into the tensors, in place."""
        pairs = self.parts()
        if pairs:
            with torch.no_grad():
                _torch.copy_each([tensor for tensor, _ in pairs], [value for _, value in pairs])


def broadcast_in_place(
    tensors: Sequence[Tensor],
    *,
    source: int,
    group: dist.ProcessGroup,
    channel: Channel,
    what: str,
    chunk_bytes: int,
) -> None:
    """Write rank ``source``'s values into ``tensors`` on all ranks, a large chunk at a time."""
    chunk: list[Tensor] = []
    size_bytes = 0
    for n, tensor in enumerate(tensors):
        chunk.append(tensor)
        size_bytes += tensor.numel() * tensor.element_size()
        last = n == len(tensors) - 1
        if last or size_bytes >= chunk_bytes or tensors[n + 1].device != tensor.device:
            message = Broadcast(chunk, source=source, group=group, channel=channel)
            message.wait(what)
            message.write()
            chunk, size_bytes = [], 0


class Place(NamedTuple):
    """A buffer, its (first) full name, and every dictionary that holds it, with the key there."""

    name: str
    buffer: Tensor
    holders: list[tuple[dict[str, Tensor | None], str]]


class BufferSync:
    """Keeps the buffers of a module alike across ranks. Reads the module anew each time: buffers get reassigned."""

    def __init__(self, module: nn.Module, *, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.hook: BufferHook | None = None
        self._on_its_way: Broadcast | None = None
        self._visit()

    def _visit(self) -> None:
        self._tree = ModuleTree(self._module)
        self._holders = [(f"{prefix}." if prefix else "", owner._buffers) for prefix, owner in self._tree.owners]

    def _revisit(self) -> None:
        if self._tree.changed():
            self._visit()

    def places(self) -> list[Place]:
        """Each buffer that takes part, as of now."""
        self._revisit()
        found: dict[int, Place] = {}
        for prefix, holder in self._holders:
            for key, buffer in holder.items():
                if buffer is None or prefix + key in self._ignored:
                    continue
                if id(buffer) not in found:
                    found[id(buffer)] = Place(prefix + key, buffer, [])
                found[id(buffer)].holders.append((holder, key))
        return list(found.values())

    def is_empty(self) -> bool:
        """Whether there is no buffer to synchronise."""
        self._revisit()
        return not any(
            buffer is not None and prefix + key not in self._ignored
            for prefix, holder in self._holders
            for key, buffer in holder.items()
        )

    def named(self) -> dict[str, Tensor]:
        return {place.name: place.buffer for place in self.places()}

    def broadcast(self, *, source: int, group: dist.ProcessGroup, channel: Channel, keep_old: bool) -> None:
        """Give all ranks the buffers of rank ``source``.

        With ``keep_old`` the buffers become new tensors instead of being overwritten: an earlier forward may
        have saved them for its backward. The source does not wait: it has what it needs.
        """
        self.wait()
        places = self.places()
        for device in dict.fromkeys(place.buffer.device for place in places):
            here = [place for place in places if place.buffer.device == device]
            message = Broadcast([place.buffer for place in here], source=source, group=group, channel=channel)
            if dist.get_rank(group) == source:
                self._on_its_way = message
                continue
            message.wait("buffers")
            if not keep_old:
                message.write()
                continue
            values = {id(tensor): value for tensor, value in message.parts()}
            for place in here:
                # A tensor of its own: the message would stay in memory with the last of its parts.
                renewed = torch.empty_like(place.buffer).copy_(values[id(place.buffer)])
                for holder, key in place.holders:
                    holder[key] = renewed

    def wait(self) -> None:
        """Let the last broadcast that this rank sent come to its end."""
        if self._on_its_way is not None:
            message, self._on_its_way = self._on_its_way, None
            message.wait("buffers")
