"""Making tensors alike on all ranks: parameters when a module is wrapped, buffers around forward."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, methodcaller
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


def _kinds(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors by dtype, in the order in which a message has them."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # Widest elements first: each part then starts at a multiple of its element size.
    return sorted(by_dtype.values(), key=lambda kind: -kind[0].element_size())


def _packed_once(tensors: Sequence[Tensor]) -> Tensor:
    """The message of a `Packing`, in a fraction of the time that it takes to make one."""
    with torch.no_grad():
        flats = [_torch.flatten_dense(kind).view(torch.uint8) for kind in _kinds(tensors)]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


class Packing:
    """Tensors of any dtype and one device, and a flat message with a place for each of them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = _kinds(tensors)
        self._sizes_bytes = [sum(tensor.numel() * tensor.element_size() for tensor in kind) for kind in self._kinds]
        self.tensors = [tensor for kind in self._kinds for tensor in kind]
        self._places: list[Tensor] = []
        # It outlives the inference mode that it may be made in, where tensors are such that nobody may write later.
        with torch.inference_mode(False):
            self.message = torch.empty(sum(self._sizes_bytes), dtype=torch.uint8, device=tensors[0].device)

    def make_places(self) -> None:
        """In good time, while the message is on its way: it takes a while if there are many."""
        if not self._places:
            with torch.inference_mode(False):
                for kind, part in zip(self._kinds, self.message.split(self._sizes_bytes), strict=True):
                    self._places += _torch.unflatten_dense(part.view(kind[0].dtype), kind)

    @property
    def places(self) -> list[Tensor]:
        """What the message holds for each of the tensors."""
        self.make_places()
        return self._places

    def take_memory(self) -> None:
        """Have room for the message. It is not kept between broadcasts, unlike the places, which take long to make."""
        self.message.untyped_storage().resize_(self.message.numel())

    def release_memory(self) -> None:
        self.message.untyped_storage().resize_(0)

    def pack(self) -> None:
        with torch.no_grad():
            _torch.copy_each(self.places, self.tensors)

    def unpack(self) -> None:
        """Write what the message holds into the tensors, in place."""
        with torch.no_grad():
            _torch.copy_each(self.tensors, self.places)


class Broadcast:
    """A message on its way from one rank to the others."""

    def __init__(self, message: Tensor, *, source: int, group: dist.ProcessGroup, channel: Channel) -> None:
        self._channel = channel
        # Not every backend keeps what it sends.
        self._message = message
        channel.progress.start("broadcast", "parameters or buffers", message)
        work = dist.broadcast(message, group_src=source, group=group, async_op=True)
        assert work is not None
        self._work = work

    def wait(self, what: str) -> None:
        self._channel.wait(self._work, f"the broadcast of {what}")


class Delivery:
    """Rank ``source``'s values on their way into ``tensors`` on all ranks, a large chunk at a time.

    The first leaves at once: who has something else to do does it before :meth:`finish`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        source: int,
        group: dist.ProcessGroup,
        channel: Channel,
        what: str,
        chunk_bytes: int,
    ) -> None:
        self._source, self._group, self._channel, self._what = source, group, channel, what
        self._chunks = _chunks(tensors, chunk_bytes)
        self._under_way = self._send_next()

    def _send_next(self) -> tuple[Packing | None, Broadcast] | None:
        chunk = next(self._chunks, None)
        if chunk is None:
            return None
        packing = None if dist.get_rank(self._group) == self._source else Packing(chunk)
        message = _packed_once(chunk) if packing is None else packing.message
        return packing, Broadcast(message, source=self._source, group=self._group, channel=self._channel)

    def finish(self) -> None:
        """Return once all tensors have been overwritten."""
        while self._under_way is not None:
            packing, message = self._under_way
            if packing is None:
                message.wait(self._what)
            else:
                packing.make_places()
                message.wait(self._what)
                packing.unpack()
            self._under_way = self._send_next()


def _chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors in order, those of one device and of about so many bytes together."""
    chunk: list[Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        if chunk and (size_bytes >= chunk_bytes or tensor.device != chunk[0].device):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(tensor)
        size_bytes += tensor.numel() * tensor.element_size()
    if chunk:
        yield chunk


class Place(NamedTuple):
    """A buffer, its (first) full name, and every dictionary that holds it, with the key there."""

    name: str
    buffer: Tensor
    holders: list[tuple[dict[str, Tensor | None], str]]


_layout = attrgetter("shape", "dtype", "device")
_values = methodcaller("values")


class BufferSync:
    """Keeps the buffers of a module alike across ranks. Looks at the module each time: buffers get reassigned."""

    def __init__(self, module: nn.Module, *, ignored: frozenset[str]) -> None:
        self._module = module
        self._ignored = ignored
        self.hook: BufferHook | None = None
        self._on_their_way: list[tuple[Packing, Broadcast]] = []
        self._visit()

    def _visit(self) -> None:
        """Find every buffer that takes part."""
        self._tree = ModuleTree(self._module)
        self._holders = [owner._buffers for _, owner in self._tree.owners]
        self._keys, self._held = self._what_is_held()
        found: dict[int, Place] = {}
        for (prefix, _), holder in zip(self._tree.owners, self._holders, strict=True):
            for key, buffer in holder.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None or name in self._ignored:
                    continue
                if id(buffer) not in found:
                    found[id(buffer)] = Place(name, buffer, [])
                found[id(buffer)].holders.append((holder, key))
        self._places = list(found.values())
        self._buffers = [_torch.local_tensor(place.buffer) for place in self._places]
        self._layouts: list[Any] = []
        self._packings: list[Packing] = []

    def _what_is_held(self) -> tuple[list[str], list[Tensor | None]]:
        # At C speed: this runs before every forward.
        return list(chain.from_iterable(self._holders)), list(chain.from_iterable(map(_values, self._holders)))

    def tree(self) -> ModuleTree:
        """The modules as of now."""
        self.places()
        return self._tree

    def places(self) -> list[Place]:
        """Each buffer that takes part, as of now."""
        if self._tree.changed():
            self._visit()
        else:
            keys, held = self._what_is_held()
            if keys != self._keys or not all(map(is_, held, self._held)):
                self._visit()
        return self._places

    def _packed(self) -> list[Packing]:
        """The buffers as messages, one a device; kept, as packing costs more than sending."""
        self.places()
        layouts = list(map(_layout, self._buffers))
        if layouts != self._layouts:
            self._layouts = layouts
            devices = dict.fromkeys(buffer.device for buffer in self._buffers)
            self._packings = [Packing([b for b in self._buffers if b.device == device]) for device in devices]
        return self._packings

    def is_empty(self) -> bool:
        """Whether there was no buffer to synchronise when somebody last looked, and there still is none."""
        return not self._places and not self.places()

    def named(self) -> dict[str, Tensor]:
        return {place.name: place.buffer for place in self.places()}

    def broadcast(self, *, source: int, group: dist.ProcessGroup, channel: Channel, keep_old: bool) -> None:
        """Give all ranks the buffers of rank ``source``.

        With ``keep_old`` the buffers become new tensors instead of being overwritten: an earlier forward may
        have saved them for its backward. The source does not wait: it has what it needs.
        """
        self.wait()
        is_source = dist.get_rank(group) == source
        for packing in self._packed():
            packing.take_memory()
            if is_source:
                packing.pack()
            message = Broadcast(packing.message, source=source, group=group, channel=channel)
            if is_source:
                self._on_their_way.append((packing, message))
                continue
            message.wait("buffers")
            if keep_old:
                self._replace(packing)
            else:
                packing.unpack()
            packing.release_memory()

    def _replace(self, packing: Packing) -> None:
        """Put new tensors with the values of the message in the place of the old ones."""
        values = dict(zip(map(id, packing.tensors), packing.places, strict=True))
        for place in self._places:
            local = _torch.local_tensor(place.buffer)
            if id(local) in values:
                with torch.inference_mode(False):
                    renewed = torch.empty_like(local).copy_(values[id(local)])
                    if local is not place.buffer:
                        renewed = _torch.wrap_local(renewed, place.buffer)
                for holder, key in place.holders:
                    holder[key] = renewed

    def runs_hook(self, location: BufferHookLocation) -> bool:
        return self.hook is not None and self.hook.location is location

    def run_hook(self, channel: Channel) -> Callable[[], None] | None:
        """Let the hook synchronise the buffers; what waits for it, if it did not do so itself."""
        assert self.hook is not None
        futures = self.hook.hook(self.hook.state, self.named())
        if futures is None:
            return None

        def wait() -> None:
            for future in futures:
                channel.wait_future(future, "a buffer hook")

        return wait

    def wait(self) -> None:
        """Let the broadcasts that this rank sent come to their end."""
        while self._on_their_way:
            packing, message = self._on_their_way.pop()
            message.wait("buffers")
            packing.release_memory()
