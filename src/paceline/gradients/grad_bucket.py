"""What a comm hook receives; the methods are those of ``torch.distributed.GradBucket``."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.futures import Future

from paceline.gradients.bucket import Bucket
from paceline.gradients.strides import dense_stride


class GradBucket:
    """One bucket as a comm hook sees it."""

    def __init__(self, bucket: Bucket, *, is_last: bool, buffer: Tensor | None = None) -> None:
        self._bucket = bucket
        self._is_last = is_last
        flat = bucket.payload if buffer is None else buffer
        assert flat is not None
        # The hook gets a tensor object of its own: it may resize what it is given, and ours must not change.
        self._buffer = flat if flat.is_sparse else flat.view(-1)

    def index(self) -> int:
        """The bucket's number in launch order."""
        return self._bucket.spec.index

    def buffer(self) -> Tensor:
        """The flat gradients, not divided by anything."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let ``buffer`` stand for the flat gradients of this bucket for the rest of this step."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The parts of :meth:`buffer`, shaped as the parameters."""
        buffer, start = self._buffer, self._buffer.storage_offset()
        slots, offsets = self._bucket.slots, self._bucket.spec.offsets
        return [
            buffer.as_strided(slot.local.shape, dense_stride(slot.local), start + offset)
            for slot, offset in zip(slots, offsets, strict=True)
        ]

    def parameters(self) -> list[Tensor]:
        """The parameters, or what this rank holds of them, in the order of :meth:`gradients`."""
        return [slot.local for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last


CommHook = Callable[[object, GradBucket], "Future[Tensor]"]
