"""How tensors become plain memory for a collective, and how results get back where they belong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline import _torch
from paceline.errors import BadCollectiveError
from paceline.transport.shm.span import span


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements lie in memory one after another, as they are."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


class Packing:
    """The plain forms of a collective's tensors. Plain tensors stand for themselves."""

    __slots__ = ("_back",)

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []

    def read(self, tensor: Tensor) -> Tensor:
        """The plain form of a tensor that is only read."""
        if type(tensor) is not Tensor:
            tensor = _torch.settle_async_tensor(tensor)
        if not is_plain(tensor):
            tensor = _copy(tensor)
        return tensor

    def write(self, tensor: Tensor) -> Tensor:
        """The plain form of a tensor that is only written."""
        return self._written(tensor, with_contents=False)

    def update(self, tensor: Tensor) -> Tensor:
        """The plain form of a tensor that is read and written."""
        return self._written(tensor, with_contents=True)

    def read_apart(self, tensor: Tensor, outputs: Iterable[Tensor]) -> Tensor:
        """The plain form of a tensor that is read while ``outputs``, which may be on the same memory, are written."""
        packed = self.read(tensor)
        if any(_overlap(packed, output) for output in outputs):
            packed = packed.clone()
        return packed

    def __bool__(self) -> bool:
        """Whether there is something to :meth:`unpack`."""
        return bool(self._back)

    def unpack(self) -> None:
        """Copy results to the tensors they are for."""
        with torch.no_grad():
            for target, packed in self._back:
                target.copy_(packed)

    def _written(self, tensor: Tensor, *, with_contents: bool) -> Tensor:
        if type(tensor) is not Tensor:
            tensor = _torch.settle_async_tensor(tensor)
        if is_plain(tensor):
            return tensor
        if any(step == 0 and extent > 1 for step, extent in zip(tensor.stride(), tensor.shape, strict=True)):
            raise BadCollectiveError(
                "the result cannot be written to a tensor that shows one element in several places (expand()): "
                "clone() it before the collective"
            )
        packed = _copy(tensor) if with_contents else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._back.append((tensor, packed))
        return packed


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return copied.copy_(tensor)


def _overlap(one: Tensor, other: Tensor) -> bool:
    first, second = span(one), span(other)
    return first[0] < second[0] + second[1] and second[0] < first[0] + first[1]
