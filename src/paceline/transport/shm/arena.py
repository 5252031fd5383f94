"""Memory for buckets that all ranks of a host have mapped, so that reducing it copies nothing.

``Arenas.allocate`` is a collective: every rank makes a segment of its own and maps everybody else's. A bucket lives on
the rank's own segment. The kernel is told where all of them are, and reads and writes each of them. The memory of a
rank lives as long as a tensor on it does, and what was mapped of other ranks goes with it.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.control.tensor_line import TensorLine
from paceline.errors import PacelineError
from paceline.transport.shm.codes import Kind
from paceline.transport.shm.kernel import Endpoint, Job
from paceline.transport.shm.segment import Segment, end_copies

_logger = logging.getLogger("paceline")
_has_said = False


class Arenas:
    """The arenas of one group, as this rank has mapped them."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._mapped: dict[int, list[Segment]] = {}
        self._count = 0

    def allocate(self, nbytes: int, *, timeout_s: float, wait: Callable[[Job], None] | None = None) -> Tensor | None:
        """Return ``nbytes`` bytes of zeros in shared memory, or None on all ranks if some rank has no room for them.

        All ranks of the group ask for the same number, in the same order with respect to collectives. Callers who
        listen for news while they wait for the other ranks pass ``wait``.
        """
        number, self._count = self._count, self._count + 1
        problem = "another rank could not make or map its part"
        try:
            own: Segment | None = Segment.create(max(nbytes, 1))
        except (PacelineError, OSError) as error:
            own, problem = None, str(error)
        mapped: list[Segment] = []
        agreed = False
        try:
            gather = partial(self._all_gather, wait)
            line = TensorLine(gather, name=f"arena {number}", rank=self._endpoint.rank, size=self._endpoint.size)
            told = line.agree("names", own.name if own is not None else "", timeout_s=timeout_s)
            names = [name if isinstance(name, str) else "" for name in told.values]
            ok = own is not None and all(names) and self._map(own, names, mapped)
            agreed = line.agree("mapped", int(ok), timeout_s=timeout_s).values == (1,) * self._endpoint.size
        finally:
            if own is not None:
                own.unlink()
                if not agreed:
                    own.close_file()
        if own is None or not agreed:
            for segment in mapped:
                segment.close()
            if self._endpoint.rank == 0:
                _say(problem)
            return None
        self._endpoint.register_arena(number, [segment.address for segment in mapped], own.nbytes)
        self._mapped[number] = [segment for segment in mapped if segment is not own]
        # The tensor's storage refers to this window, and the arena is forgotten when the window goes. To watch the
        # mapping itself would be too late: when we hear of its end, its addresses may be somebody else's already.
        window = (ctypes.c_char * own.nbytes).from_buffer(own.memory)
        tensor = torch.frombuffer(window, dtype=torch.uint8)
        weakref.finalize(window, _forget, weakref.ref(self), number, own.address).atexit = False
        own.copy_in_forks()
        return tensor[:nbytes]

    def close(self) -> None:
        """Let go of other ranks' memory, which nothing reduces any more. Our own stays with its tensors."""
        for segments in self._mapped.values():
            for segment in segments:
                segment.close()
        self._mapped.clear()

    def forget(self, number: int) -> None:
        """Let go of an arena of which no tensor is left."""
        self._endpoint.unregister_arena(number)
        for segment in self._mapped.pop(number, ()):
            segment.close()

    def _map(self, own: Segment, names: Sequence[str], mapped: list[Segment]) -> bool:
        for rank, name in enumerate(names):
            if rank == self._endpoint.rank:
                mapped.append(own)
                continue
            try:
                segment = Segment.open(name, nbytes=own.nbytes)
            except (PacelineError, OSError):
                return False
            segment.close_file()
            mapped.append(segment)
        return True

    def _all_gather(
        self, wait: Callable[[Job], None] | None, mine: Tensor, everybodys: list[Tensor], timeout_s: float
    ) -> None:
        job = self._endpoint.exchange(
            [(mine.data_ptr(), mine.nbytes)],
            [(row.data_ptr(), row.nbytes) for row in everybodys],
            same=True,
            kind=Kind.ALL_GATHER,
            dtype=mine.dtype,
            timeout_s=timeout_s,
            inline=wait is None,
            keep=(mine, *everybodys),
        )
        if wait is None:
            job.wait()
        else:
            wait(job)


def _say(problem: str) -> None:
    """Warn, once in a process, that gradients are copied."""
    global _has_said
    if not _has_said:
        _has_said = True
        _logger.warning("paceline: buckets are not in shared memory, and are copied instead: %s", problem)


def _forget(arenas: weakref.ref[Arenas], number: int, address: int) -> None:
    end_copies(address)
    found = arenas()
    if found is not None:
        found.forget(number)
