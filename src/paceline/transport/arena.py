"""Memory for buckets that all ranks of a host have mapped, so that reducing it copies nothing.

``Arenas.allocate`` is a collective: every rank makes a segment of its own and maps everybody else's. A tensor on one's
own is what a bucket lives on; the kernel, told where everybody's is, reads and writes all of them. The memory of a rank
lives as long as a tensor of it does; what was mapped of others' goes with it.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.transport.codes import Kind
from paceline.transport.kernel import Channel
from paceline.transport.segment import PREFIX, Segment
from paceline.transport.work import ShmWork

_logger = logging.getLogger("paceline")
_has_said = False

# A name, or an empty one for "I could not": of the same length on all ranks.
_WORD_BYTES = 64


class Arenas:
    """The arenas of one group, as this rank has mapped them."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._mapped: dict[int, list[Segment]] = {}
        self._count = 0

    def allocate(
        self, nbytes: int, *, timeout_s: float, wait: Callable[[ShmWork], None] | None = None
    ) -> Tensor | None:
        """``nbytes`` bytes of zeros in shared memory, or None on all ranks if some rank has no room for them.

        All ranks of the group ask for the same number, in the same order with respect to collectives. ``wait`` waits
        for the other ranks, for callers who listen for news meanwhile.
        """
        number, self._count = self._count, self._count + 1
        problem = "another rank could not make or map its part"
        try:
            own: Segment | None = Segment.create(max(nbytes, 1))
        except (PacelineError, OSError) as error:
            own, problem = None, str(error)
        mapped: list[Segment] = []
        try:
            names = self._tell(own.name if own is not None else "", timeout_s=timeout_s, wait=wait)
            ok = own is not None and all(names) and self._map(own, names, mapped)
            agreed = all(self._tell("yes" if ok else "", timeout_s=timeout_s, wait=wait))
        finally:
            if own is not None:
                own.unlink()
                own.close_file()
        if own is None or not agreed:
            for segment in mapped:
                segment.close()
            if self._channel.rank == 0:
                _say(problem)
            return None
        self._channel.register_arena(number, [segment.address for segment in mapped], own.nbytes)
        self._mapped[number] = [segment for segment in mapped if segment is not own]
        # What the tensor's storage refers to; when that goes, so does what we know of it. Not the mapping itself, which
        # is gone before anybody is told: its addresses may be somebody else's by then.
        window = (ctypes.c_char * own.nbytes).from_buffer(own.memory)
        tensor = torch.frombuffer(window, dtype=torch.uint8)
        weakref.finalize(window, _forget, weakref.ref(self), number).atexit = False
        return tensor[:nbytes]

    def close(self) -> None:
        """Let go of what is mapped of other ranks; nothing reduces it any more. Own memory stays with its tensors."""
        for segments in self._mapped.values():
            for segment in segments:
                segment.close()
        self._mapped.clear()

    def forget(self, number: int) -> None:
        """An arena of which no tensor is left."""
        self._channel.unregister_arena(number)
        for segment in self._mapped.pop(number, ()):
            segment.close()

    def _map(self, own: Segment, names: Sequence[str], mapped: list[Segment]) -> bool:
        for rank, name in enumerate(names):
            if rank == self._channel.rank:
                mapped.append(own)
                continue
            try:
                segment = Segment.open(name, nbytes=own.nbytes)
            except (PacelineError, OSError):
                return False
            segment.close_file()
            mapped.append(segment)
        return True

    def _tell(self, word: str, *, timeout_s: float, wait: Callable[[ShmWork], None] | None) -> list[str]:
        """Everybody's word."""
        mine = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
        encoded = word.encode()
        mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
        everybodys = mine.new_empty((self._channel.size, _WORD_BYTES))
        job = self._channel.exchange(
            [(mine.data_ptr(), mine.nbytes)],
            [(row.data_ptr(), row.nbytes) for row in everybodys],
            same=True,
            kind=Kind.ALL_GATHER,
            dtype=mine.dtype,
            timeout_s=timeout_s,
            inline=wait is None,
            keep=(mine, everybodys),
        )
        if wait is None:
            job.wait()
        else:
            wait(ShmWork((job,), [], herald=None))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in everybodys]


def _say(problem: str) -> None:
    """Once a process: it goes on, but gradients are copied."""
    global _has_said
    if not _has_said:
        _has_said = True
        _logger.warning("paceline: buckets are not in shared memory, and are copied instead: %s", problem)


def _forget(arenas: weakref.ref[Arenas], number: int) -> None:
    found = arenas()
    if found is not None:
        found.forget(number)


assert len(PREFIX) + 32 < _WORD_BYTES
