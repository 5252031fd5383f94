"""Broadcasts tensors of one rank to all others: the state of a module when it is wrapped, buffers around forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from paceline import _torch
from paceline.control import Channel
from paceline.gradients.plan import MB

CHUNK_BYTES = 250 * MB
"""How much is broadcast at once when a module is wrapped."""


def _kinds(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group the tensors by dtype, in the order in which a message has them."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # The widest elements come first, so that each part starts at a multiple of its element size.
    return sorted(by_dtype.values(), key=lambda kind: -kind[0].element_size())


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of a `FlatMessage` of these tensors, in a fraction of the time that it takes to make one."""
    with torch.no_grad():
        flats = [_torch.flatten_dense(kind).view(torch.uint8) for kind in _kinds(tensors)]
    return flats[0] if len(flats) == 1 else torch.cat(flats)


class FlatMessage:
    """A flat tensor of bytes with a view for each of some tensors, which may have any dtype and are on one device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = _kinds(tensors)
        self._sizes_bytes = [sum(tensor.numel() * tensor.element_size() for tensor in kind) for kind in self._kinds]
        self.tensors = [tensor for kind in self._kinds for tensor in kind]
        self._views: list[Tensor] = []
        # Nobody may later write to a tensor that was made in inference mode, and this one outlives the mode.
        with torch.inference_mode(False):
            self.bytes = torch.empty(sum(self._sizes_bytes), dtype=torch.uint8, device=tensors[0].device)

    def make_views(self) -> None:
        """Make the views while the message is on its way, since it takes a while if there are many."""
        if not self._views:
            with torch.inference_mode(False):
                for kind, part in zip(self._kinds, self.bytes.split(self._sizes_bytes), strict=True):
                    self._views += _torch.unflatten_dense(part.view(kind[0].dtype), kind)

    @property
    def views(self) -> list[Tensor]:
        """What the message holds for each tensor."""
        self.make_views()
        return self._views

    def take_memory(self) -> None:
        """Allocate the bytes. They are not kept between broadcasts, unlike the views, which take long to make."""
        self.bytes.untyped_storage().resize_(self.bytes.numel())

    def release_memory(self) -> None:
        self.bytes.untyped_storage().resize_(0)

    def pack(self) -> None:
        with torch.no_grad():
            _torch.copy_each(self.views, self.tensors)

    def unpack(self) -> None:
        """Write what the message holds into the tensors, in place."""
        with torch.no_grad():
            _torch.copy_each(self.tensors, self.views)


class StateBroadcast:
    """The values of rank ``source`` on their way into ``tensors`` on all ranks, a large chunk at a time.

    The first chunk leaves at once. The caller can do something else before :meth:`finish`.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        source: int,
        channel: Channel,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._source, self._channel = source, channel
        self._chunks = _chunks(list(map(_torch.local_tensor, tensors)), chunk_bytes)
        self._under_way = self._send_next()

    def _send_next(self) -> tuple[FlatMessage | None, Callable[[], None]] | None:
        chunk = next(self._chunks, None)
        if chunk is None:
            return None
        flat = None if self._channel.rank == self._source else FlatMessage(chunk)
        message = flattened(chunk) if flat is None else flat.bytes
        return flat, self._channel.start_broadcast(message, "parameters and buffers", source=self._source)

    def finish(self) -> None:
        """Return once all tensors have been overwritten."""
        while self._under_way is not None:
            flat, finish = self._under_way
            if flat is not None:
                flat.make_views()
            finish()
            if flat is not None:
                flat.unpack()
            self._under_way = self._send_next()


def _chunks(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """Cut the tensors, in their order, into chunks of one device and of about ``chunk_bytes``."""
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
