"""``Launcher``: how collectives are handed to the kernel, and what a call gets back for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline import _torch
from paceline.transport import checks
from paceline.transport.calls import Calls
from paceline.transport.checks import KERNEL_CODES
from paceline.transport.codes import Kind
from paceline.transport.herald import Herald
from paceline.transport.kernel import Channel, Job
from paceline.transport.packing import Packing
from paceline.transport.work import ENDED, ShmWork

Start = Callable[[bool, float], Sequence[Job]]
"""Begins the jobs of a collective, inline or not, with a time-out."""


class Launcher(Calls):
    """What a group on a channel has in common, whatever the collective."""

    channel: Channel
    _timeout_s: float
    _sequence: int
    _herald: Herald

    def _limit_s(self, opts: Any) -> float:
        asked = opts.timeout.total_seconds()
        return asked if asked > 0 else self._timeout_s

    def _launch(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        start: Start,
        opts: Any,
        packing: Packing | None = None,
        after: Callable[[], None] | None = None,
    ) -> Any:
        self._sequence += 1
        if packing:
            after = packing.unpack
        on_end = _torch.start_profiler_range(f"shm:{name}", inputs) if _torch.is_profiling() else None
        inline = not opts.asyncOp
        try:
            jobs = start(inline, self._limit_s(opts))
            if not inline:
                return self._work(jobs, outputs, after, on_end)
            for job in jobs:
                job.wait()
        except BaseException:
            if on_end is not None:
                on_end()
            raise
        if after is not None:
            after()
        if on_end is not None:
            on_end()
        return ENDED

    def _work(
        self,
        jobs: Sequence[Job],
        outputs: list[Tensor],
        after: Callable[[], None] | None,
        on_end: Callable[[], None] | None,
    ) -> ShmWork:
        work = ShmWork(jobs, outputs, herald=self._herald, after=after, on_end=on_end)
        if after is not None or on_end is not None:
            # Whoever looks at the result need not have waited through this work.
            self._herald.watch(work)
        return work

    def _exchange(
        self,
        sends: Sequence[tuple[int, int]],
        recvs: Sequence[tuple[int, int]],
        *,
        same: bool,
        kind: Kind,
        root: int,
        packing: Packing,
    ) -> Start:
        dtype = packing.kept[-1].dtype

        def start(inline: bool, timeout_s: float) -> Sequence[Job]:
            return [
                self.channel.exchange(
                    sends,
                    recvs,
                    same=same,
                    kind=kind,
                    dtype=dtype,
                    root=root,
                    timeout_s=timeout_s,
                    inline=inline,
                    keep=packing.kept,
                )
            ]

        return start

    def _reduce_exchange(
        self,
        sends: Sequence[int],
        counts: Sequence[int],
        output: Tensor,
        opts: Any,
        *,
        kind: Kind,
        root: int,
        packing: Packing,
    ) -> Start:
        op = hash(opts.reduceOp)
        code = KERNEL_CODES[op].get(output.dtype)
        if code is None:
            raise checks.refuse_reduction(output.dtype, op)

        def start(inline: bool, timeout_s: float) -> Sequence[Job]:
            return [
                self.channel.reduce_exchange(
                    sends,
                    counts,
                    output.data_ptr(),
                    dtype=code,
                    op=op,  # type: ignore[arg-type]
                    kind=kind,
                    root=root,
                    timeout_s=timeout_s,
                    inline=inline,
                    keep=packing.kept,
                )
            ]

        return start


def one_after_another(starts: Sequence[Start]) -> Start:
    if len(starts) == 1:
        return starts[0]

    def start(inline: bool, timeout_s: float) -> Sequence[Job]:
        return [job for each in starts for job in each(inline, timeout_s)]

    return start
