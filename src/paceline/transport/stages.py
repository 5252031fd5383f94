"""``Stages``: how the collectives of a group that spans hosts are run, and how they end.

A collective here is stages: shared memory, leaders, shared memory. When one fails, the rank tells its host and all
others (``lines``) and hangs up on them, so that nobody waits for what cannot come and all know why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline import _torch
from paceline.errors import PacelineError
from paceline.transport.calls import Calls
from paceline.transport.codes import Kind, Op, Status
from paceline.transport.conductor import Conductor
from paceline.transport.herald import Herald
from paceline.transport.host import Host
from paceline.transport.leaders import Leaders
from paceline.transport.lines import Lines, Report
from paceline.transport.messages import Messages
from paceline.transport.packing import Packing
from paceline.transport.work import ENDED, ShmWork

# How long a rank waits for the others to say why: all are to know within 2 s.
_CAUSE_S = 1.2
_STATUS = {"lost": Status.LOST, "failed": Status.POISONED, "disagreed": Status.DISAGREED}


@dataclass(frozen=True)
class Limits:
    """How long each stage may take. A rank that is stopped is noticed by its own host, when the time is up. Leaders of
    other hosts wait a little longer, and who waits for a leader longer still: they are to be told, not to suspect."""

    inside_s: float

    @property
    def between_s(self) -> float:
        return self.inside_s + _CAUSE_S

    @property
    def after_s(self) -> float:
        return self.inside_s + 3 * _CAUSE_S


class Stages(Calls):
    """What the collectives of a group that spans hosts have in common."""

    _names: Sequence[int]
    _hosts: Sequence[Sequence[int]]
    _mine: int
    _timeout_s: float
    _host: Host
    _leaders: Leaders | None
    _lines: Lines
    _messages: Messages
    _connections: list[Messages | Leaders]
    """To other ranks, as far as they have been made."""
    _herald: Herald
    _conductor: Conductor

    def _launch(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        stages: Callable[[Limits], None],
        opts: Any,
        packing: Packing | None = None,
        after: Callable[[], None] | None = None,
    ) -> Any:
        if packing:
            after = packing.unpack
        asked_s = opts.timeout.total_seconds()
        limits = Limits(asked_s if asked_s > 0 else self._timeout_s)
        on_end = _torch.start_profiler_range(f"shm:{name}", inputs) if _torch.is_profiling() else None

        def run() -> None:
            try:
                with torch.no_grad():
                    stages(limits)
                    if after is not None:
                        after()
            except Exception as error:
                raise self._failed(name, error) from error
            except BaseException:
                # Ctrl-C: the others are not left waiting.
                me = self._names[self._rank]
                self._give_up(Report(rank=me, why="failed", said=f"rank {me} was interrupted in {name}"))
                raise
            finally:
                if on_end is not None:
                    on_end()

        inline = not opts.asyncOp
        task = self._conductor.submit(run, inline=inline)
        if inline:
            task.wait()
            return ENDED
        return ShmWork((task,), outputs, herald=self._herald)

    def _gather(self, whole: Tensor, part: Tensor, *, kind: Kind = Kind.ALL_GATHER, what: str, limits: Limits) -> None:
        """Everybody's ``part`` into the rows of ``whole``, by rank."""
        block = part.new_empty((len(self._hosts[self._mine]), *part.shape))
        self._host.all_gather(block, part, kind=kind, timeout_s=limits.inside_s)
        if self._leaders is not None:
            self._leaders.all_gather(whole, block, what=what, timeout_s=limits.between_s)
        self._host.broadcast(whole, root=0, timeout_s=limits.after_s)

    def _host_of(self, rank: int) -> int:
        return next(index for index, ranks in enumerate(self._hosts) if rank in ranks)

    def _words(self, name: str, tensor: Tensor, *, op: Op | None = None, root: int | None = None) -> str:
        """What a rank is about to do, for the comparison between hosts."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        # As between ranks of a host: an empty tensor is often made without thinking of a dtype.
        moved = f"{tensor.numel()} x {dtype}" if tensor.numel() or op is not None else "nothing"
        of_root = "" if root is None else f" root {self._names[root]}"
        return f"{name}({'' if op is None else f'{op.name}, '}{moved}){of_root}"

    # -- when something fails --------------------------------------------------------------------------------

    def _failed(self, name: str, error: Exception) -> Exception:
        """Find out why, and tell: the group cannot go on."""
        if isinstance(error, PacelineError):
            self._give_up(Report.of(error, name, rank=self._names[self._rank]))
            return error
        suspects = [ranks[0] for ranks in self._hosts]
        report = self._cause(suspects, f"{name}: the exchange with the other hosts failed: {error}")
        self._give_up(report)
        return report.error()

    def _not_connected(self, error: Exception) -> Exception:
        """Why a backend could not be made, which is told: ``error`` of this rank, if nobody else has said anything."""
        me = self._names[self._rank]
        if isinstance(error, PacelineError):
            self._give_up(Report.of(error, "the making of a process group", rank=me))
            return error
        self._hang_up()
        # What is said of an argument was not caused by another rank.
        found = self._lines.find(_CAUSE_S) if isinstance(error, RuntimeError) else None
        said = f"the making of a process group failed on rank {me}: {error}"
        self._give_up(found or Report(rank=me, why="failed", said=said))
        return error if found is None else found.error()

    def _cause(self, suspects: Sequence[int], said: str) -> Report:
        """Why an exchange with ``suspects`` has failed; if nobody knows, one of those who say nothing is at fault."""
        # First, as who waits for this rank should find out as well, and may be the one who knows.
        self._hang_up()
        found = self._lines.find(_CAUSE_S)
        if found is not None:
            return found
        silent = self._lines.silent(suspects)
        if silent:
            said += f"; nothing is heard of rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        return Report(rank=silent[0] if len(silent) == 1 else None, why="lost", said=said)

    def _give_up(self, report: Report) -> None:
        self._lines.tell(report)
        self._hang_up()
        self._host.give_up(report.said, blamed=report.rank, status=_STATUS[report.why])

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.hang_up()
