"""What a rank writes, of which the launcher keeps the end in memory: a rank that prints for ever fills no disk."""

from __future__ import annotations

import os
import select

from paceline import threads

KEPT_BYTES = 64 * 1024
_PIECE_BYTES = 64 * 1024
# No pipe holds more than this (fs.pipe-max-size), unless root has allowed it.
_PIPE_BYTES = 1024 * 1024
# The thread is done as soon as the pipe is empty. It takes this long only if it gets no core.
_END_S = 10.0


class Output:
    """The output of one rank: a pipe, and a thread that reads it, so that the rank never waits for long."""

    def __init__(self, rank: int) -> None:
        self._kept = bytearray()
        # The rank writes to ``descriptor``.
        self._source, self.descriptor = os.pipe()
        os.set_blocking(self._source, False)
        # The end of the file does not tell when to stop: a process that the rank has left behind may hold the pipe.
        self._is_over, self._over = os.pipe()
        self._thread = threads.start(self._read, name=f"output-{rank}", stop=self._stop, within_s=_END_S)

    def hand_over(self) -> None:
        """Let go of the rank's end of the pipe, because the rank has it, or will not be started."""
        os.close(self.descriptor)

    def end(self) -> bytes:
        """Read what is still in the pipe, and return the last bytes that were written."""
        if self._over >= 0:
            ended = self._thread.end()
            self._stop()
            if ended:
                os.close(self._source)
                os.close(self._is_over)
        return bytes(self._kept)

    def _stop(self) -> None:
        if self._over >= 0:
            over, self._over = self._over, -1
            os.close(over)

    def _read(self) -> None:
        waiter = select.poll()
        waiter.register(self._source, select.POLLIN)
        waiter.register(self._is_over, 0)  # that the other end was closed is always told
        while self._is_over not in dict(waiter.poll()):
            if self._take() == 0:
                return
        left = _PIPE_BYTES
        while left > 0 and (taken := self._take()):
            left -= taken

    def _take(self) -> int | None:
        """Read some, and return how much; 0 if nobody can write any more, and None if there is nothing now."""
        try:
            piece = os.read(self._source, _PIECE_BYTES)
        except BlockingIOError:
            return None
        self._kept += piece
        del self._kept[:-KEPT_BYTES]
        return len(piece)
